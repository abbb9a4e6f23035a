"""YAML recipes: the options of a run, checked before a model is loaded.

An unknown key is an error that names the nearest known key, because a misspelt option that is ignored costs a
whole run. Pydantic and YAML are imported here alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic import Field as Field  # noqa: PLC0414 - for sections of other files

from quantkit.errors import InputError, not_one_of
from quantkit.files import read_text, reading, require_shallow
from quantkit.plan.formats import AUTO, SCHEMES

RECIPE_FILE = "recipe.yaml"  # in an artifact
MAX_BYTES = 1 << 18  # of a recipe
MAX_THREADS = 1024


SIZE = re.compile(r"(\d+(?:\.\d+)?)(KB|MB|GB)")
SHARE = re.compile(r"0?\.\d+")
UNIT_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9}


def target_bytes(size: str | float, source_bytes: int) -> int:
    """Bytes of a target size: "120MB", or a share of the source's bytes such as 0.2."""
    text = str(size)
    named = SIZE.fullmatch(text)
    if not (named or SHARE.fullmatch(text)) or not any(digit in "123456789" for digit in text):
        raise InputError(
            f"'{text}'",
            allowed="a size such as 800KB, 120MB or 1.5GB, or a share of the source's bytes such as 0.2",
        )
    return int(float(named[1]) * UNIT_BYTES[named[2]] if named else float(text) * source_bytes)


def _target_size(size: str | float) -> str | float:
    target_bytes(size, 0)
    return size


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Checked = TypeVar("Checked", bound=Section)
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Select(Section):
    """Projections that are quantized."""

    min_dim: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=256, description="smallest max(in, out) of quantized projections; 'auto': measured"
    )
    include: list[str] = Field(default=[], description="only projections of these roles or name globs")
    exclude: list[str] = Field(default=[], description="projections of these roles or name globs stay float")


class Measure(Section):
    """Measurements after the export."""

    accuracy: bool = Field(default=True, description="perplexity, KL divergence and top-1 agreement")
    latency: bool = Field(default=True, description="prefill and decode latency, beside the float model")
    memory: bool = Field(
        default=True, description="peak memory of loading and running, in a separate process"
    )
    text: str | None = Field(
        default=None, description="text file, or folder of pictures; default: the bundled held-out ones"
    )
    window: int | None = Field(
        default=None, ge=2, description="tokens per window; default: the context, at most 1024"
    )
    stride: int | None = Field(
        default=None, ge=1, description="tokens from window to window; default: half a window"
    )
    max_tokens: int = Field(default=16384, ge=2, description="most tokens of the text")
    prompt: int = Field(default=128, ge=1, description="tokens of the timed prompt")
    decode: int = Field(default=32, ge=1, description="decoded tokens per timed run")
    threads: int | None = Field(default=None, ge=1, le=MAX_THREADS, description="threads; default: all cores")
    seconds: float = Field(default=20.0, gt=0, description="most seconds for latency")


class Calibration(Section):
    """Text that input statistics are collected on, where a method needs them."""

    text: str | None = Field(
        default=None,
        description="text file, token ids in .npy, or folder of pictures; default: the bundled ones",
    )
    windows: int = Field(default=32, ge=1, description="number of windows")
    length: int = Field(default=512, ge=2, description="tokens per window; at most the model's context")
    varied: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="share of the windows that are of the bundled text where 'text' is a text of yours",
    )
    leave_out: int = Field(
        default=0, ge=0, description="last windows that are left out because a search was measured on them"
    )
    gradient_windows: int = Field(
        default=0, ge=0, description="windows for output gradients that weight GPTQ; 0: none"
    )
    seed: int = Field(default=0, ge=0, description="seed of the choice of windows")


class Static(Section):
    """Sizes of a target with fixed shapes."""

    prompt: int | None = Field(
        default=None, ge=2, description="tokens of the prompt graph; default: 128, at most the context"
    )
    cache: int | None = Field(
        default=None, ge=2, description="tokens of the KV cache; default: 512, at most the context"
    )


class Budget(Section):
    """Largest loss of accuracy, and largest size. With a limit, formats are searched layer by layer."""

    max_ppl_increase: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="largest relative increase of perplexity: 0.005 is half a percent",
    )
    max_kl: float | None = Field(default=None, gt=0, description="largest KL divergence in nats per token")
    target_size: Annotated[str | float, AfterValidator(_target_size)] | None = Field(
        default=None,
        description="largest size of graph, weights and companions: 120MB, or 0.2 of the source's bytes",
    )
    prefer: Literal["size", "speed"] = Field(default="size", description="quantity that the search minimizes")
    evaluations: int = Field(
        default=20, ge=2, description="most configurations that the search exports and measures"
    )


