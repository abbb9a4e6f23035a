"""`quantkit report`: an artifact's report again."""

from __future__ import annotations

import json

from quantkit.cli.app import ArtifactFolder, AsJson, OutputFormat, app, check_format, show
from quantkit.errors import InputError


@app.command()
def report(folder: ArtifactFolder, output_format: OutputFormat = "table", as_json: AsJson = False) -> None:
    """Show an artifact's report again."""
    from quantkit.report.quantization import quantization_page

    output_format = check_format("json" if as_json else output_format)
    path = folder / "report.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        page = quantization_page(document)
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})",
            where=str(path),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"not a report ({type(error).__name__}: {error})",
            where=str(path),
            next_step="quantize again to write it anew",
        ) from error
    show(document, page, output_format)
