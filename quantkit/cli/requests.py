"""From what was typed to what is printed: checked flags, the pipeline, a page. No typer, no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.model.model_map import to_json
from quantkit.pipeline import inspect as pipeline
from quantkit.plan.formats import AUTO
from quantkit.plan.select import DEFAULT_MIN_DIM, parse_min_dim
from quantkit.recipe import Recipe, Select, load_recipe, override
from quantkit.report.costs import specification_csv, specification_json, specification_page
from quantkit.report.ffn import units_page
from quantkit.report.inspection import inspection_json, inspection_page
from quantkit.report.losses import sensitivity_page
from quantkit.report.quantization import quantization_page, report_json
from quantkit.report.tables import Page, print_page, to_markdown

FORMATS = ("table", "markdown", "json", "csv")
NO_TRANSFORM = "none"
LEAST = {"--batch": 1, "--seq": 1, "--past": 0, "--max-tokens": 1}


def inspect(
    *,
    model: str,
    min_dim: str | None,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    recipe_path: Path | None,
    wants_spec: bool,
    devices: Sequence[str],
    numbers: Mapping[str, str | None],
    output_format: str,
    lists_all: bool,
    trust_remote_code: bool,
) -> str:
    """The text that `quantkit inspect` prints; empty when a table went to the terminal already."""
    select = load_recipe(recipe_path).select if recipe_path else Select(min_dim=DEFAULT_MIN_DIM)
    wanted = select.min_dim if min_dim is None else _min_dim(min_dim)
    if isinstance(wanted, str):
        raise InputError(
            "'auto' is measured, and inspect reads no weights and runs nothing",
            where="--min-dim",
            allowed="a whole number from 1 up",
            next_step="'quantkit quantize MODEL --min-dim auto' measures and plans from that",
        )
    counts = {flag: _whole(flag, text) for flag, text in numbers.items() if text is not None}
    if output_format not in FORMATS or (output_format == "csv" and not wants_spec):
        allowed = FORMATS if wants_spec else FORMATS[:3]
        raise InputError(f"'{output_format}'", where="--format", allowed=", ".join(allowed))
    used = [*counts, *(["--device"] if devices else [])]
    pipeline.require_spec_flags(wants_spec=wants_spec, used=used)
    model_map, plan = pipeline.inspect(
        model,
        min_dim=wanted,
        include=select.include if include is None else include,
        exclude=select.exclude if exclude is None else exclude,
        trust_remote_code=trust_remote_code,
    )
    if not wants_spec:
        if output_format == "json":
            return json.dumps(inspection_json(model_map, plan), indent=2)
        return _show(inspection_page(model_map, plan, lists_all=lists_all), output_format)
    applies_plan = min_dim is not None or recipe_path is not None
    spec = pipeline.specification(
        model_map,
        plan if applies_plan else None,
        batch=counts.get("--batch", 1),
        length=counts.get("--seq"),
        past=counts.get("--past", 0),
        devices=devices,
    )
    if output_format == "json":
        return json.dumps(specification_json(spec), indent=2)
    if output_format == "csv":
        return specification_csv(spec)
    return _show(specification_page(spec), output_format)


def hidden_units(
    *,
    model: str,
    is_asked: bool,
    text: str | None,
    max_tokens: str | None,
    trust_remote_code: bool,
    output_format: str,
) -> str:
    """What `quantkit inspect --ffn` prints; empty when a table went to the terminal already."""
    from quantkit.pipeline.ffn_units import MAX_TOKENS, ffn_units

    if not is_asked:
        flag = "--text" if text is not None else "--max-tokens"
        raise InputError(
            f"{flag} is read by the look into FFNs alone", where="inspect", next_step="add --ffn"
        )
    if output_format not in FORMATS[:3]:
        raise InputError(f"'{output_format}'", where="--format", allowed=", ".join(FORMATS[:3]))
    found = to_json(
        ffn_units(
            model,
            text=Path(text).expanduser() if text else None,
            max_tokens=MAX_TOKENS if max_tokens is None else _whole("--max-tokens", max_tokens),
            trust_remote_code=trust_remote_code,
        )
    )
    return json.dumps(found, indent=2) if output_format == "json" else _show(units_page(found), output_format)


def sensitivity(
    *,
    model: str,
    recipe_path: Path | None,
    changes: Mapping[str, Any],
    output_format: str,
) -> str:
    """What `quantkit inspect --sensitivity` prints; empty when a table went to the terminal already."""
    from quantkit.pipeline.ffn_units import units_of_model
    from quantkit.pipeline.quantize import sensitivity as measure

    if output_format not in FORMATS[:3]:
        raise InputError(f"'{output_format}'", where="--format", allowed=", ".join(FORMATS[:3]))
    min_dim = changes.get("select.min_dim")
    typed = {**changes, "model": model, "select.min_dim": _min_dim(min_dim) if min_dim else None}
    recipe = override(load_recipe(recipe_path) if recipe_path else Recipe(), typed)
    opened, found = measure(recipe)
    units, decided, ffns = to_json(found), opened.recipe, to_json(units_of_model(opened))
    units = [{**unit, **({"ffn": ffns[unit["name"]]} if unit["name"] in ffns else {})} for unit in units]
    if output_format == "json":
        return json.dumps({"model": opened.model_map.name, "fit": decided.fit, "units": units}, indent=2)
    words = f"fit: {decided.fit}; on tokens of {decided.calibration.text or 'the bundled calibration text'}"
    return _show(sensitivity_page(opened.model_map.name, units, words), output_format)


def quantize(
    *,
    model: str | None,
    recipe_path: Path | None,
    changes: Mapping[str, Any],
    layers: Sequence[str] | None,
    max_ppl_increase: str | None,
    statistics: Path | None,
    resumes: bool,
    output: Path | None,
    force: bool,
    measures: bool,
    keeps_checkpoint: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> tuple[str, bool]:
    """(what `quantkit quantize` prints besides its tables, whether a budget was held)."""
    from quantkit.pipeline.quantize import run

    min_dim = changes.get("select.min_dim")
    typed = {**changes, "model": model, "select.min_dim": _min_dim(min_dim) if min_dim else None}
    if typed.get("transforms") == [NO_TRANSFORM]:
        typed["transforms"] = []
    typed["layers"] = dict(_layer(each) for each in layers) if layers else None
    typed["budget.max_ppl_increase"] = _share(max_ppl_increase) if max_ppl_increase else None
    if not measures:
        typed |= dict.fromkeys(("measure.accuracy", "measure.latency", "measure.memory"), False)
    recipe = override(load_recipe(recipe_path) if recipe_path else Recipe(), typed)
    if recipe.model is None:
        raise InputError(
            "no model was named",
            where="quantize",
            allowed="a folder, 'demo', a well-known name, a Hub name, or a recipe with the key 'model'",
            next_step="'quantkit quantize demo' tries it on the embedded model",
        )
    finished = run(
        recipe,
        output=output,
        force=force,
        keeps_checkpoint=keeps_checkpoint,
        trust_remote_code=trust_remote_code,
        statistics=statistics,
        resumes=resumes,
    )
    document, holds = report_json(finished.report), not finished.misses_budget
    if as_json:
        return json.dumps({"artifact": str(finished.folder), **document}, indent=2), holds
    print_page(quantization_page(document))
    return f"artifact: {finished.folder}\nreport:   {finished.folder / 'report.md'}", holds


def _min_dim(text: str) -> int | str:
    return AUTO if text == AUTO else parse_min_dim(text)


def _layer(text: str) -> tuple[str, str]:
    pattern, separator, name = text.rpartition("=")
    if not separator or not pattern or not name:
        raise InputError(
            f"'{text}'",
            where="--layer",
            allowed="PATTERN=SCHEME or PATTERN=float",
            next_step="--layer ffn_down=int8_block32 gives every down projection smaller blocks",
        )
    return pattern, name


def _share(text: str) -> float:
    """0.005 from "0.5%" or "0.005"."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise InputError(
            f"'{text}'",
            where="--max-ppl-increase",
            allowed="a share above 0, such as 0.5% or 0.005",
        )
    return value


def report(*, folder: Path, output_format: str) -> str:
    """An artifact's report as it was written; empty when a table went to the terminal already."""
    path = folder / "report.json"
    if output_format not in FORMATS[:3]:
        raise InputError(f"'{output_format}'", where="--format", allowed=", ".join(FORMATS[:3]))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        page = quantization_page(document)
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})",
            where=str(path),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"not a report ({type(error).__name__}: {error})",
            where=str(path),
            next_step="quantize again to write it anew",
        ) from error
    return json.dumps(document, indent=2) if output_format == "json" else _show(page, output_format)


def _whole(flag: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < LEAST[flag]:
        raise InputError(f"'{text}'", where=flag, allowed=f"a whole number from {LEAST[flag]} up")
    return value


def _show(page: Page, output_format: str) -> str:
    if output_format == "markdown":
        return to_markdown(page)
    print_page(page)
    return ""
