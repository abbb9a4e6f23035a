"""`quantkit generate`: a text continued by an artifact, by a protected model, or by a model in float32."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from quantkit.cli.app import AsJson, CheckFiles, app
from quantkit.errors import InputError, not_one_of

if TYPE_CHECKING:
    from quantkit.runtime.chat import ChatTemplate, Message
    from quantkit.runtime.generate import Sampling
    from quantkit.runtime.tokenizer import Text


class GenerateOptions(TypedDict):
    """Arguments of both generate functions."""

    max_new_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]


Run = Callable[[Sequence[Sequence[int]]], Iterator[list[int | None]]]  # token ids to tokens, step by step
FROM_INPUT = "-"
UNFINISHED = "\ufffd"  # a tokenizer's sign for part of a character


@app.command(short_help="Continue a text with a quantized model.")
def generate(
    model: Annotated[
        str, typer.Argument(help="an artifact's folder, or a model, which then runs in float32")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="the beginning of a text; several make a batch; - reads standard input"),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="answer in the model's chat template; without PROMPTS a dialogue"),
    ] = False,
    system: Annotated[str | None, typer.Option(help="the system's turn before a chat")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="tokens to add")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="draw from the k most likely; 0 is no limit")] = 0,
    top_p: Annotated[float, typer.Option(help="draw from the most likely that reach p together")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="of the draws")] = None,
    threads: Annotated[int | None, typer.Option(help="threads  [default: all cores]")] = None,
    provider: Annotated[
        str | None, typer.Option(help="cpu, qnn, ...: provider of graphs with fixed shapes  [default: cpu]")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="http://MACHINE:PORT of a protected model's host; MODEL is its client")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="the host's token  [default: host.token beside MODEL]")
    ] = None,
    features: Annotated[str, typer.Option(help="float32, or float16: half the bytes to a host")] = "float32",
    check: CheckFiles = "quick",
    as_json: AsJson = False,
) -> None:
    """Continue a text with a quantized model; tokens appear as they are made."""
    from quantkit.runtime.chat import open_chat_template
    from quantkit.runtime.generate import Sampling, check_sampling
    from quantkit.runtime.generate import generate as generate_tokens
    from quantkit.runtime.session import open_session
    from quantkit.runtime.tokenizer import open_text

    prompts = _read_prompts(prompts or [], chat=chat)
    if system is not None and not chat:
        raise InputError("only a chat has a system's turn", where="--system", next_step="add --chat")
    _check_host_flags(host, token_file, features)
    if max_new_tokens < 1:
        raise InputError(f"{max_new_tokens}", where="--max-new-tokens", allowed="1 or more")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    check_sampling(sampling)
    if provider not in (None, "cpu"):
        _send_libraries_to_errors()
    with _artifact(model, check, is_client=host is not None) as folder:
        text = open_text(folder)
        template = open_chat_template(folder) if chat else None
        options: GenerateOptions = {
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "stop_ids": text.stop_ids,
        }
        beginnings = [""] * len(prompts) if chat else prompts
        run: Run
        if host:
            run = partial(_steps_from_host, folder, host, token_file, features, threads, options)
        else:
            session = open_session(folder, threads=threads, provider=provider)
            run = partial(generate_tokens, session, **options)
            if session.reads_and_answers:  # an answer is a text of its own and not the prompt's continuation
                beginnings = [""] * len(prompts)
        if template and not prompts:
            _talk(template, text, run, system)
            return
        steps = run(_encoded(prompts, text, template, system))
        if len(prompts) == 1 and not as_json:
            for piece in _stream(beginnings[0], steps, text):
                typer.echo(piece, nl=False)
        else:
            _show_all(prompts, beginnings, steps, text, as_json=as_json)


def _check_host_flags(host: str | None, token_file: Path | None, features: str) -> None:
    from quantkit.private.protocol import DTYPES

    if features not in DTYPES:
        raise not_one_of(features, DTYPES, where="--features")
    for flag, is_given in (("--token-file", token_file is not None), ("--features", features != "float32")):
        if is_given and host is None:
            raise InputError("no host is named that it is for", where=flag, next_step="add --host")


def _encoded(
    prompts: Sequence[str], text: Text, template: ChatTemplate | None, system: str | None
) -> list[list[int]]:
    """Token ids of texts to go on with, or of users' turns."""
    from quantkit.runtime.chat import conversation

    if template is None:
        return [text.encode(prompt) for prompt in prompts]
    turns = [template.render(conversation(prompt, system)) for prompt in prompts]
    return [text.encode(turn, adds_special_tokens=False) for turn in turns]


