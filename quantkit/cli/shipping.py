"""The verbs around an artifact: `package` for a device, `doctor` for a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import Artifact, AsJson, app, finish


@app.command()
def package(
    folder: Artifact,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a folder, or FILE.zip")] = None,
    target: Annotated[
        str | None, typer.Option(help="what the artifact must have been made for  [default: any]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an older package")] = False,
    as_json: AsJson = False,
) -> None:
    """Pack an artifact for a device that has onnxruntime and tokenizers alone, with a runner."""
    from quantkit.cli import requests_package

    typer.echo(
        requests_package.package(folder=folder, output=output, target=target, force=force, as_json=as_json)
    )


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Runtimes, providers and devices of this machine; clashes are named with their cure."""
    from quantkit.cli import requests_measure

    finish(*requests_measure.health(as_json=as_json))
