"""Options of a run: the keyword arguments of `quantkit.quantize`, each a key of the recipe.

An option that is None, or absent, leaves the key of the recipe as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from quantkit.recipe import Recipe, override


class Options(TypedDict, total=False):
    """Options of the recipe, typed from the command line to the recipe."""

    min_dim: int | Literal["auto"] | None  # quantize where max(in, out) reaches this
    include: Sequence[str] | None  # roles or globs that narrow the choice
    exclude: Sequence[str] | None  # roles or globs that stay float
    scheme: str | None
    fit: str | None  # rtn, mse, output or gptq
    layers: Mapping[str, str] | None  # pattern -> a scheme of its own, or "float"
    transforms: Sequence[str] | None
    unties_head: bool | None
    bias_correction: bool | None
    calibration_text: str | None  # a text file, or token ids in .npy
    calibration_windows: int | None
    calibration_length: int | None
    max_ppl_increase: float | None  # a budget: formats are searched within it
    max_kl: float | None
    target_size: str | float | None  # "120MB", or 0.2 of the source's bytes: the most accurate that fits
    prefer: str | None  # what a search minimizes: "size" or "speed"
    cache: str | None  # format of keys and values
    keep_latent: bool | None
    target: str | None
    prompt_length: int | None  # of a target with fixed shapes
    cache_length: int | None
    random_weights: bool | None
    accuracy: bool | None  # measure it
    latency: bool | None
    memory: bool | None
    text: str | None  # a text file to measure accuracy on
    max_tokens: int | None
    window: int | None
    stride: int | None
    prompt: int | None  # tokens of the timed prompt
    decode: int | None
    threads: int | None


def with_options(recipe: Recipe, options: Options) -> Recipe:
    """The recipe with the options that are given, checked like a recipe file."""
    return override(
        recipe,
        {
            "select.min_dim": options.get("min_dim"),
            "select.include": _list(options.get("include")),
            "select.exclude": _list(options.get("exclude")),
            "scheme": options.get("scheme"),
            "fit": options.get("fit"),
            "layers": options.get("layers"),
            "transforms": _list(options.get("transforms")),
            "unties_head": options.get("unties_head"),
            "bias_correction": options.get("bias_correction"),
            "calibration.text": options.get("calibration_text"),
            "calibration.windows": options.get("calibration_windows"),
            "calibration.length": options.get("calibration_length"),
            "budget.max_ppl_increase": options.get("max_ppl_increase"),
            "budget.max_kl": options.get("max_kl"),
            "budget.target_size": options.get("target_size"),
            "budget.prefer": options.get("prefer"),
            "cache": options.get("cache"),
            "keep_latent": options.get("keep_latent"),
            "target": options.get("target"),
            "static.prompt": options.get("prompt_length"),
            "static.cache": options.get("cache_length"),
            "random_weights": options.get("random_weights"),
            "measure.accuracy": options.get("accuracy"),
            "measure.latency": options.get("latency"),
            "measure.memory": options.get("memory"),
            "measure.text": options.get("text"),
            "measure.max_tokens": options.get("max_tokens"),
            "measure.window": options.get("window"),
            "measure.stride": options.get("stride"),
            "measure.prompt": options.get("prompt"),
            "measure.decode": options.get("decode"),
            "measure.threads": options.get("threads"),
        },
    )


def _list(values: Sequence[str] | None) -> list[str] | None:
    return None if values is None else list(values)
