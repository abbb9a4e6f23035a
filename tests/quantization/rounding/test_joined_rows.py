"""Projections whose rows are fitted together, out of one stored matrix, however it is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layers import one_layer

from quantkit.model.linears import LINEARS
from quantkit.model.model_map import Rows
from quantkit.plan.formats import Format, Grid, in_blocks
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import from_bytes
from quantkit.quantization.layout import Contents, Pack
from quantkit.quantization.projections import runs_of
from quantkit.quantization.rounding import gptq_joint as both_sides
from quantkit.quantization.rounding.apply import quantized_parts
from quantkit.quantization.rounding.gptq import factorise, with_feedback
from quantkit.quantization.rounding.gptq_joint import factorise_outputs, with_both_feedbacks

pytestmark = pytest.mark.once
OUTPUTS, INPUTS = 50, 72
TRANSPOSED = {name: row.is_transposed for name, row in LINEARS.items()}
FORMATS = [
    in_blocks(32, bits=4),
    in_blocks(32, bits=4, is_symmetric=False),
    Format(grid=Grid(), activations="tensor"),
]
PLACES = {
    "even": Rows(start=0, length=4, stride=8, count=4),
    "odd": Rows(start=4, length=4, stride=8, count=4),
    "rest": Rows(start=32, length=OUTPUTS - 32, stride=OUTPUTS),  # its outputs were not seen
}


class OneMatrix:
    """A matrix as a checkpoint gives it, as [out, in] or as [in, out]."""

    def __init__(self, stored):
        self.stored = stored

    def read(self, name, start=0, count=None):
        assert name == "w.weight"
        return self.stored[start:][:count].copy()


def moment_of(width, seed):
    """Values that two directions explain for the most part."""
    random = np.random.default_rng(seed)
    x_TI = random.normal(size=(900, 2)) @ random.normal(size=(2, width)) + random.normal(size=(900, width))
    return (x_TI.T @ x_TI / 900).astype(np.float32)


def layer_of(name, rows, stored_as):
    outputs = rows.count * rows.length
    return one_layer(outputs, INPUTS, rows, name=name, matrix="w", stored_as=stored_as)


def seen_of(layer):
    inputs = InputStatistics(num_rows=900, second_moment_II=moment_of(INPUTS, 0))
    if layer.name == "rest":
        return inputs
    return replace(inputs, gradient_OO=moment_of(layer.out_features, len(layer.name)), num_gradients=900)


def wanted_of(layer, weight_OI, grid):
    """The fit of the projection's own rows, and that of one side."""
    own_OI = np.concatenate([weight_OI[start : start + count] for start, count in runs_of(layer, 99)])
    columns, rows = factorise(seen_of(layer), grid), factorise_outputs(seen_of(layer), grid)
    one_sided = with_feedback(own_OI, grid, columns)
    return one_sided if rows is None else with_both_feedbacks(own_OI, grid, columns, rows), one_sided


@pytest.mark.parametrize("stored_as", ["linear", "conv1d"])
@pytest.mark.parametrize("pack_format", FORMATS, ids=str)
def test_each_projection_is_fitted_as_a_whole(pack_format, stored_as, monkeypatch):
    monkeypatch.setattr(both_sides, "GROUP", 4)
    weight_OI = (np.random.default_rng(5).normal(size=(OUTPUTS, INPUTS)) * 0.1).astype(np.float32)
    layers = tuple(layer_of(name, rows, stored_as) for name, rows in PLACES.items())
    contents = Contents(
        packs=(Pack(name="w", layers=layers, format=pack_format),),
        tables=(),
        norms=(),
        norm_biases=frozenset(),
    )
    source, made = OneMatrix(weight_OI.T if TRANSPOSED[stored_as] else weight_OI), []
    for rows, threads in ((OUTPUTS, 1), (1, 2), (7, 4)):
        monkeypatch.setattr("quantkit.quantization.rounding.apply.CHUNK_VALUES", rows * INPUTS)
        parts = {}
        for name, part in quantized_parts(contents, source, statistics=seen_of, fit="gptq", threads=threads):
            parts.setdefault(name, []).append(part)
        made.append({name: np.concatenate(each) for name, each in parts.items()})
    assert all((other[name] == made[0][name]).all() for other in made[1:] for name in made[0])
    grid = pack_format.grid
    wanted, one_sided = zip(*(wanted_of(layer, weight_OI, grid) for layer in layers), strict=True)
    same = [(one.codes == other.codes).all() for one, other in zip(wanted, one_sided, strict=True)]
    assert same == [False, False, True]
    scales = np.concatenate([each.scales for each in wanted])
    codes = np.concatenate([each.codes for each in wanted])
    if grid.block is None:
        assert (made[0]["w.codes_IO"] == codes[:, 0].T).all()
        assert (made[0]["w.scales"] == scales[:, 0]).all()
    else:
        assert (from_bytes(made[0]["w.codes"], grid.bits, grid.block) == codes).all()
        assert (made[0]["w.scales"] == scales).all()
