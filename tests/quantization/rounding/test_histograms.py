"""Histograms of weights and inputs, against numpy's over the decoded matrix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layers import one_layer

from quantkit.plan.formats import Format, Grid
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.grid import decode_all
from quantkit.quantization.layout import Contents, Pack
from quantkit.quantization.rounding.apply import quantized_parts
from quantkit.quantization.rounding.errors import Squares, Sums
from quantkit.quantization.rounding.histograms import (
    weight_histograms,
    with_input_histogram,
    worst_packs,
)
from quantkit.quantization.rounding.pack_histograms import Clipping, Histogram, PackHistograms
from quantkit.quantization.rounding.rtn import round_to_nearest

pytestmark = pytest.mark.once
WEIGHT_OI = np.random.default_rng(0).standard_t(4, size=(96, 70)).astype(np.float32)
GRIDS = (
    Grid(block=32),
    Grid(),
    Grid(bits=4, block=32),
    Grid(bits=4, block=32, is_symmetric=False),
    Grid(bits=16),
)
NONE = Histogram(low=-1, high=1, counts=(0,))
EMPTY = PackHistograms(
    name="x",
    format="",
    weights=NONE,
    rounded=NONE,
    weight_clipping=Clipping(lowest=0, median=0, highest=0),
)


class Stored:
    """Weights in memory, read as from a file."""

    def shape(self, name):
        return WEIGHT_OI.shape

    def has(self, name):
        return name.endswith(".weight")

    def read(self, name, start=0, count=None):
        return WEIGHT_OI[start : None if count is None else start + count]

    def source_bytes(self):
        return WEIGHT_OI.nbytes


def pack_of(grid, activations="block"):
    layer = one_layer(96, 70, name="x")
    return Pack(name="x", layers=(layer,), format=Format(grid=grid, activations=activations))


def counted(values, histogram):
    edges = np.linspace(histogram.low, histogram.high, len(histogram.counts) + 1)
    return np.histogram(values.astype(np.float64), edges)[0]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_weights_before_and_after_rounding(grid, tmp_path):
    pack = pack_of(grid)
    contents = Contents(packs=(pack,), tables=(), norms=(), norm_biases=frozenset())
    parts = quantized_parts(contents, Stored())
    checkpoint = write_checkpoint(tmp_path / "weights.safetensors", contents.tensors(), parts, {})
    found = weight_histograms(pack, Stored(), checkpoint)
    encoded = round_to_nearest(WEIGHT_OI, grid)
    for values, histogram in ((WEIGHT_OI, found.weights), (decode_all(encoded, 70), found.rounded)):
        assert sum(histogram.counts) == WEIGHT_OI.size
        # A value beside an edge may be counted on its other side.
        assert np.abs(np.array(histogram.counts) - counted(values, histogram)).sum() <= 4
        assert histogram.low < values.min() < values.max() < histogram.high
    if grid.is_symmetric:
        largest = encoded.scales * np.float32(grid.largest)
        assert found.weight_clipping.highest == pytest.approx(np.abs(WEIGHT_OI).max(), rel=2e-3)
        assert found.weight_clipping.median == pytest.approx(np.median(largest))


@pytest.mark.parametrize(
    ("activations", "peaks"),
    [
        ("block", lambda x: [np.abs(x[:, at : at + 32]).max(1) for at in (0, 32, 64)]),
        ("token", lambda x: np.abs(x).max(1)),
        ("tensor", lambda x: np.abs(x).max()),
    ],
)
def test_inputs_and_the_peaks_that_share_a_scale(activations, peaks):
    inputs_TI = np.random.default_rng(1).normal(size=(50, 70)).astype(np.float32)
    pack = pack_of(Grid(block=32), activations)
    found = with_input_histogram(EMPTY, pack, inputs_TI, None)
    assert np.abs(np.array(found.inputs.counts) - counted(inputs_TI, found.inputs)).sum() <= 4
    assert found.input_clipping.median == pytest.approx(float(np.median(peaks(inputs_TI))))
    assert found.input_clipping.highest == pytest.approx(float(np.abs(inputs_TI).max()))
    assert found.input_range is None


def test_a_range_from_calibration_clips():
    inputs_TI = np.random.default_rng(1).normal(size=(50, 70)).astype(np.float32)
    found = with_input_histogram(EMPTY, pack_of(Grid(), "static8"), inputs_TI, (0.01, 100))
    assert found.input_range == pytest.approx((-1.0, 1.55))
    assert found.input_clipping is None


def test_the_worst_packs_come_first_by_outputs_where_these_are_known():
    packs = [replace(pack_of(Grid()), name=name) for name in "abcd"]
    contents = Contents(packs=tuple(packs), tables=(), norms=(), norm_biases=frozenset())

    def sums(weights, outputs):
        known = Squares(values=1.0, errors=outputs) if outputs else Squares()
        return Sums(weights=Squares(values=1.0, errors=weights), outputs=known)

    losses = dict(zip("abcd", (sums(0.1, 0.4), sums(0.9, 0.1), sums(0.3, 0), sums(0.2, 0.0)), strict=True))
    assert [pack.name for pack in worst_packs(contents, losses)] == ["a", "c", "d"]
