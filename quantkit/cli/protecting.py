"""The verbs of private inference: `protect` and `serve-host`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli.app import AsJson, Exclude, Include, MinDim, Model, app, finish

DEFAULT_PORT = 8377


@app.command()
def protect(
    model: Model,
    key: Annotated[Path, typer.Option(help="the key's file; made, for you alone, if it does not exist")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a folder for both sides")] = None,
    permute: Annotated[
        str, typer.Option(help="what is put out of order: residual, and any of ffn, values")
    ] = "residual,ffn,values",
    audit: Annotated[
        Path | None, typer.Option(help="attack this host's folder instead, and say what was recovered")
    ] = None,
    scheme: Annotated[str | None, typer.Option(help="an INT8 scheme  [default: int8_block64]")] = None,
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
    """Split a model: a host computes on features out of order, a client holds tables, head and order."""
    from quantkit.cli import requests_protect
    from quantkit.plan.select import parse_min_dim

    settings = {
        "scheme": scheme,
        "transforms": transform,
        "select.min_dim": parse_min_dim(min_dim) if min_dim else None,
        "select.include": include,
        "select.exclude": exclude,
        "random_weights": random_weights or None,
    }
    options: dict[str, Any] = {"model": model, "key": key, "settings": settings}
    options |= {"permutes": permute, "as_json": as_json}
    if audit is not None:
        finish(requests_protect.audit(host=audit, **options))
        return
    finish(requests_protect.protect(output=output, force=force, **options))


@app.command("serve-host")
def serve_host(
    folder: Annotated[Path, typer.Argument(help="the folder 'host' that 'quantkit protect' wrote")],
    port: Annotated[int, typer.Option(help="0 is any free one")] = DEFAULT_PORT,
    listen: Annotated[str, typer.Option(help="the address to listen on; beyond this machine, tunnel it")] = (
        "127.0.0.1"
    ),
    token_file: Annotated[
        Path | None, typer.Option(help="what clients show; made if absent  [default: host.token beside it]")
    ] = None,
    max_clients: Annotated[int, typer.Option(help="caches at once")] = 16,
    max_tokens: Annotated[
        int | None, typer.Option(help="of one client  [default: the context, 4096 at most]")
    ] = None,
    idle_timeout: Annotated[float, typer.Option(help="seconds until a silent client is let go")] = 300.0,
    max_message_mb: Annotated[float, typer.Option(help="the largest message")] = 64.0,
    threads: Annotated[int | None, typer.Option(help="threads  [default: all cores]")] = None,
) -> None:
    """Compute for clients of a protected model, on features out of order."""
    from quantkit.cli import requests_host

    requests_host.serve(
        folder=folder,
        listen=listen,
        port=port,
        token_file=token_file,
        most_clients=max_clients,
        most_tokens=max_tokens,
        idle_seconds=idle_timeout,
        message_mb=max_message_mb,
        threads=threads,
    )
