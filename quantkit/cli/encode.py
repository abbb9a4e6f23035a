"""`quantkit encode`: the vectors of texts or pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.app import ArtifactFolder, AsJson, CheckFiles, app
from quantkit.errors import InputError

FROM_INPUT = "-"
SHOWN = 4  # numbers of a vector


@app.command(short_help="Turn texts or pictures into vectors with a quantized encoder.")
def encode(
    folder: ArtifactFolder,
    texts: Annotated[
        list[str], typer.Argument(help="the texts, or files of pictures; - reads standard input, one a line")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the vectors as .npy")] = None,
    prompt: Annotated[str | None, typer.Option(help="a prompt of the model, put before each text")] = None,
    threads: Annotated[int | None, typer.Option(help="threads  [default: all cores]")] = None,
    check: CheckFiles = "quick",
    as_json: AsJson = False,
) -> None:
    """Turn texts or pictures into vectors: embeddings where the model has a pooling of its own."""
    import numpy as np

    from quantkit.pipeline.artifact import load
    from quantkit.runtime.machine.disk import writing

    if texts == [FROM_INPUT]:
        texts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if output and output.suffix != ".npy":
        raise InputError(f"'{output.name}'", where="--output", allowed="a file that ends in .npy")
    vectors = load(folder, threads=threads, check=check).encode(texts, prompt=prompt)
    if output:
        with writing(output, next_step="choose another file with --output"):
            np.save(output, vectors)
    if as_json:
        document = {"dimensions": vectors.shape[1], "texts": texts, "vectors": vectors.tolist()}
        typer.echo(json.dumps(document))
        return
    for text, vector in zip(texts, vectors, strict=True):
        numbers = " ".join(f"{value:+.4f}" for value in vector[:SHOWN])
        length = float(np.linalg.norm(vector))
        typer.echo(f"{numbers} ... {len(vector)} numbers, length {length:.3f}: {text}")
