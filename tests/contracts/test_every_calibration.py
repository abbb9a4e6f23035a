"""Every family calibrated, block by block and whole, against inputs gathered by plain hooks in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calibrating import check, everything, inputs_of
from examples import examples_of
from exporting import build_tiny, slow_unless_of_a_kind

from quantkit.model.experts import with_separate_experts
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.model.names import modules_by_name
from quantkit.quantization.calibration.passes import collect

pytestmark = pytest.mark.once
RUN_WHOLE = {
    "albert": "more than once",
    **dict.fromkeys(("t5", "mt5", "mbart", "pegasus"), "does not read the output"),
    **dict.fromkeys(("bart", "marian"), "depends on the text"),
    "quantkit_one_wide": "does not read the output",
}
CASES = [
    pytest.param(name, {**row.tiny, **variant}, id=f"{name}-{number}", marks=slow_unless_of_a_kind(name))
    for name, row in FAMILIES.items()
    for number, variant in enumerate(({}, *row.variants))
]
NUM_WINDOWS, LENGTH = 5, 20  # longer than the tiny models' windows of 8


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_every_input_of_every_family(name, sizes, tmp_path):
    model = with_separate_experts(build_tiny(FAMILIES[name].tiny_class, sizes, dtype=torch.float64))
    model_map = map_module(model, name=name).at_inference
    tokens = examples_of(model, NUM_WINDOWS, LENGTH, dtype=np.float64)
    num_tokens = NUM_WINDOWS * (model_map.context if model_map.picture else LENGTH)
    named = modules_by_name(model)
    modules = {matrix: named[matrix] for matrix in model_map.matrices}
    rows = inputs_of(model, tokens, modules)
    blocks = [block.name for block in model_map.blocks]
    wanted = everything(model_map.matrices)
    by_blocks = collect(model, tokens, requested=wanted, blocks=blocks, folder=tmp_path / "blocks", batch=2)
    whole = collect(
        model, tokens, requested=wanted, blocks=(), folder=tmp_path / "whole", batch=5, memory_bytes=1 << 22
    )
    if name in RUN_WHOLE:
        assert RUN_WHOLE[name] in by_blocks.way
    else:
        assert by_blocks.way == "blocks"
    assert whole.way == "whole: no blocks are known"
    for statistics in (by_blocks, whole):
        # torch's own attention multiplies by the weight of its output projection without calling it
        unread = {matrix for matrix in model_map.matrices if "head.attention." in matrix}
        assert set(statistics.located) - unread == set(rows) == set(model_map.matrices) - unread
        assert set(statistics.unreached) <= unread
        assert statistics.num_tokens == tokens.size
        for matrix in rows:
            seen = statistics.read(matrix)
            order = rows[matrix]
            check(seen, order)
    for matrix in rows:
        one, other = by_blocks.read(matrix), whole.read(matrix)
        assert one.num_rows == other.num_rows
        assert np.abs(one.peak_I - other.peak_I).max() <= 1e-6 * np.abs(one.peak_I).max()
    counts = by_blocks.tokens_by_matrix()
    assert {matrix: len(found) for matrix, found in rows.items()} == {name: counts[name] for name in rows}
    for layer in model_map.layers:
        if (
            model_map.head_reads_one_token and not layer.block
        ):  # patches without the other tokens, and a head's own rows
            continue
        assert layer.expert is not None or counts[layer.matrix] == layer.calls * num_tokens
    for block in model_map.blocks if model_map.num_experts else ():
        met = {layer.expert: counts[layer.matrix] for layer in model_map.layers if layer.block == block.name}
        met.pop(None)
        assert sum(met.values()) == (model_map.num_active_experts * num_tokens if block.mixture else 0)
