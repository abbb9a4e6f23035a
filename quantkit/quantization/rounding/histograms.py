"""Histograms of the packs that rounding costs most: weights before and after, and the inputs.

The value of the largest code is the clipping point of a scale. Weights are read some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from quantkit.model.weights.tensors import TensorSource
from quantkit.plan.formats import Format, Grid
from quantkit.quantization.grid import Floats
from quantkit.quantization.layout import Checkpoint, Contents, Pack
from quantkit.quantization.projections import row_chunks
from quantkit.quantization.rounding.errors import Sums
from quantkit.quantization.rounding.pack_histograms import Clipping, Histogram, PackHistograms

NUM_BINS = 80
NUM_PACKS = 3
MARGIN = 1.05  # of the bins, beyond the largest magnitude


def worst_packs(contents: Contents, losses: Mapping[str, Sums]) -> list[Pack]:
    """The packs with the largest relative error: of outputs where it was calculated, else of weights."""

    def error(pack: Pack) -> float:
        sums = losses[pack.name]
        return (sums.outputs if sums.outputs.values else sums.weights).error

    packs = [pack for pack in contents.packs if pack.name in losses and pack.num_groups == 1]
    return sorted(packs, key=error, reverse=True)[:NUM_PACKS]


def weight_histograms(pack: Pack, weights: TensorSource, checkpoint: Checkpoint) -> PackHistograms:
    """The original's weights beside those of the file."""
    assert pack.grid is not None, pack.name
    assert pack.format is not None, pack.name
    peak = max(float(np.abs(values).max()) for pair in _pairs(pack, weights, checkpoint) for values in pair)
    peak = MARGIN * peak or 1.0
    counts = np.zeros((2, NUM_BINS), np.int64)
    for pair in _pairs(pack, weights, checkpoint):
        counts += np.stack([_counts(values, -peak, peak) for values in pair])
    original, rounded = (Histogram(low=-peak, high=peak, counts=tuple(row)) for row in counts.tolist())
    scales = np.abs(checkpoint.read(f"{pack.name}.scales").astype(np.float32))
    steps = pack.grid.largest if pack.grid.is_symmetric else (pack.grid.largest - pack.grid.lowest) / 2
    return PackHistograms(
        name=pack.name,
        format=pack.format.described,
        weights=original,
        rounded=rounded,
        weight_clipping=_clipping(scales * np.float32(steps)),
    )


def with_input_histogram(
    histograms: PackHistograms, pack: Pack, inputs_TI: Floats, fixed: tuple[float, int] | None
) -> PackHistograms:
    """The histograms with that of the inputs, and the values that their largest code stands for.

    `fixed` is the scale and zero point of a range from calibration.
    """
    peak = MARGIN * float(np.abs(inputs_TI).max()) or 1.0
    inputs = Histogram(low=-peak, high=peak, counts=tuple(_counts(inputs_TI, -peak, peak).tolist()))
    chosen = pack.format
    assert chosen is not None, pack.name
    if fixed is None or chosen.input_bits is None:
        return replace(histograms, inputs=inputs, input_clipping=_input_peaks(chosen, inputs_TI, pack))
    scale, zero = fixed
    return replace(
        histograms, inputs=inputs, input_range=(-scale * zero, scale * ((1 << chosen.input_bits) - 1 - zero))
    )


def _input_peaks(chosen: Format, inputs_TI: Floats, pack: Pack) -> Clipping | None:
    """The largest magnitudes that share a dynamic scale."""
    tokens, columns = inputs_TI.shape
    if chosen.activations == "block" and chosen.grid.block:
        block = chosen.grid.block
        padded_TI = np.pad(np.abs(inputs_TI), ((0, 0), (0, -columns % block)))
        return _clipping(padded_TI.reshape(tokens, -1, block).max(axis=2))
    if chosen.scales_tokens(pack.layers[0].role):
        return _clipping(np.abs(inputs_TI).max(axis=1))
    return _clipping(np.abs(inputs_TI).max()) if chosen.activations in ("tensor", "mixed") else None


def _clipping(values: Floats) -> Clipping:
    return Clipping(lowest=float(values.min()), median=float(np.median(values)), highest=float(values.max()))


def _pairs(pack: Pack, weights: TensorSource, checkpoint: Checkpoint) -> Iterator[tuple[Floats, Floats]]:
    """Rows of a pack, as they were and as they are stored."""
    grid: Grid | None = pack.grid
    assert grid is not None
    start = 0
    for layer in pack.layers:
        for rows_OI in row_chunks(weights.read, layer):
            rows = slice(start, start + len(rows_OI))
            yield rows_OI, checkpoint.weight_OI(pack.name, grid, pack.in_features, rows)
            start = rows.stop


def _counts(values: Floats, low: float, high: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    places = ((values.reshape(-1) - np.float32(low)) * np.float32(NUM_BINS / (high - low))).astype(np.int64)
    return np.bincount(np.clip(places, 0, NUM_BINS - 1), minlength=NUM_BINS)
