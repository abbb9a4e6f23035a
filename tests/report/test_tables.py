"""Tables on narrow screens: labels stay whole, and figures that have no room go into further tables."""

from __future__ import annotations

import pytest

from quantkit.report.tables import Table, _parts

FIGURES = tuple(f"figure{number}" for number in range(9))
TABLE = Table(
    title="Artifacts",
    columns=("artifact", *FIGURES),
    rows=tuple((name, *("123.45" for _ in FIGURES)) for name in ("a-long-name-of-an-artifact", "short")),
    numeric=FIGURES,
)


@pytest.mark.parametrize(("width", "parts"), [(200, 1), (107, 1), (106, 2), (80, 2), (44, 5), (20, 9)])
def test_figures_without_room_go_into_further_tables(width, parts):
    made = _parts(TABLE, width)
    assert len(made) == parts
    assert [column for part in made for column in part.columns[1:]] == list(FIGURES), "none is lost"
    for part in made:
        assert part.columns[0] == "artifact"
        assert [row[0] for row in part.rows] == [row[0] for row in TABLE.rows]
        assert all(len(row) == len(part.columns) for row in part.rows)


def test_figures_between_texts_stay_where_they_are():
    table = Table(
        title="", columns=("name", "in", "reason"), rows=(("n" * 30, "1", "r" * 30),), numeric=("in",)
    )
    assert _parts(table, 40) == [table]
