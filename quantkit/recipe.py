"""Strict YAML recipes: what a run is asked to do, checked before anything is loaded.

A key that no recipe knows is refused with the nearest one that it does, because a misspelt option that is
ignored costs a whole run. Pydantic and YAML stay behind this file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quantkit.errors import InputError
from quantkit.plan.formats import AUTO, SCHEMES

RECIPE_FILE = "recipe.yaml"  # in an artifact


class Select(BaseModel):
    """Which projections are quantized."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min_dim: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=256, description="quantize where max(in, out) reaches this; 'auto' measures on this machine"
    )
    include: list[str] = Field(default=[], description="roles or globs that narrow the choice")
    exclude: list[str] = Field(default=[], description="roles or globs that are left as they are")


class Measure(BaseModel):
    """What is measured after the export."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    accuracy: bool = Field(default=True, description="perplexity, KL divergence and agreement")
    latency: bool = Field(default=True, description="prompt and decode times, beside the float model")
    memory: bool = Field(default=True, description="peak memory of loading and running, in its own process")
    text: str | None = Field(default=None, description="a text file; without it the bundled held-out text")
    window: int | None = Field(default=None, ge=2, description="tokens a window; up to 1024 if not given")
    stride: int | None = Field(default=None, ge=1, description="tokens from window to window; half of it")
    max_tokens: int = Field(default=16384, ge=2, description="tokens of the text that are read")
    prompt: int = Field(default=128, ge=1, description="tokens of the timed prompt")
    decode: int = Field(default=32, ge=1, description="tokens of the timed continuation")
    threads: int | None = Field(default=None, ge=1, description="threads; all cores if not given")
    seconds: float = Field(default=20.0, gt=0, description="most time that the timing may take")


class Calibration(BaseModel):
    """The text that statistics of inputs are collected on, where a method wants any."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    text: str | None = Field(
        default=None, description="a text file, or token ids in .npy; without it the bundled split"
    )
    windows: int = Field(default=32, ge=1, description="windows of the text")
    length: int = Field(default=512, ge=2, description="tokens a window; at most the model's context")
    leave_out: int = Field(
        default=0, ge=0, description="windows at the end that give no statistics: a search was measured there"
    )
    gradient_windows: int = Field(
        default=8, ge=0, description="windows that weigh outputs for GPTQ below 8 bits; 0 weighs all the same"
    )
    seed: int = Field(default=0, ge=0, description="of the choice of windows")


class Static(BaseModel):
    """Sizes that a target with fixed shapes wants to know before anything runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: int | None = Field(
        default=None, ge=2, description="tokens that are read at once; 128, or the model's context"
    )
    cache: int | None = Field(
        default=None, ge=2, description="tokens whose keys and values are kept; 512, or what the model allows"
    )


class Budget(BaseModel):
    """How much accuracy may be lost; with one of the two, formats are searched layer by layer."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_ppl_increase: float | None = Field(
        default=None, gt=0, description="0.005 allows half a percent of perplexity"
    )
    max_kl: float | None = Field(default=None, gt=0, description="nats a token")
    prefer: Literal["size", "speed"] = Field(default="size", description="what is made least")
    evaluations: int = Field(default=20, ge=2, description="most models that are exported and measured")


