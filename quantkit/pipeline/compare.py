"""Compares artifacts by their reports, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.files import reading
from quantkit.pipeline.artifact import Artifact
from quantkit.report.comparison import Comparison, compare_reports
from quantkit.report.stored import AGAIN, read_document
from quantkit.runtime.manifest import sha256_of


def compare(artifacts: Sequence[Artifact | str | Path]) -> Comparison:
    """Sizes, accuracies and latencies beside each other, with ratios to the first artifact.

    A ratio stands only between figures that were measured in the same way.
    """
    if len(artifacts) < 2:
        raise InputError("one artifact has nothing beside it", where="compare", allowed="two folders or more")
    folders = [entry.folder if isinstance(entry, Artifact) else Path(entry) for entry in artifacts]
    reports = [stored_report(folder) for folder in folders]
    with reading(", ".join(map(str, folders)), "one of them is not a report", next_step=AGAIN):
        return compare_reports(reports)


def stored_report(folder: Path) -> dict[str, Any]:
    """An artifact's report, with a digest of the tokenizer that its figures were measured with."""
    report, tokenizer = read_document(folder), folder / "tokenizer.json"
    digest = sha256_of(tokenizer) if tokenizer.is_file() else None
    return {**report, "folder": str(folder), "tokenizer": digest}
