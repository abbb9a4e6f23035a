"""Compares artifacts by their reports, side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.pipeline.artifact import Artifact
from quantkit.report.comparison import Side, comparison_json

REQUIRED = ("model", "scheme", "target", "size", "environment")  # keys of a report that can be compared


def compare(artifacts: Sequence[Artifact | str | Path]) -> Mapping[str, Any]:
    """Sizes, accuracies and latencies beside each other, with ratios to the first artifact.

    A ratio stands only between figures that were measured in the same way.
    """
    if len(artifacts) < 2:
        raise InputError("one artifact has nothing beside it", where="compare", allowed="two folders or more")
    folders = [entry.folder if isinstance(entry, Artifact) else Path(entry) for entry in artifacts]
    return comparison_json([_side(folder) for folder in folders])


def _side(folder: Path) -> Side:
    """An artifact's report, and a digest of the tokenizer that its figures were measured with."""
    path, tokenizer = folder / "report.json", folder / "tokenizer.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in REQUIRED if key not in report] if isinstance(report, dict) else REQUIRED
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else None
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})",
            where=error.filename or str(path),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        ) from error
    except ValueError as error:
        raise InputError(
            f"not JSON ({error})", where=str(path), next_step="quantize again to write it anew"
        ) from error
    if missing:
        raise InputError(
            f"not a report: {', '.join(missing)} missing",
            where=str(path),
            next_step="quantize again to write it anew",
        )
    return Side(name=str(folder), report=report, tokenizer=digest)
