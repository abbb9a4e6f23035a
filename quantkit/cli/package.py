"""`quantkit package`: an artifact packed for a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import ArtifactFolder, AsJson, app


@app.command(short_help="Pack an artifact with a runner for a device.")
def package(
    folder: ArtifactFolder,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a folder, or FILE.zip")] = None,
    target: Annotated[
        str | None, typer.Option(help="the target that the artifact must be made for  [default: any]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an older package")] = False,
    as_json: AsJson = False,
) -> None:
    """Pack an artifact with a runner, for a device that has onnxruntime and tokenizers alone."""
    from quantkit.pipeline.package import pack

    packed = pack(folder, output, target=target, force=force)
    if as_json:
        document = {
            "package": str(packed.path),
            "kind": packed.kind,
            "bytes": packed.num_bytes,
            "files": list(packed.files),
            "notes": list(packed.notes),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    size = f"{len(packed.files)} files, {packed.num_bytes / 1e6:.1f} MB"
    typer.echo(f"package: {packed.path} ({packed.kind}, {size})")
    typer.echo(f"on the device: pip install onnxruntime tokenizers numpy; {packed.command}")
    if packed.is_for_npu:
        typer.echo("on Qualcomm's NPU: pip install onnxruntime-qnn, and --provider qnn behind the same")
    for note in packed.notes:
        typer.echo(note)
