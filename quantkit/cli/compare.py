"""`quantkit compare`: reports of several artifacts side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import AsJson, OutputFormat, app, check_format, show


@app.command(short_help="Put the reports of several artifacts side by side.")
def compare(
    folders: Annotated[
        list[Path], typer.Argument(help="folders that 'quantkit quantize' wrote, two or more")
    ],
    html: Annotated[Path | None, typer.Option(help="write a web page too")] = None,
    output_format: OutputFormat = "table",
    as_json: AsJson = False,
) -> None:
    """Put the reports of several artifacts side by side; ratios are to the first."""
    from quantkit.model.model_map import to_json
    from quantkit.pipeline.compare import compare as compare_artifacts
    from quantkit.report.comparison import comparison_page

    output_format = check_format("json" if as_json else output_format)
    comparison = compare_artifacts(folders)
    show(to_json(comparison), comparison_page(comparison), output_format)
    if html:
        from quantkit.report.web_page import comparison_html
        from quantkit.runtime.machine.disk import writing

        with writing(html, next_step="choose another file with --html"):
            html.write_text(comparison_html(comparison), encoding="utf-8")
