"""What every verb of the command line shares: the application, its common options, and how a verb ends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import quantkit

MISSED = 1

app = typer.Typer(
    name="quantkit",
    help="Post-training quantization and verified ONNX export for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Argument(help="a local folder, 'demo', a well-known name, or a Hub name")]
MinDim = Annotated[
    str | None,
    typer.Option(help="quantize where max(in, out) reaches this; 'auto' measures here  [default: 256]"),
]
Include = Annotated[list[str] | None, typer.Option(help="only these roles or name globs (repeatable)")]
Exclude = Annotated[list[str] | None, typer.Option(help="all but these roles or name globs (repeatable)")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="a recipe file; flags override it")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run code that ships with the checkpoint")
]
Artifact = Annotated[Path, typer.Argument(help="a folder that 'quantkit quantize' wrote")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Post-training quantization and verified ONNX export for Hugging Face transformers."""
    if version:
        typer.echo(f"quantkit {quantkit.__version__}")


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Runtimes, providers and devices of this machine; clashes are named with their cure."""
    from quantkit.cli import requests_measure

    finish(*requests_measure.health(as_json=as_json))


def finish(printed: str, holds: bool = True) -> None:
    """Print what did not go to the terminal yet; a missed bar, or a problem found, is exit code 1."""
    if printed:
        typer.echo(printed, nl=not printed.endswith("\n"))
    if not holds:
        raise typer.Exit(MISSED)
