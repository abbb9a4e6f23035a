"""`quantkit sweep`: a table of models, recipes, targets and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import AsJson, OutputFormat, app, check_format, finish, show


@app.command(short_help="Quantize and compare models x recipes x targets.")
def sweep(
    file: Annotated[Path, typer.Argument(help="a sweep file: models, recipes, targets, texts and rules")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the folder to write  [default: the file's name]")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local: one cell after the other; ray: cells at once, on one host or many")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="ray: HOST:PORT of a cluster, or auto  [default: this machine]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="ray: cells at once on this machine  [default: 2]")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="run failed cells again")] = False,
    plans_only: Annotated[
        bool, typer.Option("--dry-run", help="show cells, bytes and hours; write nothing")
    ] = False,
    output_format: OutputFormat = "table",
    as_json: AsJson = False,
) -> None:
    """Quantize every cell of a table of models, recipes, targets and texts, and compare the artifacts."""
    from quantkit.report.sweep import sweep_forecast_page, sweep_page

    output_format = check_format("json" if as_json else output_format)
    if plans_only:
        from quantkit.sweeps.forecast import forecast_sweep

        forecast = forecast_sweep(file, output=output, retry=retry).document
        show(forecast, sweep_forecast_page(forecast), output_format)
        finish(not any(cell["error"] for cell in forecast["cells"]))
        return
    from quantkit.sweeps.run import sweep as run_sweep

    result = run_sweep(
        file, output=output, engine=engine, address=address, workers=workers, retry=retry, quiet=False
    )
    show(result.document, sweep_page(result.document), output_format)
    if output_format == "table":
        typer.echo(f"results: {result.output / 'sweep.json'}, .html")
    finish(not result.failed)
