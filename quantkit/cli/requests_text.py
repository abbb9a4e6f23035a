"""What `quantkit generate` does with a prompt: an artifact's text, or the original's in float32."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.cli.requests_host import Remote, require_side, steps_from_host
from quantkit.errors import InputError
from quantkit.runtime.generate import Sampling, check_sampling, generate
from quantkit.runtime.graph import holds_model
from quantkit.runtime.session import open_session
from quantkit.runtime.tokenizer import Text, open_text

UNFINISHED = "\ufffd"  # what a tokenizer shows for part of a character


def continue_texts(
    *,
    model: str,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    threads: int | None,
    provider: str | None = None,
    as_json: bool,
    remote: Remote | None = None,
) -> Iterator[str]:
    """The pieces of text to print, as they are made."""
    if max_new_tokens < 1:
        raise InputError(f"{max_new_tokens}", where="--max-new-tokens", allowed="1 or more")
    settings = Sampling(**sampling)
    check_sampling(settings)
    if provider not in (None, "cpu"):
        _send_libraries_to_errors()
    with _artifact(model, is_half=remote is not None) as folder:
        text = open_text(folder)
        ids = [text.encode(prompt) for prompt in prompts]
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": settings}
        options["stop_ids"] = text.stop_ids
        if remote:
            steps, answers = steps_from_host(folder, remote, ids, threads=threads, **options), False
        else:
            session = open_session(folder, threads=threads, provider=provider)
            steps, answers = generate(session, ids, **options), session.reads_and_answers
        # Behind an encoder, the answer is a text of its own and not the prompt's continuation.
        beginnings = [""] * len(prompts) if answers else prompts
        if len(ids) == 1 and not as_json:
            yield from _stream(beginnings[0], steps, text)
            return
        made: list[list[int]] = [[] for _ in ids]
        for tokens in steps:
            for row, token in zip(made, tokens, strict=True):
                if token is not None:
                    row.append(token)
    if as_json:
        documents = [
            {"prompt": prompt, "text": text.decode(row), "tokens": row}
            for prompt, row in zip(prompts, made, strict=True)
        ]
        yield json.dumps(documents, indent=2) + "\n"
        return
    for number, (beginning, row) in enumerate(zip(beginnings, made, strict=True), 1):
        yield f"[{number}] {beginning}{text.decode(row)}\n"


@contextmanager
def _artifact(model: str, *, is_half: bool = False) -> Iterator[Path]:
    """The artifact's folder, or for a model that is none a float one for as long as it is needed."""
    folder = Path(model).expanduser()
    require_side(folder, is_half=is_half)
    if is_half or holds_model(folder):
        yield folder
        return
    from quantkit.pipeline.quantize import write_float

    with tempfile.TemporaryDirectory(prefix="quantkit-") as made:
        write_float(model, Path(made))
        yield Path(made)


def _send_libraries_to_errors() -> None:
    """Vendors' libraries print to standard output, which here holds the answer alone, or its JSON."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
        os.dup2(2, 1)


def _stream(prompt: str, steps: Iterator[list[int | None]], text: Text) -> Iterator[str]:
    """One text, token by token; the whole answer is decoded again as a character may take several tokens."""
    made: list[int] = []
    shown = ""
    for number, (token,) in enumerate(steps):
        if number == 0:
            yield prompt
        if token is None:
            break
        made.append(token)
        decoded = text.decode(made)
        if decoded.startswith(shown) and not decoded.endswith(UNFINISHED):
            yield decoded[len(shown) :]
            shown = decoded
    yield text.decode(made)[len(shown) :] + "\n"
