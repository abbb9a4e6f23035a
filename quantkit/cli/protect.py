"""`quantkit protect`: a model split into a client and a host, or an attack on the split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import AsJson, Exclude, Include, MinDim, Model, app, parse_transforms, show
from quantkit.errors import InputError


@app.command(short_help="Split a model: a host computes on permuted features.")
def protect(
    model: Model,
    key: Annotated[Path, typer.Option(help="the key's file; made, for you alone, if it does not exist")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a folder for both sides")] = None,
    permute: Annotated[
        str, typer.Option(help="permuted features: residual, and any of ffn, values")
    ] = "residual,ffn,values",
    audit: Annotated[
        Path | None, typer.Option(help="attack this host folder instead, and report the recovered share")
    ] = None,
    scheme: Annotated[str | None, typer.Option(help="an INT8 scheme  [default: int8_block32]")] = None,
    transform: Annotated[
        list[str] | None,
        typer.Option(help="smoothquant, ... or none (repeatable)  [default: quick smoothing]"),
    ] = None,
    min_dim: MinDim = None,
    include: Include = None,
    exclude: Exclude = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="seeded weights, to measure speed and size alone")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an older output")] = False,
    as_json: AsJson = False,
) -> None:
    """Split a model: a host computes on permuted features; a client holds tables, head and the order."""
    from quantkit.model.model_map import to_json
    from quantkit.pipeline.options import with_options
    from quantkit.plan.select import parse_min_dim
    from quantkit.recipe import Recipe

    recipe = with_options(
        Recipe(model=model),
        {
            "scheme": scheme,
            "transforms": parse_transforms(transform or None),
            "min_dim": parse_min_dim(min_dim) if min_dim else None,
            "include": include,
            "exclude": exclude,
            "random_weights": random_weights or None,
        },
    )
    permutes = tuple(dict.fromkeys(name.strip() for name in permute.split(",") if name.strip()))
    if audit is not None:
        from quantkit.private.audit import audit as attack
        from quantkit.report.protection import audit_page

        document = to_json(attack(recipe, host=audit, key_file=key, permutes=permutes))
        show(document, audit_page(document), "json" if as_json else "table")
        return
    from quantkit.private.files import CLIENT, HOST
    from quantkit.private.protect import protect as split

    if output is None:
        raise InputError("nowhere to write to", where="protect", next_step="choose a folder with -o DIR")
    made = split(recipe, key_file=key, output=output, permutes=permutes, force=force, quiet=as_json)
    if as_json:
        document = {**to_json(made), "folder": str(made.folder), "key_file": str(key)}
        typer.echo(json.dumps(document, indent=2))
        return
    if made.makes_key:
        typer.echo(f"made the key {key} (mode 0600): keep a copy, and keep it to yourself")
    sides = {side: _side(made.num_planned[side], made.num_bytes[side]) for side in (HOST, CLIENT)}
    typer.echo(f"{made.folder / HOST}: {sides[HOST]}; give this to whoever computes")
    typer.echo(f"{made.folder / CLIENT}: {sides[CLIENT]}; as secret as the key")
    width = f"{made.bytes_per_token:,} bytes a token each way"
    typer.echo(f"permuted: {', '.join(made.permutes)}; {made.scheme}; {width}")
    typer.echo(
        "this hides features from a look, not from an attack with the public weights: "
        "docs/private-inference.md, --audit"
    )
    typer.echo(f"\nnext: quantkit serve-host {made.folder / HOST} --port 8377")
    typer.echo(f'      quantkit generate {made.folder / CLIENT} --host http://127.0.0.1:8377 "The king"')


def _side(num_projections: int, num_bytes: int) -> str:
    plural = "" if num_projections == 1 else "s"
    return f"{num_projections} INT8 projection{plural}, {num_bytes / 1e6:.1f} MB"
