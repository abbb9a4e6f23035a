"""The running statistics of one input: what is kept of the rows seen so far, and what they come to.

Products and sums are taken in float32 over at most a thousand rows and added up in float64, so that a million
tokens lose nothing. Products are of what is left of the rows once the mean of the first ones is taken away,
since float32 would lose a channel's small changes beside its large mean; the mean is put back in float64 at
the end. Of a second moment only the panels on and right of the diagonal are computed and kept, which is
little more than half of it: it is symmetric.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.quantization.calibration.histogram import DROPPED_BITS, HALF, NUM_BINS, ranges_of, read_bins

# Letters: T rows (tokens), I channels of the input, S rows of the sample.
WANTS = ("second_moment", "peak", "mean", "mean_magnitude", "range", "histogram", "sample")
CHUNK_ROWS = 1024
PANEL = 512
SAMPLE_ROWS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The rows with the smallest of random numbers: each row is kept with the same chance."""

    rows_SI: Tensor
    chances_S: NDArray[np.float64]
    places_S: NDArray[np.int64]  # where in the stream


@dataclass(kw_only=True, slots=True)
class Running:
    """What one input has shown so far."""

    width: int
    wants: frozenset[str]
    chances: np.random.Generator
    num_rows: int = 0
    panels: list[Tensor] = field(default_factory=list)  # float64, rows of the upper triangle
    centre_I: Tensor | None = None  # what is taken away from the rows of the second moment
    rest_I: Tensor | None = None  # the sum of what is left of them
    peak_I: Tensor | None = None
    sum_I: Tensor | None = None
    magnitude_I: Tensor | None = None
    low: float = float("inf")
    high: float = float("-inf")
    counts: Tensor | None = None
    sample: Sample | None = None


def start(width: int, wants: frozenset[str], seed: int) -> Running:
    """Nothing seen yet; the same seed picks the same places of every stream."""
    return Running(width=width, wants=wants, chances=np.random.default_rng(seed))


def expected_bytes(width: int, wants: frozenset[str]) -> int:
    """Memory that the running statistics take, temporary copies included."""
    second = width * (width + PANEL) * 4 + width * width * 4 if "second_moment" in wants else 0
    sample = 3 * SAMPLE_ROWS * width * 4 if "sample" in wants else 0
    return second + sample + (NUM_BINS * 8 if "histogram" in wants else 0) + 5 * width * 8


def count_bad(x: Tensor) -> int:
    """How many values are NaN or infinite."""
    if not x.numel():
        return 0
    low, high = torch.aminmax(x)  # either one is NaN where any value is
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return 0
    return int((~torch.isfinite(x)).sum())


def add(running: Running, x: Tensor) -> None:
    """Take in some more rows, in the order of the text; every value is finite."""
    x_TI = x.detach().reshape(-1, running.width)
    for begin in range(0, len(x_TI), CHUNK_ROWS):
        _add_chunk(running, x_TI[begin : begin + CHUNK_ROWS].float().contiguous())


def _add_chunk(running: Running, x_TI: Tensor) -> None:
    wants = running.wants
    if wants & {"range", "histogram"}:
        low, high = (float(end) for end in torch.aminmax(x_TI))
        running.low, running.high = min(running.low, low), max(running.high, high)
    if "second_moment" in wants:
        _add_products(running, x_TI)
    if wants & {"peak", "mean_magnitude"}:
        magnitude_TI = x_TI.abs()
        peak_I = magnitude_TI.amax(0)
        running.peak_I = peak_I if running.peak_I is None else torch.maximum(running.peak_I, peak_I)
        running.magnitude_I = _plus(running.magnitude_I, magnitude_TI)
    if "mean" in wants:
        running.sum_I = _plus(running.sum_I, x_TI)
    if "histogram" in wants:
        # Shifting a signed number keeps its sign, so negative values take the lower half of the codes.
        codes = (x_TI.view(torch.int32) >> DROPPED_BITS).add_(HALF)
        counted = torch.bincount(codes.flatten(), minlength=NUM_BINS)
        running.counts = counted if running.counts is None else running.counts.add_(counted)
    if "sample" in wants:
        _draw(running, x_TI)
    running.num_rows += len(x_TI)


