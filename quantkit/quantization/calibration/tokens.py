"""Calibration text as windows of token ids: the bundled text, a user's file, or ids in a `.npy` file.

Windows do not overlap and are spread over the whole text: it is cut into as many equal stretches as there
are windows, and one window is drawn from each with a seed. A shorter text gives fewer windows.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit import files
from quantkit.errors import InputError

# Letters: B windows, T tokens of a window, N tokens of the text, R and C rows and columns of a user's ids.
Tokens = NDArray[Any]  # token ids [B, T]; or pictures [B, C, H, W], where a model reads these
NUM_WINDOWS, LENGTH = 32, 512
BUNDLED = "bundled calibration text"
IDS_SUFFIX = ".npy"  # of a file of token ids


def calibration_tokens(
    *,
    encode: Callable[[str], list[int]],
    vocab_size: int,
    source: Path | None = None,
    num_windows: int = NUM_WINDOWS,
    length: int = LENGTH,
    context: int | None = None,
    seed: int = 0,
) -> Tokens:
    """Windows [B, T] of the text at `source` (a `.npy` file holds token ids), or of the bundled text."""
    length = length if context is None else min(length, context)
    if num_windows < 1 or length < 1:
        raise InputError(
            f"{num_windows} windows of {length} tokens", where="calibration", allowed="1 or more of each"
        )
    where = BUNDLED if source is None else str(source)
    if source is not None and source.suffix.lower() == IDS_SUFFIX:
        ids = _read_ids(source)
    else:
        text = read_text(
            source,
            bundled="calibration/calibration.txt",
            flag="--calibration-text",
            allowed="a text file in UTF-8, or token ids in .npy",
        )
        ids = np.asarray(encode(text), np.int64)
    require_known_ids(ids, vocab_size, where=where)
    random = np.random.default_rng(seed)
    if ids.ndim == 2:
        return _choose_rows(ids, num_windows, length, random, where)
    num_windows = min(num_windows, len(ids) // length)
    if not num_windows:
        raise _too_short(len(ids), length, where)
    ends = np.linspace(0, len(ids), num_windows + 1).astype(np.int64)
    starts = [int(random.integers(ends[i], ends[i + 1] - length + 1)) for i in range(num_windows)]
    return np.stack([ids[begin : begin + length] for begin in starts])


def require_known_ids(ids: Tokens, vocab_size: int, *, where: str) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InputError(
            f"token ids from {int(ids.min())} to {int(ids.max())}",
            where=where,
            allowed=f"0 to {vocab_size - 1}, the model's vocabulary",
            next_step="encode the text with the tokenizer that belongs to the model",
        )


def _choose_rows(
    ids_RC: Tokens, num_windows: int, length: int, random: np.random.Generator, where: str
) -> Tokens:
    """Windows from rows of ids; a longer row is cut into several."""
    length = min(length, ids_RC.shape[1])
    if not ids_RC.size:
        raise _too_short(0, max(length, 1), where)
    pieces = ids_RC.shape[1] // length
    windows_BT = ids_RC[:, : pieces * length].reshape(-1, length)
    if len(windows_BT) <= num_windows:
        return windows_BT
    ends = np.linspace(0, len(windows_BT), num_windows + 1).astype(np.int64)
    return windows_BT[[int(random.integers(ends[i], ends[i + 1])) for i in range(num_windows)]]


def _too_short(num_tokens: int, needed: int, where: str) -> InputError:
    return InputError(
        f"{num_tokens} tokens for calibration, {needed} are needed for one window",
        where=where,
        next_step="give a longer text, or a shorter window",
    )


def read_text(source: Path | None, *, bundled: str, flag: str, allowed: str = "a text file in UTF-8") -> str:
    """The user's text, or a bundled one; `flag` and `allowed` are for the error message."""
    if source is None:
        return (resources.files("quantkit") / "assets" / bundled).read_text(encoding="utf-8")
    next_step = f"check {flag}, or save the file again as UTF-8"
    text, fault = files.read_text(source, allowed=allowed, next_step=next_step), ""
    if "\0" in text:  # two-byte encodings of plain English decode without an error, with zeros between
        fault = "holds zero bytes, which no text in UTF-8 does"
    if not text.strip():
        fault = fault or "the text is empty"
    if fault:
        raise InputError(fault, where=str(source), allowed=allowed, next_step=next_step)
    return text


def _read_ids(source: Path) -> Tokens:
    allowed = "an array of whole numbers written by numpy.save"
    with files.reading(
        source, "cannot be read as token ids", allowed=allowed, next_step="check --calibration-text"
    ):
        files.require_regular(source)
        ids: NDArray[Any] = np.load(source, allow_pickle=False)
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        shape = f"{ids.dtype} of {ids.ndim} dimensions" if isinstance(ids, np.ndarray) else "several arrays"
        raise InputError(
            f"holds {shape}",
            where=str(source),
            allowed="whole numbers: one row of token ids, or one row for each window",
            next_step="save the ids with numpy.save as int64",
        )
    if ids.dtype == np.uint64 and ids.size:
        ids = np.minimum(ids, np.uint64(np.iinfo(np.int64).max))  # an id that large is refused by its value
    return ids.astype(np.int64)
