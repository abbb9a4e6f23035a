"""`quantkit verify`: the files of a folder against its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import CheckFiles, app


@app.command(short_help="Compare every file with the manifest.")
def verify(
    folder: Annotated[Path, typer.Argument(help="an artifact, a package, or a side of a protected model")],
    check: CheckFiles = "all",
) -> None:
    """Compare every file with the manifest; a changed, missing or additional one is named."""
    from quantkit.pipeline.verify import verify as verify_folder

    verified = verify_folder(folder, check=check)
    typer.echo(f"whole: {folder} ({verified.num_files} files, {verified.num_bytes / 1e6:.1f} MB)")