class Recipe(BaseModel):
    """One run of the pipeline."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str | None = Field(default=None, description="a folder, a built-in name, a Hub name, or 'demo'")
    select: Select = Select()
    scheme: Literal[AUTO, *SCHEMES] = Field(default=AUTO, description="how weights become integers")  # type: ignore[valid-type]
    fit: Literal["auto", "rtn", "mse", "output", "gptq"] = Field(
        default="auto", description="how weights are put on their grid"
    )
    layers: dict[str, str] = Field(
        default={}, description="a role or a glob on names -> a scheme of its own, or 'float'"
    )
    transforms: list[str] | Literal["auto"] = Field(
        default="auto",
        description="applied in this order before the weights are fitted; 'auto' smooths decoders quickly",
    )
    smoothing: Literal["searched", "quick"] = Field(
        default="searched",
        description="strengths by trying on calibration text, or one from the peaks of a few windows",
    )
    unties_head: bool = Field(
        default=False, description="let a transform store a tied head apart from its table, where it must"
    )
    bias_correction: bool = Field(
        default=False, description="add to each bias what rounding takes from the mean output"
    )
    calibration: Calibration = Calibration()
    budget: Budget = Budget()
    cache: Literal["float32", "int8"] = Field(
        default="float32", description="what keys and values are kept as; int8 suits long contexts"
    )
    keep_latent: bool = Field(
        default=False, description="give what a latent projection beside an FFN computes as outputs too"
    )
    target: Literal["cpu", "cpu-vnni", "cpu-avx2", "cpu-arm", "gpu", "npu", "openvino"] = Field(
        default="cpu", description="who runs the file; cpu is cpu-vnni"
    )
    static: Static = Static()
    single_file_mb: int = Field(
        default=64, ge=0, description="weights up to this size lie inside model.onnx, larger ones beside it"
    )
    random_weights: bool = Field(default=False, description="seeded weights, for size and speed alone")
    seed: int = Field(default=0, ge=0, description="of the random weights")
    measure: Measure = Measure()

    @property
    def searches(self) -> bool:
        """Whether a budget is given, within which formats are searched."""
        return self.budget.max_ppl_increase is not None or self.budget.max_kl is not None


SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    (): Recipe,
    ("select",): Select,
    ("calibration",): Calibration,
    ("static",): Static,
    ("budget",): Budget,
    ("measure",): Measure,
}


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe file; every fault is one line that names the key."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", where=str(path), next_step="see recipes/ for examples"
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no text, a date that is none
        raise InputError(
            f"not YAML ({error})", where=str(path), next_step="see recipes/ for examples"
        ) from error
    return check_recipe(content, where=str(path))


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema that editors complete recipes with."""
    return Recipe.model_json_schema()


def _explain(fault: Any) -> str:
    *parents, key = fault["loc"]
    name = ".".join(str(part) for part in _without_type_names(fault["loc"]))
    if fault["type"] != "extra_forbidden":
        return f"{name}: {fault['msg']}, got {fault['input']!r}"
    allowed = _keys_at(parents)
    elsewhere = {field: ".".join((*place, field)) for place in SECTIONS for field in _keys_at(place)}
    nearest = difflib.get_close_matches(str(key), allowed, n=1) or [
        elsewhere[field] for field in difflib.get_close_matches(str(key), elsewhere, n=1)
    ]
    hint = f"; next: did you mean '{nearest[0]}'?" if nearest else ""
    return f"unknown key '{name}'; allowed: {', '.join(allowed)}{hint}"


def _without_type_names(place: Sequence[Any]) -> Sequence[Any]:
    """The place of a fault; where several types are allowed, pydantic adds the name of one to it."""
    for depth, part in enumerate(place):
        section = tuple(place[:depth])
        if section in SECTIONS and part not in _keys_at(section):
            return place
        if section not in SECTIONS and isinstance(part, str) and "layers" not in section:
            return section
    return place


def _keys_at(parents: Sequence[Any]) -> list[str]:
    return list(SECTIONS[tuple(parents)].model_fields)


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some keys replaced ("select.min_dim": 768), checked like a file."""
    content = recipe.model_dump()
    for path, value in changes.items():
        if value is None:
            continue
        *parents, key = path.split(".")
        section = content
        for parent in parents:
            section = section[parent]
        section[key] = value
    return check_recipe(content, where="the command line")


def check_recipe(content: Any, *, where: str) -> Recipe:
    """A recipe from plain values; every fault is one line that names the key."""
    if not isinstance(content, dict):
        raise InputError("a recipe is a mapping of keys", where=where, allowed=", ".join(Recipe.model_fields))
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise InputError(_explain(error.errors()[0]), where=where) from error


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every key written out, so that it reproduces the run."""
    # Escaped, because YAML takes some Unicode characters for the end of a line.
    return yaml.safe_dump(recipe.model_dump(), sort_keys=False)
