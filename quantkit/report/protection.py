"""The page of an audit: the share of each secret permutation that public weights reveal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.report.tables import Page, Table

REVEALED = 0.5  # share of a permutation from which it counts as recovered
ATTACKS = ("by_known_rows", "by_sorted_values")


def audit_page(orders: Sequence[Mapping[str, Any]]) -> Page:
    """One row for each permutation, from the JSON form of an audit."""
    numeric = ("positions", "by known rows", "by sorted values")
    rows = tuple(
        (
            "this folder" if order["is_given"] else order["weights"],
            ", ".join(order["permutes"]),
            order["space"],
            f"{order['positions']:,}",
            *(f"{order[attack]:.1%}" for attack in ATTACKS),
        )
        for order in orders
    )
    broken = [
        order["space"]
        for order in orders
        if order["is_given"] and max(order[attack] for attack in ATTACKS) >= REVEALED
    ]
    alarm = f"NOT HIDDEN: the permutation of {', '.join(broken)} can be recovered from public weights"
    return Page(
        head=("Recovery of secret permutations from the public weights, as a share of positions",),
        tables=(
            Table(
                title="", columns=("weights", "permuted", "order of", *numeric), rows=rows, numeric=numeric
            ),
        ),
        foot=(
            "by known rows: query and key rows are not permuted, so their columns are compared as they are",
            "by sorted values: sorted magnitudes are compared, so no permutation has to be known",
        ),
        alarms=(alarm,) if broken else (),
    )
