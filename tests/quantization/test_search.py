"""The search against trying everything: its line holds what is best at each price; bisection ends on it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.quantization.search import (
    Budget,
    Choice,
    Loss,
    PackOptions,
    Search,
    bytes_of,
    cost_of,
    hull_of,
    line_of,
    most_accurate_within,
    predicted_loss,
    uniform,
)

pytestmark = pytest.mark.once
FORMATS = ("float", "int8", "int4")
NUMBERS = st.integers(0, 40).map(float)
UNITS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=3), min_size=1, max_size=4).map(
    lambda drawn: tuple(
        PackOptions(
            name=f"u{number}",
            layers=(f"u{number}",),
            options=tuple(
                Choice(format=name, loss=loss, cost=cost)
                for name, (loss, cost) in zip(FORMATS, options, strict=False)
            ),
        )
        for number, options in enumerate(drawn)
    )
)
fast = settings(max_examples=150)


def everything(units):
    """(loss, cost) of every configuration there is."""
    for options in itertools.product(*(unit.options for unit in units)):
        yield sum(each.loss for each in options), sum(each.cost for each in options)


@fast
@given(units=UNITS)
def test_nothing_beats_a_configuration_of_the_line(units):
    line = line_of(units)
    found = [(predicted_loss(units, each), cost_of(units, each)) for each in line]
    for (loss, cost), (next_loss, next_cost) in itertools.pairwise(found):
        assert next_loss >= loss
        assert next_cost < cost
    for loss, cost in found:
        assert not any(
            (other_loss < loss and other_cost <= cost) or (other_loss <= loss and other_cost < cost)
            for other_loss, other_cost in everything(units)
        )
    assert found[0][0] == min(loss for loss, _ in everything(units)), "it starts at the most accurate"
    assert found[-1][1] == min(cost for _, cost in everything(units)), "and ends at the cheapest"


@fast
@given(units=UNITS, price=st.floats(0.01, 100))
def test_at_any_price_the_best_of_all_is_on_the_line(units, price):
    best = min(cost + price * loss for loss, cost in everything(units))
    on_line = min(cost_of(units, each) + price * predicted_loss(units, each) for each in line_of(units))
    assert on_line == pytest.approx(best)


@fast
@given(units=UNITS, limit=st.floats(0.5, 60))
def test_bisection_ends_at_the_cheapest_of_the_line_that_holds(units, limit):
    def evaluate(choices):
        return Loss(ppl_increase=0.0, kl_divergence=predicted_loss(units, choices), top1_agreement=1.0)

    search = Search(packs=units, evaluate=evaluate, budget=Budget(max_kl=limit), limit=20, tried={})
    search.bisect()
    holding = [cost_of(units, each) for each in line_of(units) if predicted_loss(units, each) <= limit]
    best = search.best()
    assert (best.cost if best else None) == (min(holding) if holding else None)
    assert len(search.tried) <= 5, "bisection of at most nine steps"


@fast
@given(units=UNITS, share=st.floats(0, 1.2))
def test_within_a_size_no_pack_can_be_improved_and_the_line_is_beaten_or_met(units, share):
    units = tuple(
        replace(unit, options=tuple(replace(each, num_bytes=each.cost) for each in unit.options))
        for unit in units
    )
    sizes = [cost for _, cost in everything(units)]
    limit = min(sizes) + share * (max(sizes) - min(sizes))
    chosen = most_accurate_within(units, limit)
    assert bytes_of(units, chosen) <= limit
    on_line = [predicted_loss(units, each) for each in line_of(units) if bytes_of(units, each) <= limit]
    assert predicted_loss(units, chosen) <= min(on_line)
    for unit in units:
        options = {each.format: each for each in unit.options}
        now = options.pop(chosen[unit.name])
        others = bytes_of(units, chosen) - now.num_bytes
        assert not any(
            each.loss < now.loss and others + each.num_bytes <= limit for each in options.values()
        ), "bytes are left for a more accurate format"
    assert most_accurate_within(units, min(sizes) - 1) is None


def test_a_large_step_of_the_line_leaves_no_bytes_unused():
    """A head that is too large in floats; its step leaves 70 bytes, and the body takes 40 of them."""

    def pack(name, *options):
        choices = [Choice(format=f, loss=loss, cost=size, num_bytes=size) for f, loss, size in options]
        return PackOptions(name=name, layers=(name,), options=tuple(choices))

    packs = [
        pack("body", ("float", 0, 60), ("int8", 0.1, 20)),
        pack("head", ("float", 0, 100), ("int8", 1, 10)),
    ]
    assert line_of(packs)[1] == {"body": "int8", "head": "float"}
    assert most_accurate_within(packs, 100) == {"body": "float", "head": "int8"}


def test_a_hull_leaves_out_what_no_price_asks_for():
    def choice(name, loss, cost):
        return Choice(format=name, loss=loss, cost=cost)

    options = [choice("float", 0, 32), choice("int8", 1, 8), choice("int6", 4, 7.9), choice("int4", 5, 4)]
    assert [each.format for each in hull_of(options)] == ["float", "int8", "int4"]
    assert [each.format for each in hull_of([choice("a", 1, 8), choice("b", 1, 4)])] == ["b"]


def test_both_limits_count_and_the_tighter_one_decides():
    budget = Budget(max_ppl_increase=0.01, max_kl=0.02)
    loss = Loss(ppl_increase=0.005, kl_divergence=0.018, top1_agreement=1.0)
    assert budget.share(loss) == pytest.approx(0.9)
    assert budget.holds(loss)
    assert not budget.holds(loss, tightened=0.8)
    better = Loss(ppl_increase=-0.01, kl_divergence=0.0, top1_agreement=1.0)
    assert budget.share(better) == 0.0, "a gain is no credit"


def test_no_more_is_measured_than_is_allowed():
    unit = PackOptions(
        name="u",
        layers=("u",),
        options=tuple(Choice(format=str(i), loss=float(i * i), cost=float(100 - i)) for i in range(40)),
    )
    calls = []

    def evaluate(choices):
        calls.append(choices)
        return Loss(ppl_increase=0.0, kl_divergence=9.0, top1_agreement=1.0)

    search = Search(packs=[unit], evaluate=evaluate, budget=Budget(max_kl=1.0), limit=3, tried={})
    search.bisect()
    assert len(calls) == 3
    assert search.best() is None
    assert search.most_accurate() in search.tried.values()
    assert search.measure({"u": "0"}, "again") is None or len(calls) == 3


def test_uniform_needs_every_unit_to_have_the_format():
    one = PackOptions(name="a", layers=("a",), options=(Choice(format="int8", loss=0, cost=1),))
    two = PackOptions(name="b", layers=("b",), options=(Choice(format="int4", loss=0, cost=1),))
    assert uniform([one], "int8") == {"a": "int8"}
    assert uniform([one, two], "int8") is None
