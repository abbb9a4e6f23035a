"""The page of `quantkit quantize --dry-run`."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.report.figures import duration, megabytes
from quantkit.report.inspection import plan_lines
from quantkit.report.tables import Json, Page

LONGEST = 3  # stages that are named


def dry_run_page(document: Json) -> Page:
    return Page(head=tuple(_head(document)), foot=tuple(f"note: {note}" for note in document["notes"]))


def _head(document: Json) -> Iterable[str]:
    yield f"{document['model']}: {document['scheme']} for {document['target']}, {document['kind']} graph"
    yield from plan_lines(document)
    yield from (f"format: {count} x {name}" for name, count in document["formats"].items())
    yield from (f"float: {entry['count']} {entry['role']} ({entry['reason']})" for entry in document["kept"])
    transforms = ", ".join(document["transforms"]) or "none"
    yield f"fit: {document['fit']}; transforms: {transforms}; KV cache: {document['cache']}"
    model, source = document["model_bytes"], document["source_bytes"]
    yield (
        f"size: {megabytes(model)} MB of graph and weights, {model / source:.3f} of the source's "
        f"{megabytes(source)} MB, and {megabytes(document['companion_bytes'])} MB of tokenizer and configs"
    )
    stages = document["stages"]
    if stages:
        peak = max(stages, key=lambda stage: stage["peak_bytes"])
        yield f"peak memory: about {megabytes(peak['peak_bytes'])} MB ({peak['name']})"
        longest = sorted(stages, key=lambda stage: -stage["seconds"])[:LONGEST]
        parts = ", ".join(f"{stage['name']} {duration(stage['seconds'])}" for stage in longest)
        yield f"time: about {duration(60 * document['minutes'])} at this machine's present speed ({parts})"
    yield f"output: {document['output']} (nothing was written)"
