"""Every family calibrated, block by block and whole, against inputs gathered by plain hooks in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calibrating import check, everything, inputs_of
from exporting import build_tiny, slow_unless_of_a_kind

from quantkit.model.experts import with_separate_experts
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.model.names import modules_by_name
from quantkit.quantization.calibration.passes import collect

pytestmark = pytest.mark.once
RUN_WHOLE = {
    "albert": "more than once",
    "t5": "does not read the output",
    "quantkit_one_wide": "does not read the output",
}
CASES = [
    pytest.param(name, {**row.tiny, **variant}, id=f"{name}-{number}", marks=slow_unless_of_a_kind(name))
    for name, row in FAMILIES.items()
    for number, variant in enumerate(({}, *row.variants))
]
TOKENS = np.random.default_rng(0).integers(5, 60, (5, 20))  # longer than the tiny models' windows of 8


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_every_input_of_every_family(name, sizes, tmp_path):
    model = with_separate_experts(build_tiny(FAMILIES[name].tiny_class, sizes, dtype=torch.float64))
    model_map = map_module(model, name=name).at_inference
    named = modules_by_name(model)
    modules = {matrix: named[matrix] for matrix in model_map.matrices}
    rows = inputs_of(model, TOKENS, modules)
    blocks = [block.name for block in model_map.blocks]
    wanted = everything(model_map.matrices)
    by_blocks = collect(model, TOKENS, requested=wanted, blocks=blocks, folder=tmp_path / "blocks", batch=2)
    whole = collect(
        model, TOKENS, requested=wanted, blocks=(), folder=tmp_path / "whole", batch=5, memory_bytes=1 << 22
    )
    if name in RUN_WHOLE:
        assert RUN_WHOLE[name] in by_blocks.way
    else:
        assert by_blocks.way == "blocks"
    assert whole.way == "whole: no blocks are known"
    for statistics in (by_blocks, whole):
        assert set(statistics.located) == set(rows) == set(model_map.matrices)
        assert statistics.unreached == ()
        assert statistics.num_tokens == TOKENS.size
        for matrix in model_map.matrices:
            seen = statistics.read(matrix)
            order = rows[matrix]
            check(seen, order)
    for matrix in model_map.matrices:
        one, other = by_blocks.read(matrix), whole.read(matrix)
        assert one.num_rows == other.num_rows
        assert np.abs(one.peak_I - other.peak_I).max() <= 1e-6 * np.abs(one.peak_I).max()
    tokens = by_blocks.tokens_by_matrix()
    assert {matrix: len(found) for matrix, found in rows.items()} == tokens
    for layer in model_map.layers:
        assert layer.expert is not None or tokens[layer.matrix] == layer.calls * TOKENS.size
    for block in model_map.blocks if model_map.num_experts else ():
        met = {layer.expert: tokens[layer.matrix] for layer in model_map.layers if layer.block == block.name}
        met.pop(None)
        assert sum(met.values()) == (model_map.num_active_experts * TOKENS.size if block.mixture else 0)
