"""`quantkit eval`: the accuracy of an artifact, measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import ArtifactFolder, AsJson, CheckFiles, app, finish, show


@app.command("eval", short_help="Measure an artifact's accuracy beside its original.")
def evaluate(
    folder: ArtifactFolder,
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
    check: CheckFiles = "quick",
    as_json: AsJson = False,
) -> None:
    """Measure an artifact's accuracy: perplexity, and beside its original KL divergence and agreement."""
    from quantkit.evaluation.measure import environment
    from quantkit.evaluation.verdict import is_broken
    from quantkit.pipeline.artifact import load
    from quantkit.report.document import evaluation_json
    from quantkit.report.measurements import rerun_page

    artifact = load(folder, check=check)
    evaluation = artifact.evaluate(
        text=text,
        max_tokens=max_tokens,
        window=window,
        stride=stride,
        reference=reference,
        quiet=False,
    )
    document = evaluation_json(
        artifact.described,
        evaluation.result,
        is_meaningful=not artifact.recipe.random_weights,
        judgement=evaluation.judgement,
        reference=evaluation.reference,
        environment=environment(),
        notes=evaluation.notes,
    )
    show(document, rerun_page(document), "json" if as_json else "table")
    finish(not is_broken(evaluation.judgement))
