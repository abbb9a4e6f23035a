"""`quantkit report`: an artifact's report again."""

from __future__ import annotations

from quantkit.cli.app import ArtifactFolder, AsJson, OutputFormat, app, check_format, show


@app.command()
def report(folder: ArtifactFolder, output_format: OutputFormat = "table", as_json: AsJson = False) -> None:
    """Show an artifact's report again."""
    from quantkit.report.quantization import quantization_page
    from quantkit.report.stored import read_document, showing

    output_format = check_format("json" if as_json else output_format)
    document = read_document(folder)
    with showing(folder):
        page = quantization_page(document)
    show(document, page, output_format)