class Recipe(Section):
    """One run of the pipeline."""

    model: str | None = Field(default=None, description="model folder, built-in name, Hub name, or 'demo'")
    select: Select = Select()
    scheme: Literal[AUTO, *SCHEMES] = Field(  # type: ignore[valid-type]
        default=AUTO, description="quantization scheme: weight grid and activation format"
    )
    fit: Literal["auto", "rtn", "mse", "output", "gptq"] = Field(
        default="auto", description="method that fits weights to their grid"
    )
    layers: dict[str, str] = Field(
        default={}, description="role or name glob -> scheme of these projections, or 'float'"
    )
    transforms: list[str] | Literal["auto"] = Field(
        default="auto",
        description="transforms, applied in this order before the fit; 'auto' smooths decoders quickly",
    )
    smoothing: Literal["searched", "quick"] = Field(
        default="searched",
        description="SmoothQuant strength: searched per space, or one for all from peaks of a few windows",
    )
    unties_head: bool = Field(
        default=False, description="allow transforms to store a tied head apart from its table"
    )
    bias_correction: bool = Field(
        default=False, description="add the mean output error of rounding to each bias"
    )
    calibration: Calibration = Calibration()
    budget: Budget = Budget()
    cache: Literal["float32", "int8"] = Field(
        default="float32", description="data type of the KV cache; int8 suits long contexts"
    )
    keep_latent: bool = Field(
        default=False, description="export latent projections beside FFNs as extra outputs"
    )
    target: Literal["cpu", "cpu-vnni", "cpu-avx2", "cpu-arm", "gpu", "npu", "openvino"] = Field(
        default="cpu", description="export target; cpu is cpu-vnni"
    )
    static: Static = Static()
    single_file_mb: int = Field(
        default=64, ge=0, description="largest size of weights inside model.onnx; else they are a file"
    )
    random_weights: bool = Field(
        default=False, description="random weights, to measure size and speed without a checkpoint"
    )
    seed: int = Field(default=0, ge=0, description="seed of the random weights")
    measure: Measure = Measure()

    @property
    def searches(self) -> bool:
        """Whether a budget is given, so that formats are searched."""
        budget = self.budget
        return any(
            limit is not None for limit in (budget.max_ppl_increase, budget.max_kl, budget.target_size)
        )


EXAMPLES = "see recipes/ for examples"
QUOTED = re.compile(r"'([^']*)'")  # the names that pydantic lists
Sections = Mapping[tuple[str, ...], type[Section]]
SECTIONS: Sections = {
    (): Recipe,
    ("select",): Select,
    ("calibration",): Calibration,
    ("static",): Static,
    ("budget",): Budget,
    ("measure",): Measure,
}


class PlainLoader(yaml.SafeLoader):
    """Plain values alone: aliases can grow without limit, and of duplicate keys one would be ignored."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = [key for number, key in enumerate(keys) if key in keys[:number]]
        if repeated:
            raise yaml.YAMLError(f"the key {repeated[0]!r} twice")
        return super().construct_mapping(node, deep)


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe file; an error is one line that names the key."""
    return check_recipe(load_yaml(path), where=str(path))


def load_yaml(path: Path) -> Any:
    """The plain values of a YAML file."""
    text = read_text(path, MAX_BYTES, next_step=EXAMPLES)
    with reading(path, "not YAML", next_step=EXAMPLES):
        content = yaml.load(text, Loader=PlainLoader)
        require_shallow(content)
    return content


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema for editors."""
    return Recipe.model_json_schema()


def _explain(error: Any, where: str, sections: Sections) -> InputError:
    """The refusal that an entry of a pydantic error stands for."""
    if not error["loc"]:  # of the file as a whole
        return InputError(error["msg"], where=where)
    *parents, key = error["loc"]
    name = ".".join(str(part) for part in _keys_of(error["loc"], sections))
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return InputError(f"{name}: {cause.what}", where=where, allowed=cause.allowed)
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        names = QUOTED.findall(error["ctx"]["expected"])
        return not_one_of(error["input"], names, where=where, what=f"{name}: '{error['input']}'")
    if error["type"] != "extra_forbidden":
        return InputError(f"{name}: {error['msg']}, got {error['input']!r}", where=where)
    allowed = _keys_at(parents, sections)
    paths = {
        field: ".".join((*section, field)) for section in sections for field in _keys_at(section, sections)
    }
    nearest = difflib.get_close_matches(str(key), allowed, n=1) or [
        paths[field] for field in difflib.get_close_matches(str(key), paths, n=1)
    ]
    return InputError(
        f"unknown key '{name}'",
        where=where,
        allowed=", ".join(allowed),
        next_step=f"did you mean '{nearest[0]}'?" if nearest else "",
    )


def _keys_of(location: Sequence[Any], sections: Sections) -> Sequence[Any]:
    """The keys of an error's location; pydantic appends the name of a type where several are allowed."""
    for depth, part in enumerate(location):
        section = tuple(key for key in location[:depth] if isinstance(key, str))
        if section in sections and isinstance(part, str) and part not in _keys_at(section, sections):
            return location
        if section not in sections and isinstance(part, str) and "layers" not in section:
            return location[:depth]
    return location


def _keys_at(location: Sequence[Any], sections: Sections) -> list[str]:
    """The keys of a section; a list of sections has one entry, so positions in it are left out."""
    return list(sections[tuple(key for key in location if isinstance(key, str))].model_fields)


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
    """A recipe from plain values; an error is one line that names the key."""
    return check(Recipe, content, what="a recipe", where=where, sections=SECTIONS)


def check(kind: type[Checked], content: Any, *, what: str, where: str, sections: Sections) -> Checked:
    """A record from plain values; an error is one line that names the key."""
    if not isinstance(content, dict):
        raise InputError(f"{what} is a mapping of keys", where=where, allowed=", ".join(kind.model_fields))
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        # A misspelt key comes before the key that is missing for it.
        faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        raise _explain(faults[0], where, sections) from error


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with all keys, so that it reproduces the run; a target size only if given."""
    content = recipe.model_dump()
    if recipe.budget.target_size is None:
        del content["budget"]["target_size"]
    # Non-ASCII text is escaped, because YAML reads some Unicode characters as line ends.
    return yaml.safe_dump(content, sort_keys=False)
