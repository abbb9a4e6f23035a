"""The verbs that show what was measured, or measure again: `report`, `eval`, `bench`, `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import Artifact, AsJson, app, finish


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="a folder that 'quantkit quantize' wrote")],
    output_format: Annotated[str, typer.Option("--format", help="table, markdown or json")] = "table",
    as_json: AsJson = False,
) -> None:
    """Show an artifact's report again."""
    from quantkit.cli import requests

    text = requests.report(folder=folder, output_format="json" if as_json else output_format)
    finish(text)


@app.command("eval")
def evaluate(
    folder: Artifact,
    text: Annotated[Path | None, typer.Option(help="a text file  [default: the recipe's]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="tokens of the text to read")] = None,
    window: Annotated[int | None, typer.Option(help="tokens the model sees at once")] = None,
    stride: Annotated[
        int | None, typer.Option(help="tokens from window to window  [default: half a window]")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="a model or an artifact to compare with  [default: the original, if on this disk]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an artifact's accuracy again: perplexity, and beside its original KL and agreement."""
    from quantkit.cli import requests_measure

    printed = requests_measure.evaluate(
        folder=folder,
        reference=reference,
        changes={
            "measure.text": str(text) if text else None,
            "measure.max_tokens": max_tokens,
            "measure.window": window,
            "measure.stride": stride,
        },
        as_json=as_json,
    )
    finish(printed)


@app.command()
def bench(
    folder: Artifact,
    prompt: Annotated[int | None, typer.Option(help="tokens of the prompt  [default: 128]")] = None,
    decode: Annotated[int | None, typer.Option(help="tokens after it  [default: 32]")] = None,
    threads: Annotated[int | None, typer.Option(help="threads to time with  [default: all cores]")] = None,
    provider: Annotated[list[str] | None, typer.Option(help="cpu,qnn,... or NAME@PYTHON, apart")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="exit with 1 where a node falls to the CPU")
    ] = False,
    time_limit: Annotated[float, typer.Option(help="seconds that each --provider may take")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Measure an artifact's speed and memory again: on the CPU, or with placement on each provider asked."""
    from quantkit.cli import requests_measure

    printed, holds = requests_measure.benchmark(
        folder=folder,
        changes={"measure.prompt": prompt, "measure.decode": decode, "measure.threads": threads},
        providers=provider or (["cpu"] if strict else []),
        strict=strict,
        time_limit=time_limit,
        as_json=as_json,
    )
    finish(printed, holds)


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(help="folders that 'quantkit quantize' wrote, two or more")
    ],
    output_format: Annotated[str, typer.Option("--format", help="table, markdown or json")] = "table",
    as_json: AsJson = False,
) -> None:
    """Put the reports of several artifacts side by side; ratios are to the first."""
    from quantkit.cli import requests_measure

    text = requests_measure.compare(folders=folders, output_format="json" if as_json else output_format)
    finish(text)
