"""From what was typed to what is printed: checked flags, the pipeline, a page. No typer, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from quantkit import pipeline
from quantkit.errors import InputError
from quantkit.plan import DEFAULT_MIN_DIM, parse_min_dim
from quantkit.recipe import Select, load_recipe
from quantkit.report.costs import specification_csv, specification_json, specification_page
from quantkit.report.inspection import inspection_json, inspection_page
from quantkit.report.tables import Page, print_page, to_markdown

FORMATS = ("table", "markdown", "json", "csv")
LEAST = {"--batch": 1, "--seq": 1, "--past": 0}


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
    wanted = select.min_dim if min_dim is None else parse_min_dim(min_dim)
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