def _show_all(
    prompts: Sequence[str],
    beginnings: Sequence[str],
    steps: Iterator[list[int | None]],
    text: Text,
    *,
    as_json: bool,
) -> None:
    """The texts of a batch, when all have ended."""
    token_rows: list[list[int]] = [[] for _ in prompts]
    for tokens in steps:
        for row, token in zip(token_rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    if as_json:
        documents = [
            {"prompt": prompt, "text": text.decode(row), "tokens": row}
            for prompt, row in zip(prompts, token_rows, strict=True)
        ]
        typer.echo(json.dumps(documents, indent=2))
        return
    for number, (beginning, row) in enumerate(zip(beginnings, token_rows, strict=True), 1):
        typer.echo(f"[{number}] {beginning}{text.decode(row)}")


def _read_prompts(prompts: Sequence[str], *, chat: bool) -> list[str]:
    """The prompts; "-" is standard input to its end, and a chat that nobody types reads it too."""
    if chat and not prompts and not sys.stdin.isatty():
        prompts = [FROM_INPUT]
    if not chat and not prompts:
        raise InputError("no prompt", where="PROMPTS", allowed="a text, or - for standard input")
    if list(prompts).count(FROM_INPUT) > 1:
        raise InputError("standard input can be read once", where="PROMPTS", allowed="one -")
    return [sys.stdin.read().rstrip("\n") if prompt == FROM_INPUT else prompt for prompt in prompts]


def _talk(template: ChatTemplate, text: Text, run: Run, system: str | None) -> None:
    """Turn after turn from the terminal; the whole dialogue is read again for each answer."""
    from quantkit.runtime.chat import conversation

    turns: list[Message] = []
    typer.echo("an empty line or Ctrl-D ends the dialogue", err=True)
    while (line := _ask()).strip():
        turns += conversation(line, None if turns else system)
        pieces = []
        ids = text.encode(template.render(turns), adds_special_tokens=False)
        for piece in _stream("", run([ids]), text):
            typer.echo(piece, nl=False)
            pieces.append(piece)
        turns.append({"role": "assistant", "content": "".join(pieces).strip()})


def _ask() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


def _steps_from_host(
    folder: Path,
    url: str,
    token_file: Path | None,
    features: str,
    threads: int | None,
    options: GenerateOptions,
    ids: Sequence[Sequence[int]],
) -> Iterator[list[int | None]]:
    """Tokens step by step, computed by the client here and its host."""
    from quantkit.private.client.connection import connect, split_url
    from quantkit.private.client.model import generate_split, open_client
    from quantkit.private.files import default_token_file
    from quantkit.private.keys import read_token

    split_url(url)
    client = open_client(folder, threads=threads)
    path = token_file or default_token_file(folder)
    if not path.exists():
        raise InputError(
            "no token to show the host",
            where=str(path),
            next_step="copy the host's, and name it with --token-file",
        )
    opener = partial(connect, url, token=read_token(path), features=features)
    return generate_split(client, opener, ids, **options)


@contextmanager
def _artifact(model: str, check: str, *, is_client: bool) -> Iterator[Path]:
    """The artifact's folder, or a temporary float export of a model that is no artifact."""
    from quantkit.private.files import require_side
    from quantkit.runtime.graph import holds_model
    from quantkit.runtime.manifest import require_whole

    folder = Path(model).expanduser()
    require_side(folder, is_client=is_client)
    if is_client or holds_model(folder):
        require_whole(folder, check)
        yield folder
        return
    from quantkit.pipeline.stages.write import write_float_model
    from quantkit.runtime.machine.disk import temporary_folder

    with temporary_folder() as temporary:
        write_float_model(model, temporary)
        yield temporary


def _send_libraries_to_errors() -> None:
    """Redirect the standard output of vendors' libraries to stderr; stdout holds the answer alone."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
        os.dup2(2, 1)


def _stream(prompt: str, steps: Iterator[list[int | None]], text: Text) -> Iterator[str]:
    """One text, token by token; the answer is decoded as a whole, as a character may take several tokens."""
    tokens: list[int] = []
    shown = ""
    for number, (token,) in enumerate(steps):
        if number == 0:
            yield prompt
        if token is None:
            break
        tokens.append(token)
        decoded = text.decode(tokens)
        if decoded.startswith(shown) and not decoded.endswith(UNFINISHED):
            yield decoded[len(shown) :]
            shown = decoded
    yield text.decode(tokens)[len(shown) :] + "\n"
