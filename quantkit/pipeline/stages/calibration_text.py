"""Calibration windows of a recipe: token ids of its text, or random ids where no text fits.

A fifth of the windows of a user's text give way to windows of the bundled text, which holds prose, code and
many languages, since a text of one kind is learned by heart: INT4 of the embedded model calibrated on Greek
alone loses twice as much on English as plain rounding does, with a fifth of varied windows half as much.
Token ids are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.model.companions import make_fast_tokenizer
from quantkit.model.load import Source
from quantkit.model.model_map import ModelMap, Picture
from quantkit.quantization.calibration.tokens import IDS_SUFFIX, calibration_tokens
from quantkit.recipe import Recipe
from quantkit.runtime.machine.disk import temporary_folder
from quantkit.runtime.pictures import (
    bundled_pictures,
    pictures_in,
    read_pictures,
    read_preprocessing,
    require_size,
)
from quantkit.runtime.tokenizer import TOKENIZER_FILE, open_text

# Letters: N windows, T tokens; or N pictures of C channels, H rows and W columns.
Tokens = NDArray[np.int64]
Examples = NDArray[Any]  # windows of tokens, or pictures
RANDOM_PICTURES = 8


def calibration_windows(
    recipe: Recipe,
    source: Source,
    model_map: ModelMap,
    *,
    windows: int | None = None,
    length: int | None = None,
) -> Examples:
    """Windows of the calibration texts [N, T], or pictures [N, C, H, W]; random ones for random weights."""
    if model_map.picture:
        return calibration_pictures(recipe, source, model_map.picture, number=windows)
    context = model_map.context
    length = length or recipe.calibration.length
    length = length if context is None else min(length, context)
    windows = windows or recipe.calibration.windows
    if recipe.random_weights:
        return random_windows(recipe, model_map, windows=windows, length=length)
    text = Path(recipe.calibration.text).expanduser() if recipe.calibration.text else None
    with temporary_folder() as folder:
        read = partial(
            calibration_tokens,
            encode=_encoder(source, folder),
            vocab_size=model_map.vocab_size or 0,
            length=length,
            context=context,
            seed=recipe.calibration.seed,
        )
        if text is None or text.suffix.lower() == IDS_SUFFIX:
            return read(source=text, num_windows=windows)
        num_varied = min(round(recipe.calibration.varied * windows), windows - 1)
        windows_NT = read(source=text, num_windows=windows - num_varied)
        return _among(windows_NT, read(num_windows=num_varied)) if num_varied else windows_NT


def _among(windows_NT: Tokens, varied_MT: Tokens) -> Tokens:
    """Both, the varied windows spread evenly among the others."""
    places_N = (np.arange(len(windows_NT)) + 0.5) / len(windows_NT)
    places_M = (np.arange(len(varied_MT)) + 0.5) / len(varied_MT)
    order = np.argsort(np.concatenate([places_N, places_M]), kind="stable")
    both: Tokens = np.concatenate([windows_NT, varied_MT])[order]
    return both


def statistics_windows(recipe: Recipe, source: Source, model_map: ModelMap) -> Examples:
    """The calibration windows without those that a search measures on."""
    windows_NT = calibration_windows(recipe, source, model_map)
    left_out = held_back(len(windows_NT)) if recipe.searches else recipe.calibration.leave_out
    return windows_NT[: max(1, len(windows_NT) - left_out)]


def calibration_pictures(
    recipe: Recipe, source: Source, picture: Picture, *, number: int | None = None
) -> NDArray[np.float32]:
    """The user's or the bundled pictures as the model reads them, [N, C, H, W], spread over the folder."""
    number = number or recipe.calibration.windows
    if recipe.random_weights:
        shape = (min(number, RANDOM_PICTURES), picture.channels, *picture.size)
        return np.random.default_rng(recipe.calibration.seed).standard_normal(shape, np.float32)
    if source.folder is None:
        raise InputError("its folder with the preprocessing is not here", where=source.name)
    preprocessing = read_preprocessing(source.folder)
    text = recipe.calibration.text
    paths = (
        pictures_in(Path(text).expanduser(), "--calibration-text")
        if text
        else bundled_pictures("calibration")
    )
    places = np.linspace(0, len(paths) - 1, min(number, len(paths))).round().astype(int)
    pictures = read_pictures([paths[place] for place in places], preprocessing, channels=picture.channels)
    require_size(pictures.shape[2:], None if picture.stretches else picture.size, source.folder)
    return pictures


def random_windows(recipe: Recipe, model_map: ModelMap, *, windows: int, length: int) -> Examples:
    generator = np.random.default_rng(recipe.calibration.seed)
    if picture := model_map.picture:
        number = min(windows, RANDOM_PICTURES)
        return generator.standard_normal((number, picture.channels, *picture.size), np.float32)
    return generator.integers(0, model_map.vocab_size or 1, (windows, length))


def held_back(num_windows: int) -> int:
    """The number of calibration windows that a search measures on; statistics leave them out."""
    if num_windows < 2:
        raise InputError(
            "one calibration window is all there is",
            where="calibration",
            allowed="two or more when a budget is searched: one part to collect on, one to measure on",
            next_step="give a longer text, or ask for shorter windows",
        )
    return max(1, num_windows // 4)


def _encoder(source: Source, folder: Path) -> Callable[[str], list[int]]:
    """The checkpoint's tokenizer, opened at the first text."""

    def encode(text: str) -> list[int]:
        tokenizer_folder = source.folder
        if tokenizer_folder is None or not (tokenizer_folder / TOKENIZER_FILE).exists():
            if not make_fast_tokenizer(source, folder):
                raise InputError(
                    "the checkpoint brings no tokenizer, so no text can be read",
                    where=source.name,
                    allowed="token ids in a .npy file",
                    next_step="--calibration-text IDS.npy",
                )
            tokenizer_folder = folder
        return open_text(tokenizer_folder).encode(text)

    return encode
