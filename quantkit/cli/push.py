"""`quantkit push`: an artifact to the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.app import ArtifactFolder, app


@app.command(short_help="Upload an artifact with its model card to the Hub.")
def push(
    folder: ArtifactFolder,
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made if it is not there")],
    private: Annotated[bool, typer.Option("--private", help="make a new repository private")] = False,
) -> None:
    """Upload an artifact with its model card, after every hash was compared."""
    from quantkit.pipeline.push import push as push_folder

    typer.echo(f"pushed: {push_folder(folder, repository, private=private)}")
