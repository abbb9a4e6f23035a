"""`quantkit inspect`: layers, roles, plan and costs of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli.app import (
    FORMATS,
    AsJson,
    Exclude,
    Include,
    MinDim,
    Model,
    RecipeFile,
    TrustRemoteCode,
    app,
    check_format,
    parse_size,
    parse_whole,
    show,
)
from quantkit.errors import InputError


@app.command(short_help="List a model's layers, what is picked and why, and costs.")
def inspect(
    model: Model,
    min_dim: MinDim = None,
    include: Include = None,
    exclude: Exclude = None,
    recipe: RecipeFile = None,
    spec: Annotated[bool, typer.Option("--spec", help="the layer-by-layer specification with costs")] = False,
    device: Annotated[
        list[str] | None,
        typer.Option(help="a machine of the table, 'this' to measure, or a .json file with one (repeatable)"),
    ] = None,
    batch: Annotated[str | None, typer.Option(help="sequences at once  [default: 1]")] = None,
    seq: Annotated[str | None, typer.Option(help="tokens of each  [default: up to 1024]")] = None,
    past: Annotated[str | None, typer.Option(help="tokens that are cached already  [default: 0]")] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="table, markdown, json or csv (csv with --spec)")
    ] = "table",
    lists_all: Annotated[bool, typer.Option("--all", help="every block, also those alike")] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="the loss of each product alone; reads weights")
    ] = False,
    ffn: Annotated[
        bool, typer.Option("--ffn", help="dead, duplicate and outlier hidden units; reads weights")
    ] = False,
    text: Annotated[
        str | None, typer.Option(help="a text file, or ids in .npy, for --ffn  [default: bundled text]")
    ] = None,
    max_tokens: Annotated[str | None, typer.Option(help="tokens of it for --ffn  [default: 4096]")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Walk a model: roles, FFN kinds, norms, ties, picked layers and why; no weights are read."""
    output_format = "json" if as_json else output_format
    if ffn or text is not None or max_tokens is not None:
        show_ffn_units(model, ffn, text, max_tokens, trust_remote_code, output_format)
        return
    if sensitivity:
        show_sensitivity(model, recipe, min_dim, include, exclude, output_format)
        return
    from quantkit.pipeline.inspect import inspect as inspect_model
    from quantkit.plan.select import DEFAULT_MIN_DIM
    from quantkit.recipe import Select, load_recipe
    from quantkit.report.inspection import inspection_json, inspection_page

    select = load_recipe(recipe).select if recipe else Select(min_dim=DEFAULT_MIN_DIM)
    size = select.min_dim if min_dim is None else parse_size(min_dim)
    if not isinstance(size, int):
        raise InputError(
            "'auto' is measured, and inspect reads no weights and runs nothing",
            where="--min-dim",
            allowed="a whole number from 1 up",
            next_step="'quantkit quantize MODEL --min-dim auto' measures and plans from that",
        )
    lengths = {
        "--batch": parse_whole("--batch", batch, 1),
        "--seq": parse_whole("--seq", seq, 1),
        "--past": parse_whole("--past", past, 0),
    }
    check_format(output_format, (*FORMATS, "csv") if spec else FORMATS)
    costs = [flag for flag, value in lengths.items() if value is not None] + (["--device"] if device else [])
    if costs and not spec:
        raise InputError(
            f"{', '.join(costs)} only shape the specification", where="inspect", next_step="add --spec"
        )
    inspection = inspect_model(
        model,
        min_dim=size,
        include=select.include if include is None else include,
        exclude=select.exclude if exclude is None else exclude,
        trust_remote_code=trust_remote_code,
    )
    model_map, plan = inspection.model_map, inspection.plan
    if not spec:
        page = inspection_page(model_map, plan, lists_all=lists_all)
        show(inspection_json(model_map, plan), page, output_format)
        return
    from quantkit.model.model_map import to_json
    from quantkit.pipeline.inspect import specification
    from quantkit.report.costs import specification_csv, specification_page

    applies_plan = min_dim is not None or recipe is not None
    costs_of_steps = specification(
        model_map,
        plan if applies_plan else None,
        batch=lengths["--batch"] or 1,
        length=lengths["--seq"],
        past=lengths["--past"] or 0,
        devices=device or (),
    )
    if output_format == "csv":
        typer.echo(specification_csv(costs_of_steps), nl=False)
    else:
        show(to_json(costs_of_steps), specification_page(costs_of_steps), output_format)


def show_ffn_units(
    model: str,
    is_wanted: bool,
    text: str | None,
    max_tokens: str | None,
    trust_remote_code: bool,
    output_format: str,
) -> None:
    """`--ffn`: dead, duplicate and outlier hidden units of every FFN."""
    from quantkit.model.model_map import to_json
    from quantkit.pipeline.ffn_units import MAX_TOKENS, ffn_units
    from quantkit.report.ffn import units_page

    if not is_wanted:
        flag = "--text" if text is not None else "--max-tokens"
        raise InputError(f"{flag} is read with --ffn alone", where="inspect", next_step="add --ffn")
    check_format(output_format)
    report = ffn_units(
        model,
        text=Path(text).expanduser() if text else None,
        max_tokens=parse_whole("--max-tokens", max_tokens, 1) or MAX_TOKENS,
        trust_remote_code=trust_remote_code,
    )
    document = to_json(report)
    show(document, units_page(document), output_format)


def show_sensitivity(
    model: str,
    recipe_file: Path | None,
    min_dim: str | None,
    include: list[str] | None,
    exclude: list[str] | None,
    output_format: str,
) -> None:
    """`--sensitivity`: the loss of each pack alone, in every format of a search."""
    from quantkit.model.model_map import to_json
    from quantkit.pipeline.ffn_units import units_of_model
    from quantkit.pipeline.options import Options, with_options
    from quantkit.pipeline.stages.search import sensitivity as measure_table
    from quantkit.recipe import Recipe, load_recipe, override
    from quantkit.report.losses import sensitivity_page

    check_format(output_format)
    options: Options = {"min_dim": parse_size(min_dim), "include": include, "exclude": exclude}
    recipe = with_options(load_recipe(recipe_file) if recipe_file else Recipe(), options)
    resolved, table = measure_table(override(recipe, {"model": model}))
    decided, ffns = resolved.recipe, to_json(units_of_model(resolved))
    units: list[dict[str, Any]] = [
        {**unit, **({"ffn": ffns[unit["name"]]} if unit["name"] in ffns else {})} for unit in to_json(table)
    ]
    name = resolved.model_map.name
    words = f"fit: {decided.fit}; on tokens of {decided.calibration.text or 'the bundled calibration text'}"
    document = {"model": name, "fit": decided.fit, "units": units}
    show(document, sensitivity_page(name, units, words), output_format)
