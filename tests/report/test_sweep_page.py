"""The table of a sweep: hosts, ratios, failed cells, and 80 columns."""

from __future__ import annotations

from rich.console import Console

from quantkit.report import tables
from quantkit.report.sweep import sweep_page
from quantkit.report.tables import print_page

AXES = {"model": "demo", "target": "cpu", "text": ""}
FIGURES = {"size_bytes": 6_450_000.0, "kl_divergence": 0.00017, "decode_ms_per_token": 4.75}


def row(recipe, *, host="one", state="done", error=None, **parts):
    return {
        **AXES, "name": f"demo-{recipe}-cpu", "recipe": recipe, "state": state, "error": error,
        "failures": [], "host": host, "processor": "Xeon", "num_cores": 2, **parts,
    }  # fmt: skip


ROWS = [
    row("int8", figures=FIGURES, ratios={"size_bytes": 1.0, "decode_ms_per_token": 1.0}, not_compared={}),
    row(
        "int4",
        host="two",
        figures={**FIGURES, "decode_ms_per_token": 2.0},
        ratios={"size_bytes": 0.6},
        not_compared={"decode_ms_per_token": "processor Epyc against Xeon"},
    ),
    row("wrong", host=None, state="failed", error="scheme: no such file"),
]


def test_a_time_of_another_host_has_no_ratio():
    page = sweep_page({"rows": ROWS})
    figures, ratios = page.tables
    assert figures.columns == ("recipe", "state", "host", "size MB", "KL", "decode ms")
    assert figures.rows[0][1:3] == ("done", "A")
    assert figures.rows[1][2:] == ("B", "6.45", "0.00017", "(2.00)")
    assert [cells[-1] for cells in ratios.rows] == ["1x", "-", "-"]
    assert page.foot[:2] == ("host A: one, Xeon, 2 cores", "host B: two, Xeon, 2 cores")


def test_failed_cells_and_missing_figures_are_said():
    page = sweep_page({"rows": [*ROWS, row("loud", failures=["latency was not measured: no room"])]})
    assert page.head == ("4 cells: 3 done, 1 failed",)
    assert page.alarms[0] == "demo-wrong-cpu failed: scheme: no such file"
    assert "--retry" in page.alarms[1]
    assert page.warnings == ("demo-loud-cpu: latency was not measured: no room",)


def test_the_table_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(tables, "Console", lambda **_: Console(highlight=False, width=80))
    names = [
        row(f"int4_block32_gptq_{number}", figures=FIGURES, ratios={}, not_compared={}) for number in range(3)
    ]
    print_page(sweep_page({"rows": names}))
    shown = capsys.readouterr().out
    assert "int4_block32_gptq_2" in shown
    assert max(map(len, shown.splitlines())) <= 80
