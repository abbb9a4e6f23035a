"""`quantkit eval`: the accuracy of an artifact, measured again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import ArtifactFolder, AsJson, app, show


@app.command("eval")
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
    as_json: AsJson = False,
) -> None:
    """Measure an artifact's accuracy: perplexity, and beside its original KL divergence and agreement."""
    from quantkit.evaluation.accuracy import TextPerplexity
    from quantkit.evaluation.measure import environment
    from quantkit.pipeline.artifact import load
    from quantkit.report.reruns import evaluation_json, evaluation_page

    artifact = load(folder)
    evaluation = artifact.evaluate(
        text=text,
        max_tokens=max_tokens,
        window=window,
        stride=stride,
        reference=reference,
        quiet=False,
    )
    result = evaluation.result
    alone = result if isinstance(result, TextPerplexity) else None
    document = evaluation_json(
        artifact=artifact.described,
        accuracy=alone.perplexity if alone else result,  # type: ignore[arg-type]
        protocol={key: getattr(alone, key) for key in ("text", "num_tokens", "window", "stride")}
        if alone
        else {},
        is_meaningful=not artifact.recipe.random_weights,
        reference=evaluation.reference,
        environment=environment(),
        notes=evaluation.notes,
    )
    show(document, evaluation_page(document), "json" if as_json else "table")
