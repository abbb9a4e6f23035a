"""`quantkit score`: the labels of texts or pictures, and the scores of passages for a query."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from quantkit.cli.app import ArtifactFolder, AsJson, CheckFiles, app
from quantkit.cli.encode import FROM_INPUT


@app.command(short_help="Label texts or pictures, or rank passages.")
def score(
    folder: ArtifactFolder,
    texts: Annotated[
        list[str], typer.Argument(help="the texts, or files of pictures; - reads standard input, one a line")
    ],
    query: Annotated[str | None, typer.Option(help="what a reranker reads each text with")] = None,
    threads: Annotated[int | None, typer.Option(help="threads  [default: all cores]")] = None,
    check: CheckFiles = "quick",
    as_json: AsJson = False,
) -> None:
    """Print the label and its probability of each text or picture; with a reranker the scores, best first."""
    from quantkit.pipeline.artifact import load

    if texts == [FROM_INPUT]:
        texts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    artifact = load(folder, threads=threads, check=check)
    scores, labels = artifact.score(texts, query=query), artifact.labels
    if as_json:
        typer.echo(json.dumps({"labels": labels, "texts": texts, "scores": scores.tolist()}))
        return
    order = (-scores[:, 0]).argsort(kind="stable") if len(labels) == 1 else range(len(texts))
    for index in order:
        best = int(scores[index].argmax())
        label = f" {labels[best]}" if len(labels) > 1 else ""
        typer.echo(f"{scores[index, best]:.4f}{label}: {texts[index]}")
