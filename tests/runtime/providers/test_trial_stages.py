"""What a provider's process decides by itself: which positions it can afford, whose artifact it was given."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.plan.targets import TARGETS
from quantkit.runtime.manifest import target_of
from quantkit.runtime.providers.trial_stages import STATIC_TARGETS, spread

pytestmark = pytest.mark.once


@given(number=st.integers(1, 40), count=st.integers(-2, 60))
def test_positions_are_spread_evenly_and_there_is_always_one(number: int, count: int) -> None:
    places = [8 * place + 6 for place in range(number)]
    chosen = spread(places, count)
    assert len(chosen) == max(1, min(count, number))
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(places)
    gaps = [after - before for before, after in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 8  # one place more or less
    assert spread(places, number) == places


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ('{"target": "npu"}', "npu"),
        ('{"target": 3}', None),
        ("{}", None),
        ("[1]", None),
        ('{"target"', None),
        (None, None),
    ],
)
def test_a_target_is_told_only_where_the_manifest_says_one(text, target, tmp_path) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    assert target_of(tmp_path) == target


def test_static_targets_are_those_of_the_table() -> None:
    assert set(STATIC_TARGETS) == {name for name, row in TARGETS.items() if row.is_static}
