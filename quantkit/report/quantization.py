"""The page of `quantkit quantize` and `quantkit report`: plan, measurements and alarms.

`quantize` shows one screen of it, and all of it with --verbose. The page is made from the content of
report.json, so an artifact's report can be shown again from its file.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.report.alarms import alarms_of
from quantkit.report.figures import figures
from quantkit.report.inspection import plan_lines
from quantkit.report.losses import loss_lines, loss_tables, scheme_text
from quantkit.report.measurements import measured_tables, protocol_lines, verdict_line
from quantkit.report.tables import Json, Page

MAX_KEPT_LINES = 6


def quantization_page(document: Json) -> Page:
    """The page, from the content of report.json."""
    return Page(
        head=tuple(_head(document)),
        tables=(*measured_tables(document), *loss_tables(document)),
        foot=(*protocol_lines(document), *_run_lines(document), verdict_line(document)),
        alarms=alarms_of(document),
    )


def brief_page(document: Json) -> Page:
    """One screen of it: what was done, the figures, notes, the verdict and alarms."""
    return Page(
        head=tuple(_head(document, brief=True)),
        tables=measured_tables(document)[:1],
        foot=(*_notes(document), verdict_line(document)),
        alarms=alarms_of(document),
    )


def _head(document: Json, *, brief: bool = False) -> Iterable[str]:
    yield f"{document['model']}: {scheme_text(document)} for {document['target']}"
    counts, *formula = plan_lines(document)
    yield counts
    if not brief:
        yield from formula
    yield from loss_lines(document)
    kept = document.get("kept", [])
    for entry in kept[:MAX_KEPT_LINES]:
        yield f"not quantized: {entry['count']} {entry['role']} ({entry['reason']})"
    if len(kept) > MAX_KEPT_LINES:
        count = sum(entry["count"] for entry in kept[MAX_KEPT_LINES:])
        yield f"not quantized: {count} more, for other reasons (all are in report.json)"
    if document.get("has_random_weights"):
        yield "weights: random; size, speed and counts are valid, accuracy is meaningless"


def _run_lines(document: Json) -> Iterable[str]:
    seconds = document.get("seconds", {})
    if seconds:
        yield f"time: {', '.join(f'{stage} {figures(spent)} s' for stage, spent in seconds.items())}"
    yield from _notes(document)


def _notes(document: Json) -> Iterable[str]:
    return (f"note: {note}" for note in document.get("notes", []))
