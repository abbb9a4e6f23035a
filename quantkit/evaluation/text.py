"""Text for accuracy, and its token ids."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quantkit.evaluation.accuracy import Ints
from quantkit.quantization.calibration import tokens
from quantkit.recipe import Measure
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.sentence import token_rows
from quantkit.runtime.tokenizer import open_text

RANDOM_TOKENS = 2048
TEXT_LINES = (1, 2, 4, 8)  # of the texts whose embeddings are compared, in turn
MAX_TEXTS = 512
QUESTIONS = "bundled questions and passages"


def read_text(measure: Measure) -> tuple[str, str]:
    """(text, name) of the user's file or of the bundled held-out text."""
    path = None if measure.text is None else Path(measure.text).expanduser()
    text = tokens.read_text(path, bundled="demo/evaluation.txt", flag="--text")
    return text, path.name if path else "bundled held-out text"


def encoded_text(measure: Measure, folder: Path) -> tuple[Ints, str]:
    """(token ids, name of the text) from the tokenizer in the folder."""
    text, name = read_text(measure)
    return np.array(open_text(folder).encode(text)[: measure.max_tokens], np.int64), name


def embedded_rows(measure: Measure, encoder: Encoder, folder: Path) -> list[Ints]:
    """Token ids of texts for embeddings, of 1 to 8 lines each, up to the recipe's number of tokens."""
    text, _ = read_text(measure)
    lines = (line.strip() for line in text.splitlines() if line.strip())
    texts: list[str] = []
    for count in itertools.cycle(TEXT_LINES):
        if not (part := list(itertools.islice(lines, count))) or len(texts) == MAX_TEXTS:
            break
        texts.append(" ".join(part))
    return within(token_rows(encoder, open_text(folder), texts), measure.max_tokens)


def within(rows: Sequence[Sequence[int] | Ints], max_tokens: int) -> list[Ints]:
    """The first rows of token ids, up to a number of tokens."""
    arrays = [np.array(row, np.int64) for row in rows]
    ends = np.cumsum([row.shape[-1] for row in arrays])
    return [row for row, end in zip(arrays, ends, strict=True) if end <= max_tokens]


def bundled_questions() -> tuple[list[str], list[tuple[str, list[int]]]]:
    """(passages, questions with the indices of their candidates)."""
    document = json.loads(tokens.read_text(None, bundled="questions/questions.json", flag=""))
    return document["passages"], [(entry["text"], entry["candidates"]) for entry in document["questions"]]


def random_text(measure: Measure, vocab_size: int) -> tuple[Ints, str]:
    """(random token ids, their name) for models with random weights."""
    ids = np.random.default_rng(0).integers(0, vocab_size, min(measure.max_tokens, RANDOM_TOKENS))
    return ids.astype(np.int64), "random tokens"
