"""The application, the options that several verbs share, and how a verb prints and ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import quantkit
from quantkit.errors import InputError, not_one_of

if TYPE_CHECKING:
    from quantkit.report.tables import Page

MISSED = 1
FORMATS = ("table", "markdown", "json")
NO_TRANSFORM = "none"

app = typer.Typer(
    name="quantkit",
    help="Post-training quantization and verified ONNX export for Hugging Face transformers.",
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
ArtifactFolder = Annotated[Path, typer.Argument(help="a folder that 'quantkit quantize' wrote")]
OutputFormat = Annotated[str, typer.Option("--format", help="table, markdown or json")]
CheckFiles = Annotated[
    str, typer.Option("--check", help="hashes compared first: all, quick (sums of large files) or none")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Post-training quantization and verified ONNX export for Hugging Face transformers."""
    if version:
        typer.echo(f"quantkit {quantkit.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def show(document: Mapping[str, Any] | Sequence[Any], page: Page, output_format: str = "table") -> None:
    """Print a result as a table, as Markdown or as JSON."""
    from quantkit.report.tables import print_page, to_markdown

    if output_format == "json":
        typer.echo(json.dumps(document, indent=2))
    elif output_format == "markdown":
        typer.echo(to_markdown(page), nl=False)
    else:
        print_page(page)


def check_format(output_format: str, allowed: Sequence[str] = FORMATS) -> str:
    if output_format not in allowed:
        raise not_one_of(output_format, allowed, where="--format")
    return output_format


def finish(holds: bool) -> None:
    """End with exit code 1 where a bar was missed or a problem was found."""
    if not holds:
        raise typer.Exit(MISSED)


def parse_size(text: str | None) -> int | Literal["auto"] | None:
    """The value of --min-dim: a whole number, or "auto"."""
    from quantkit.plan.select import parse_min_dim

    if text is None:
        return None
    return "auto" if text == "auto" else parse_min_dim(text)


def parse_whole(flag: str, text: str | None, least: int) -> int | None:
    """The value of a flag that takes a whole number."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InputError(f"'{text}'", where=flag, allowed=f"a whole number from {least} up")
    return value


def parse_transforms(names: Sequence[str] | None) -> Sequence[str] | None:
    """The values of --transform; "none" alone is an empty list."""
    return [] if names == [NO_TRANSFORM] else names
