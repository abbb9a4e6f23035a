"""Bars, shares and what was left: each may round, but never to all or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.evaluation.measurements import Environment, ProviderAccuracy, ProviderRun, Timing
from quantkit.report.document import rerun_json
from quantkit.report.figures import bar, percent
from quantkit.report.providers import providers_page
from quantkit.runtime.providers.placement import PlacedOperator, Placement, UnplacedNode

pytestmark = pytest.mark.once
TIMING = Timing(
    median_ms=4.0, lowest_ms=3.0, lower_quartile_ms=3.5, upper_quartile_ms=4.5, highest_ms=9.0, num_runs=5
)
LEFT = tuple(
    UnplacedNode(operator="Gelu", name=f"h.{number}/act", layer=f"h.{number}", reason="not supported")
    for number in range(5)
)


@given(st.floats(0, 1))
def test_a_bar_is_full_or_empty_only_where_that_is_true(share: float) -> None:
    cells = bar(share)
    assert len(cells) == 20 and set(cells) <= {"█", "░"}
    assert (cells == "█" * 20) == (share == 1)
    assert (cells == "░" * 20) == (share == 0)
    assert abs(cells.count("█") / 20 - share) <= 0.05
    assert (percent(share) == "100.0%") == (share == 1)
    assert (percent(share) == "0.0%") == (share == 0)


def document(*, strict: bool) -> dict:
    placement = Placement(
        provider="QNNExecutionProvider",
        node_fraction=0.5,
        mac_fraction=0.93,
        num_nodes=10,
        operators=(PlacedOperator(operator="MatMul", provider="QNNExecutionProvider", num_nodes=5),),
        unplaced=LEFT,
    )
    accuracy = ProviderAccuracy(
        reference="demo in float32", max_relative_logit_error=0.017, top1_agreement=0.98, num_tokens=256,
        kl_divergence=0.00123, perplexity_ratio=1.0023,
    )  # fmt: skip
    runs = (
        ProviderRun(
            provider="qnn", outcome="partly", why_not="died", cure="update", start_ms=12.0, prompt_length=64,
            library_ms=200.0, start_again_ms=2.0, compile_ms=10.0,
            prefill=TIMING, placement=placement, accuracy=accuracy, notes=("timing it: no",),
        ),
        ProviderRun(provider="cuda", outcome="failed", why_not="not installed", cure="pip install it"),
    )  # fmt: skip
    return rerun_json(
        {"artifact": "out", "model": "demo", "scheme": "int8"},
        providers=runs,
        threads=2,
        environment=Environment(processor="p", num_cores=2, python="3", platform="l", versions={}),
        strict=strict,
        notes=("a note",),
    )


def test_the_page_shows_every_row_and_groups_what_was_left() -> None:
    page = providers_page(document(strict=True))
    speed, accuracy, shares, left, failed = page.tables
    assert speed.rows == (
        ("qnn", "partly", "200", "12.0", "2.00", "4.00", "-", "-"),
        ("cuda", "failed", "-", "-", "-", "-", "-", "-"),
    )
    assert accuracy.title == "Accuracy beside demo in float32"
    assert accuracy.columns == (
        "provider",
        "tokens",
        "perplexity",
        "KL, nats",
        "largest error",
        "top-1",
    )
    assert accuracy.rows == (("qnn", "256", "x 1.0023", "0.00123", "1.70%", "98.0%"),)
    assert any("qnn: cached start is 6.0 times faster" in line for line in page.foot)
    assert shares.rows == (
        ("qnn", "█" * 19 + "░", "93.0%", "5 of 10", "-"),
        ("cuda", "░" * 20, "-", "-", "-"),
    )
    assert left.rows == (("qnn", "Gelu", "5", "h.0, h.1, h.2 and 2 more", "not supported"),)
    assert failed.rows == (("qnn", "died", "update"), ("cuda", "not installed", "pip install it"))
    assert page.warnings == ("a note", "qnn: timing it: no")
    assert page.alarms == (
        "qnn left 5 nodes to the CPU: Gelu x5",
        "cuda did not run the model: not installed",
    )
    assert providers_page(document(strict=False)).alarms == ("cuda did not run the model: not installed",)


def test_an_encoder_is_judged_by_where_its_states_point() -> None:
    accuracy = ProviderAccuracy(
        reference="bert in float32", max_relative_logit_error=0.01, top1_agreement=0.2, num_tokens=64,
        lowest_cosine=0.99951,
    )  # fmt: skip
    run = ProviderRun(provider="cpu", outcome="ran", accuracy=accuracy)
    environment = Environment(processor="p", num_cores=2, python="3", platform="l", versions={})
    document = rerun_json(
        {"artifact": "out", "model": "m", "scheme": "s"},
        providers=(run,),
        threads=1,
        environment=environment,
        strict=False,
        notes=(),
    )
    table = providers_page(document).tables[1]
    assert table.columns == ("provider", "tokens", "lowest cosine", "largest error")
    assert table.rows == (("cpu", "64", "0.99951", "1.00%"),)


@pytest.mark.parametrize(
    ("mac_fraction", "unplaced", "words"),
    [(1.0, (), "ran"), (0.93, LEFT, "ran, mixed"), (None, LEFT, "ran, mixed"), (0.0, LEFT, "ran on the CPU")],
)
def test_a_time_says_whose_it_is(mac_fraction: float | None, unplaced: tuple, words: str) -> None:
    placement = Placement(
        provider="p",
        node_fraction=0.5,
        mac_fraction=mac_fraction,
        num_nodes=10,
        operators=(),
        unplaced=unplaced,
    )
    run = ProviderRun(provider="qnn", outcome="ran", placement=placement)
    environment = Environment(processor="p", num_cores=2, python="3", platform="l", versions={})
    document = rerun_json(
        {"artifact": "out", "model": "m", "scheme": "s"},
        providers=(run,),
        threads=1,
        environment=environment,
        strict=False,
        notes=(),
    )
    assert providers_page(document).tables[0].rows[0][1] == words
