"""Text for accuracy, and its token ids."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from quantkit import files
from quantkit.evaluation.accuracy import Ints
from quantkit.recipe import Measure
from quantkit.runtime.tokenizer import open_text

RANDOM_TOKENS = 2048


def read_text(measure: Measure) -> tuple[str, str]:
    """(text, name) of the user's file or of the bundled held-out text."""
    if measure.text is None:
        bundled = resources.files("quantkit") / "assets" / "demo" / "evaluation.txt"
        return bundled.read_text(encoding="utf-8"), "bundled held-out text"
    path = Path(measure.text).expanduser()
    return files.read_text(path, allowed="a text file in UTF-8", next_step="check --text"), path.name


def encoded_text(measure: Measure, folder: Path) -> tuple[Ints, str]:
    """(token ids, name of the text) from the tokenizer in the folder."""
    text, name = read_text(measure)
    return np.array(open_text(folder).encode(text)[: measure.max_tokens], np.int64), name


def random_text(measure: Measure, vocab_size: int) -> tuple[Ints, str]:
    """(random token ids, their name) for models with random weights."""
    ids = np.random.default_rng(0).integers(0, vocab_size, min(measure.max_tokens, RANDOM_TOKENS))
    return ids.astype(np.int64), "random tokens"
