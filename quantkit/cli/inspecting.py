"""`quantkit inspect`: what is in a model, before any weight is read."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.app import AsJson, Exclude, Include, MinDim, Model, RecipeFile, TrustRemoteCode, app, finish


@app.command()
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
        bool, typer.Option("--sensitivity", help="what each product loses alone; this one reads weights")
    ] = False,
    ffn: Annotated[
        bool, typer.Option("--ffn", help="hidden units that are dead, alike or outliers; reads weights")
    ] = False,
    text: Annotated[
        str | None, typer.Option(help="a text file, or ids in .npy, for --ffn  [default: bundled text]")
    ] = None,
    max_tokens: Annotated[str | None, typer.Option(help="tokens of it for --ffn  [default: 4096]")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Walk a model: roles, FFN kinds, norms, ties, what the rule picks and why; no weights are read."""
    from quantkit.cli import requests

    if ffn or text is not None or max_tokens is not None:
        units = requests.hidden_units(
            model=model,
            is_asked=ffn,
            text=text,
            max_tokens=max_tokens,
            trust_remote_code=trust_remote_code,
            output_format="json" if as_json else output_format,
        )
        finish(units)
        return
    if sensitivity:
        chosen = {"select.min_dim": min_dim, "select.include": include, "select.exclude": exclude}
        table = requests.sensitivity(
            model=model,
            recipe_path=recipe,
            changes=chosen,
            output_format="json" if as_json else output_format,
        )
        finish(table)
        return
    text = requests.inspect(
        model=model,
        min_dim=min_dim,
        include=include,
        exclude=exclude,
        recipe_path=recipe,
        wants_spec=spec,
        devices=device or [],
        numbers={"--batch": batch, "--seq": seq, "--past": past},
        output_format="json" if as_json else output_format,
        lists_all=lists_all,
        trust_remote_code=trust_remote_code,
    )
    finish(text)
