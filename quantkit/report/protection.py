"""The page of an audit: how much of the secret orders the public weights give away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.report.tables import Page, Table

HIGH = 0.5  # of an order; found to this much it hides nothing


def audit_page(found: Sequence[Mapping[str, Any]]) -> Page:
    """One line for each order; reads the JSON form."""
    rows = tuple(
        (
            "this folder" if each["is_given"] else each["weights"],
            ", ".join(each["permutes"]),
            each["space"],
            f"{each['positions']:,}",
            f"{each['by_known_rows']:.1%}",
            f"{each['by_sorted_values']:.1%}",
        )
        for each in found
    )
    given = [each for each in found if each["is_given"]]
    broken = [each["space"] for each in given if max(_best(each)) >= HIGH]
    return Page(
        head=("Orders that the public weights give away, of all positions",),
        tables=(
            Table(
                title="",
                columns=("weights", "permuted", "order of", "positions", "by known rows", "by sorted values"),
                rows=rows,
                numeric=("positions", "by known rows", "by sorted values"),
            ),
        ),
        foot=(
            "by known rows: queries and keys keep their rows, so their columns are compared whole",
            "by sorted values: magnitudes in ascending order, for which no order must be known",
        ),
        alarms=(
            f"whoever has the public weights recovers the order of {', '.join(broken)}: "
            "it hides nothing from them",
        )
        if broken
        else (),
    )


def _best(each: Mapping[str, Any]) -> tuple[float, float]:
    return each["by_known_rows"], each["by_sorted_values"]