def _plus(sum_I: Tensor | None, x_TI: Tensor) -> Tensor:
    added = x_TI.sum(0).double()
    return added if sum_I is None else sum_I.add_(added)


def _add_products(running: Running, x_TI: Tensor) -> None:
    if running.centre_I is None:
        running.centre_I = x_TI.mean(0)
    x_TI = x_TI - running.centre_I
    running.rest_I = _plus(running.rest_I, x_TI)
    for number, begin in enumerate(range(0, running.width, PANEL)):
        product = x_TI[:, begin : begin + PANEL].T @ x_TI[:, begin:]
        if number == len(running.panels):
            running.panels.append(product.double())
        else:
            running.panels[number].add_(product)


def _draw(running: Running, x_TI: Tensor) -> None:
    """Keep the rows whose chances are the smallest of all so far."""
    chances = running.chances.random(len(x_TI))
    old = running.sample
    limit = old.chances_S.max() if old is not None and len(old.chances_S) == SAMPLE_ROWS else 1.0
    found = np.flatnonzero(chances < limit)
    if not len(found):
        return
    rows_SI, chances_S, places_S = x_TI[torch.from_numpy(found)], chances[found], found + running.num_rows
    if old is not None:
        rows_SI = torch.cat([old.rows_SI, rows_SI])
        chances_S = np.concatenate([old.chances_S, chances_S])
        places_S = np.concatenate([old.places_S, places_S])
    kept = np.sort(np.argsort(chances_S, kind="stable")[:SAMPLE_ROWS])
    running.sample = Sample(
        rows_SI=rows_SI[torch.from_numpy(kept)], chances_S=chances_S[kept], places_S=places_S[kept]
    )


def finish(running: Running) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
    """(arrays, plain values) by their names in `Evidence`; the running panels are given up on the way."""
    count = running.num_rows
    values: dict[str, Any] = {"num_rows": count}
    arrays: dict[str, NDArray[np.float32]] = {}
    if not count:
        return arrays, values
    if "range" in running.wants:
        values |= {"low": running.low, "high": running.high}
    if running.counts is not None:
        values["quantiles"] = ranges_of(read_bins(running.counts.numpy(), running.low, running.high))
    found: Mapping[str, tuple[str, Tensor | None]] = {
        "peak": ("peak_I", running.peak_I),
        "mean": ("mean_I", None if running.sum_I is None else running.sum_I / count),
        "mean_magnitude": (
            "mean_magnitude_I",
            None if running.magnitude_I is None else running.magnitude_I / count,
        ),
        "sample": ("sample_TI", None if running.sample is None else running.sample.rows_SI),
    }
    for want, (name, tensor) in found.items():
        if want in running.wants and tensor is not None:
            arrays[name] = tensor.float().numpy()
    if "second_moment" in running.wants:
        arrays["second_moment_II"] = _whole_second_moment(running)
    return arrays, values


def _whole_second_moment(running: Running) -> NDArray[np.float32]:
    assert running.centre_I is not None
    assert running.rest_I is not None
    second_II = np.empty((running.width, running.width), np.float32)
    centre_I, rest_I = running.centre_I.double(), running.rest_I / running.num_rows
    panels, running.panels = running.panels[::-1], []
    for begin in range(0, running.width, PANEL):
        panel = panels.pop().div_(running.num_rows)
        rows, columns = slice(begin, begin + len(panel)), slice(begin, None)
        panel.addr_(centre_I[rows], rest_I[columns]).addr_((rest_I + centre_I)[rows], centre_I[columns])
        second_II[rows, columns] = panel.numpy()
        square = np.triu(second_II[rows, rows])  # the other half differs by rounding
        second_II[rows, rows] = square + np.triu(square, 1).T
        second_II[rows.stop :, rows] = second_II[rows, rows.stop :].T
    return second_II
