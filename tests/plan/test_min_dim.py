"""The rule that measured times lead to: checked by trying every set of projections, and by its own words."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.model.inspect import inspect
from quantkit.plan.min_dim import FLOAT, Product, ShapeTime, auto_min_dim, faster_than_float
from quantkit.plan.select import choose

FORMAT = "int8_block128"
SHAPES = [(64, 64), (64, 256), (256, 64), (64, 1000)]


def time(shape, name, rows, median, spread=0.0):
    return ShapeTime(
        in_features=shape[0],
        out_features=shape[1],
        format_name=name,
        rows=rows,
        median_us=median,
        spread_us=spread,
        runs=10,
    )


def times_of(shape, integers, floats, *, spread=0.0, rows=128):
    """Times of (token, prompt) in integers and in float."""
    return [
        time(shape, name, count, median, spread)
        for name, pair in ((FORMAT, integers), (FLOAT, floats))
        for count, median in zip((1, rows), pair, strict=True)
    ]


def product(layers, shape, **extra):
    settings_ = {"format_name": FORMAT, "prompt_rows": 128, **extra}
    return Product(layers=tuple(layers), in_features=shape[0], out_features=shape[1], **settings_)


@pytest.fixture(scope="module")
def gpt2():
    """(map, products as GPT-2 small runs them: query, key and value are one)."""
    model_map = inspect("gpt2")
    packs = {}
    for layer in model_map.layers:
        packs.setdefault(layer.matrix, []).append(layer)
    products = [
        product(
            [layer.name for layer in layers],
            (layers[0].in_features, sum(layer.out_features for layer in layers)),
        )
        for layers in packs.values()
    ]
    return model_map, products


@pytest.mark.once
@pytest.mark.parametrize(
    ("integers", "floats", "weight", "wins"),
    [
        ((1, 100), (4, 150), 64, True),
        ((1, 300), (4, 150), 64, True),  # 192 us of tokens outweigh 150 us of prompt
        ((1, 300), (4, 150), 49, False),
        ((1, 300), (4, 150), 0, False),
        ((5, 100), (4, 150), 64, False),
        ((4, 150), (4, 150), 64, True),  # equal times: the smaller format
    ],
)
def test_a_prompt_and_its_tokens_are_weighed_together(integers, floats, weight, wins):
    shape = SHAPES[0]
    verdicts = faster_than_float(
        [product(["a"], shape)], times_of(shape, integers, floats), decode_weight=weight
    )
    assert verdicts[(*shape, FORMAT)].wins is wins


@pytest.mark.once
@pytest.mark.parametrize(("spread", "wins"), [(0, False), (1.9, False), (2.1, True)])
def test_a_difference_within_the_spread_is_none(spread, wins):
    """The integers are 1 us slower; of a distance of 2 between the quartiles, half counts."""
    shape = SHAPES[0]
    times = times_of(shape, (5, 5), (4, 4), spread=spread, rows=1)
    verdicts = faster_than_float([product(["a"], shape, prompt_rows=1)], times)
    assert verdicts[(*shape, FORMAT)].wins is wins


@pytest.mark.once
def test_times_that_are_missing_give_no_verdict():
    shape = SHAPES[0]
    complete = times_of(shape, (1, 1), (2, 2))
    for left_out in range(4):
        times = complete[:left_out] + complete[left_out + 1 :]
        assert not faster_than_float([product(["a"], shape)], times)


@settings(deadline=None, max_examples=60)
@given(gains=st.lists(st.sampled_from([-3.0, 2.0]), min_size=5, max_size=5))
def test_the_rule_with_its_exclusions_is_the_fastest_of_all_choices(gpt2, gains):
    """By brute force over the shapes: no set of them in integers is faster than what the rule takes."""
    model_map, products = gpt2
    shapes = sorted({(entry.in_features, entry.out_features) for entry in products})
    gain_of = dict(zip(shapes, gains, strict=True))
    times = [time for s in shapes for time in times_of(s, (10 - gain_of[s], 50), (10, 50))]
    choice = auto_min_dim(model_map, products, times, decode_weight=1)
    plan = choose(model_map, min_dim=choice.min_dim, exclude=tuple(choice.excluded))
    taken = {layer.name for layer in plan.layers if layer.quantized}

    def gain(names):
        return sum(
            gain_of[entry.in_features, entry.out_features] for entry in products if set(entry.layers) <= names
        )

    names_of = {
        s: {n for p in products if (p.in_features, p.out_features) == s for n in p.layers} for s in shapes
    }
    choices = itertools.chain.from_iterable(itertools.combinations(shapes, count) for count in range(6))
    assert gain(taken) == max(gain(set().union(*(names_of[s] for s in chosen))) for chosen in choices)


def test_what_loses_is_excluded_with_both_times(gpt2):
    model_map, products = gpt2
    times = []
    for shape in {(entry.in_features, entry.out_features) for entry in products}:
        loses = shape == (768, 768)
        times += times_of(shape, (41, 900) if loses else (20, 500), (35, 800))
    choice = auto_min_dim(model_map, products, times)
    assert choice.min_dim == 768
    assert len(choice.excluded) == 12
    assert set(choice.excluded.values()) == {
        "measured: INT8 41 us, float 35 us a token; 900 us, 800 us for 128"
    }
    assert all(name.endswith("attn.c_proj") for name in choice.excluded)
    plan = choose(model_map, min_dim=choice.min_dim, exclude=tuple(choice.excluded))
    assert plan.projections.quantized == 73 - 12


def test_small_losers_are_under_the_size_and_need_no_exclusion(gpt2):
    model_map, products = gpt2
    times = []
    for shape in {(entry.in_features, entry.out_features) for entry in products}:
        times += times_of(shape, (50, 500) if max(shape) < 3000 else (20, 500), (35, 800))
    choice = auto_min_dim(model_map, products, times)
    assert (choice.min_dim, dict(choice.excluded)) == (3072, {})
    assert choose(model_map, min_dim=choice.min_dim).projections.quantized == 25


def test_where_float_always_wins_nothing_is_quantized(gpt2):
    model_map, products = gpt2
    times = [
        time
        for shape in {(entry.in_features, entry.out_features) for entry in products}
        for time in times_of(shape, (9, 9), (3, 3))
    ]
    choice = auto_min_dim(model_map, products, times)
    assert choose(model_map, min_dim=choice.min_dim).projections.quantized == 0
    assert not choice.excluded
    assert "nothing is quantized" in choice.notes[0]


def test_what_was_not_measured_is_quantized_and_named(gpt2):
    model_map, products = gpt2
    choice = auto_min_dim(model_map, products, [])
    assert choose(model_map, min_dim=choice.min_dim).projections.quantized == 73
    assert "5 shapes were not measured" in choice.notes[0]


def test_projections_that_the_user_left_out_have_no_say(gpt2):
    """Only the up-projections are asked for: their size is the rule, whatever the small ones would say."""
    model_map, products = gpt2
    ups = [entry for entry in products if entry.out_features == 3072]
    choice = auto_min_dim(model_map, ups, times_of((768, 3072), (20, 500), (35, 800)))
    assert (choice.min_dim, dict(choice.excluded), choice.notes) == (3072, {}, ())
