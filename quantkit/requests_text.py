"""What `quantkit generate` does with a prompt: an artifact's text, or the original's in float32."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.runtime.generate import Sampling, check_sampling, generate
from quantkit.runtime.session import MODEL_FILE, open_decoder
from quantkit.runtime.text import Text, open_text

UNFINISHED = "\ufffd"  # what a tokenizer shows for part of a character


def continue_texts(
    *,
    model: str,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    threads: int | None,
    as_json: bool,
) -> Iterator[str]:
    """The pieces of text to print, as they are made."""
    if max_new_tokens < 1:
        raise InputError(f"{max_new_tokens}", where="--max-new-tokens", allowed="1 or more")
    settings = Sampling(**sampling)
    check_sampling(settings)
    with _artifact(model) as folder:
        decoder, text = open_decoder(folder, threads=threads), open_text(folder)
        ids = [text.encode(prompt) for prompt in prompts]
        steps = generate(
            decoder, ids, max_new_tokens=max_new_tokens, sampling=settings, stop_ids=text.stop_ids
        )
        if len(ids) == 1 and not as_json:
            yield from _stream(prompts[0], steps, text)
            return
        made: list[list[int]] = [[] for _ in ids]
        for tokens in steps:
            for row, token in zip(made, tokens, strict=True):
                if token is not None:
                    row.append(token)
    if as_json:
        answers = [
            {"prompt": prompt, "text": text.decode(row), "tokens": row}
            for prompt, row in zip(prompts, made, strict=True)
        ]
        yield json.dumps(answers, indent=2) + "\n"
        return
    for number, (prompt, row) in enumerate(zip(prompts, made, strict=True), 1):
        yield f"[{number}] {prompt}{text.decode(row)}\n"


@contextmanager
def _artifact(model: str) -> Iterator[Path]:
    """The artifact's folder, or for a model that is none a float one for as long as it is needed."""
    folder = Path(model).expanduser()
    if (folder / MODEL_FILE).exists():
        yield folder
        return
    from quantkit.quantization import write_float  # noqa: PLC0415 - torch, transformers and onnx take seconds

    with tempfile.TemporaryDirectory(prefix="quantkit-") as made:
        write_float(model, Path(made))
        yield Path(made)


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
