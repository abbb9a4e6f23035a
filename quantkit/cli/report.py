"""`quantkit report`: an artifact's report again."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from quantkit.cli.app import ArtifactFolder, AsJson, OutputFormat, app, check_format, show


@app.command(short_help="Show an artifact's report again, and write its page.")
def report(
    folder: ArtifactFolder,
    opens: Annotated[bool, typer.Option("--open", help="open report.html in the browser")] = False,
    output_format: OutputFormat = "table",
    as_json: AsJson = False,
) -> None:
    """Show an artifact's report again, and write its page, report.html, again."""
    from quantkit.pipeline.web_page import write_page
    from quantkit.report.quantization import quantization_page
    from quantkit.report.stored import read_document, showing

    output_format = check_format("json" if as_json else output_format)
    document = read_document(folder)
    with showing(folder):
        page = quantization_page(document)
    show(document, page, output_format)
    if opens or output_format == "table":
        path = write_page(folder, document)
        typer.echo(f"page: {path}", err=output_format != "table")
        if opens:
            webbrowser.open(path.resolve().as_uri())
