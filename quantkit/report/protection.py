"""The page of an audit: the share of each secret permutation that public weights reveal."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.report.tables import Cells, Json, Page, table_of

REVEALED = 0.5  # share of a permutation from which it counts as recovered
ATTACKS = ("by_known_rows", "by_sorted_values")


def audit_page(orders: Sequence[Json]) -> Page:
    """One row for each permutation, from the JSON form of an audit."""
    cells: Cells = {
        "weights": lambda order: "this folder" if order["is_given"] else str(order["weights"]),
        "permuted": lambda order: ", ".join(order["permutes"]),
        "order of": lambda order: str(order["space"]),
        "positions": lambda order: f"{order['positions']:,}",
        "by known rows": lambda order: f"{order['by_known_rows']:.1%}",
        "by sorted values": lambda order: f"{order['by_sorted_values']:.1%}",
    }
    broken = [
        order["space"]
        for order in orders
        if order["is_given"] and max(order[attack] for attack in ATTACKS) >= REVEALED
    ]
    alarm = f"NOT HIDDEN: the permutation of {', '.join(broken)} can be recovered from public weights"
    return Page(
        head=("Recovery of secret permutations from the public weights, as a share of positions",),
        tables=(table_of("", orders, cells, text=3),),
        foot=(
            "by known rows: query and key rows are not permuted, so their columns are compared as they are",
            "by sorted values: sorted magnitudes are compared, so no permutation has to be known",
        ),
        alarms=(alarm,) if broken else (),
    )
