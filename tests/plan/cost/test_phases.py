"""Costs by group of layers, against the rows that they are sums of."""

from __future__ import annotations

import pytest
from cost_maps import gpt2_map

from quantkit.plan.cost.phases import phase_cost
from quantkit.plan.cost.specification import specify
from quantkit.plan.machines import MACHINES

pytestmark = pytest.mark.once
SERVER = MACHINES["server-2core-vnni"]
GPT2 = gpt2_map()
BITS = {layer.name: 8 for layer in GPT2.layers}


def cost(num_tokens, past):
    return phase_cost("token", GPT2, BITS, SERVER, num_tokens=num_tokens, past=past, measured_ms=1.0)


def test_groups_add_up_to_the_specification():
    spec = specify(GPT2, batch=1, length=64, weight_bits=BITS)
    groups = cost(64, 0).groups
    assert [group.group for group in groups] == ["attention", "FFN", "lm_head", "rest"]
    for key in ("moved_bytes", "macs", "flops"):
        rows = [row for row in spec.rows if row.processing != "tokenization"]  # outside of the model
        assert sum(getattr(group, key) for group in groups) == sum(getattr(row, key) for row in rows)


def test_a_token_is_bound_by_the_bytes_of_its_weights():
    groups = {group.group: group for group in cost(1, 128).groups}
    # 12 blocks of 8 x 768^2 weights of one byte; biases, and what three steps read and write, in float32.
    floats = (3072 + 768) + (768 + 3072) + (3072 + 3072) + (3072 + 768)
    assert groups["FFN"].moved_bytes == 12 * (8 * 768**2 + 4 * floats)
    assert groups["FFN"].floor_ms == pytest.approx(groups["FFN"].moved_bytes / 36e9 * 1e3, rel=1e-6)
    assert groups["FFN"].macs == 12 * 8 * 768**2
