"""Running statistics of one input: sums over the rows so far, and the statistics that they come to.

Products and sums are taken in float32 over a few hundred rows and added up in float64, so that a million
tokens lose nothing. Products are taken of centred rows (the mean of the first rows is subtracted), since
float32 would lose a channel's small changes beside its large mean; the mean is put back in float64 later.
A second moment is symmetric, so only the panels on and right of its diagonal are computed and kept.

Sums over groups of rows are merged in the order of the groups, each with a centre and draws of its own. So
whoever computes a group and whoever merges, the sums have the same bits. The products of a group are rounded
to float32 about its own mean, and all means are put back in float64 at the end.
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
from quantkit.quantization.calibration.statistics import FIELDS
from quantkit.quantization.grid import Floats

# Letters: T rows (tokens), I channels of the input, S rows of the sample.
CHUNK_ROWS = 512  # a panel of their products stays in the cache
PANEL = 256
SAMPLE_ROWS = 512
HELD_OUT_ROWS, HELD_OUT_SHARE = 256, 1 / 8  # at most, of the rows
TENSORS = ("centre_I", "centred_sum_I", "peak_I", "sum_I", "magnitude_sum_I", "counts")  # of `Running`
SAMPLES = ("sample", "held_out")
Means = tuple[Tensor, Tensor, int]  # of a group: centre, sum of centred rows, rows of the second moment
Finished = tuple[dict[str, Floats], dict[str, Any]]  # (arrays, plain values) by field of `InputStatistics`


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The rows with the smallest random numbers: every row is kept with equal probability."""

    rows_SI: Tensor
    draws_S: NDArray[np.float64]


@dataclass(kw_only=True, slots=True)
class Running:
    """Sums over the rows of one input so far."""

    width: int
    names: frozenset[str]  # of the statistics
    random: np.random.Generator
    num_rows: int = 0
    panels: list[Tensor] = field(default_factory=list)  # float64, rows of the upper triangle
    centre_I: Tensor | None = None  # subtracted from the rows of the second moment
    centred_sum_I: Tensor | None = None
    means: list[Means] = field(default_factory=list)  # of merged groups, in place of these two
    peak_I: Tensor | None = None
    sum_I: Tensor | None = None
    magnitude_sum_I: Tensor | None = None
    low: float = float("inf")
    high: float = float("-inf")
    counts: Tensor | None = None
    sample: Sample | None = None
    held_out: Sample | None = None
    num_products: int = 0  # rows of the second moment
    most_held_out: int = HELD_OUT_ROWS


def start(width: int, names: frozenset[str], seed: int, *, group: int = 0, num_groups: int = 1) -> Running:
    """Statistics of no rows; the same seed samples the same rows of every stream."""
    return Running(
        width=width,
        names=names,
        random=np.random.default_rng([seed, group] if group else seed),
        most_held_out=max(1, HELD_OUT_ROWS // num_groups),
    )


def expected_bytes(width: int, names: frozenset[str]) -> int:
    """Memory of the running statistics of a group and of all before it, temporary copies included."""
    second = width * (width + PANEL) * 8 + width * width * 4 if "second_moment" in names else 0
    sample = 3 * SAMPLE_ROWS * width * 4 if "sample" in names else 0
    held_out = 3 * HELD_OUT_ROWS * width * 4 if "held_out" in names else 0
    return second + sample + held_out + (NUM_BINS * 8 if "histogram" in names else 0) + 5 * width * 8


def stored_bytes(width: int, names: frozenset[str]) -> int:
    """Disk space of the large arrays among the finished statistics."""
    second = width * width if "second_moment" in names else 0
    rows = {"sample": SAMPLE_ROWS, "held_out": HELD_OUT_ROWS}
    return 4 * (second + sum(width * rows.get(name, 0) for name in names))


def num_nonfinite(x: Tensor) -> int:
    if not x.numel():
        return 0
    low, high = torch.aminmax(x)  # either one is NaN where any value is
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return 0
    return int((~torch.isfinite(x)).sum())


def add(running: Running, x: Tensor) -> None:
    """Add rows in the order of the text; all values must be finite."""
    x_TI = x.detach().reshape(-1, running.width)
    for begin in range(0, len(x_TI), CHUNK_ROWS):
        _add_chunk(running, x_TI[begin : begin + CHUNK_ROWS].float().contiguous())


def _add_chunk(running: Running, x_TI: Tensor) -> None:
    names = running.names
    if names & {"range", "histogram"}:
        low, high = (float(end) for end in torch.aminmax(x_TI))
        running.low, running.high = min(running.low, low), max(running.high, high)
    if "second_moment" in names:
        _add_products(running, _hold_out(running, x_TI) if "held_out" in names else x_TI)
    if names & {"peak", "mean_magnitude"}:
        magnitude_TI = x_TI.abs()
        peak_I = magnitude_TI.amax(0)
        running.peak_I = peak_I if running.peak_I is None else torch.maximum(running.peak_I, peak_I)
        running.magnitude_sum_I = _plus(running.magnitude_sum_I, magnitude_TI)
    if "mean" in names:
        running.sum_I = _plus(running.sum_I, x_TI)
    if "histogram" in names:
        # Shifting a signed number keeps its sign, so negative values take the lower half of the codes.
        codes = (x_TI.view(torch.int32) >> DROPPED_BITS).add_(HALF)
        counts = torch.bincount(codes.flatten(), minlength=NUM_BINS)
        running.counts = counts if running.counts is None else running.counts.add_(counts)
    if "sample" in names:
        _draw(running, x_TI)
    running.num_rows += len(x_TI)


def _plus(sum_I: Tensor | None, x_TI: Tensor) -> Tensor:
    added = x_TI.sum(0).double()
    return added if sum_I is None else sum_I.add_(added)


def _add_products(running: Running, x_TI: Tensor) -> None:
    if not len(x_TI):
        return
    running.num_products += len(x_TI)
    if running.centre_I is None:
        running.centre_I = x_TI.mean(0)
    x_TI = x_TI - running.centre_I
    running.centred_sum_I = _plus(running.centred_sum_I, x_TI)
    for number, begin in enumerate(range(0, running.width, PANEL)):
        product = x_TI[:, begin : begin + PANEL].T @ x_TI[:, begin:]
        if number == len(running.panels):
            running.panels.append(product.double())
        else:
            running.panels[number].add_(product)


def _draw(running: Running, x_TI: Tensor) -> None:
    """Keep the rows with the smallest draws of all so far."""
    draws = running.random.random(len(x_TI))
    old = running.sample
    limit = old.draws_S.max() if old is not None and len(old.draws_S) == SAMPLE_ROWS else 1.0
    candidates = np.flatnonzero(draws < limit)
    if not len(candidates):
        return
    running.sample, _ = _smallest(old, x_TI, draws, candidates, SAMPLE_ROWS)


def _hold_out(running: Running, x_TI: Tensor) -> Tensor:
    """Keep some rows out of the second moment; returns all others, earlier ones that gave way included."""
    draws = running.random.random(len(x_TI))
    is_candidate = draws < HELD_OUT_SHARE
    old, candidates = running.held_out, np.flatnonzero(is_candidate)
    running.held_out, given_way = _smallest(old, x_TI, draws, candidates, running.most_held_out)
    return torch.cat([x_TI[torch.from_numpy(~is_candidate)], given_way])


def _smallest(
    old: Sample | None, x_TI: Tensor, draws: NDArray[np.float64], candidates: NDArray[np.intp], most: int
) -> tuple[Sample, Tensor]:
    """(the rows with the smallest draws among the old ones and the candidates, the rows that give way)."""
    rows_SI, draws_S = x_TI[torch.from_numpy(candidates)], draws[candidates]
    if old is not None:
        rows_SI = torch.cat([old.rows_SI, rows_SI])
        draws_S = np.concatenate([old.draws_S, draws_S])
    order = np.argsort(draws_S, kind="stable")
    kept, given_way = np.sort(order[:most]), np.sort(order[most:])
    sample = Sample(rows_SI=rows_SI[torch.from_numpy(kept)], draws_S=draws_S[kept])
    return sample, rows_SI[torch.from_numpy(given_way)]


def close(group: Running) -> None:
    """End a group that will be merged: its products have the precision of the finished second moment."""
    group.panels = [panel.float() for panel in group.panels]


def merged(total: Running | None, group: Running) -> Running:
    """The sums over the rows of both; arrays of both are used up."""
    if total is None or not total.num_rows:
        group.panels = [panel.double() for panel in group.panels]
        return group
    if not group.num_rows:
        return total
    for panel, added in zip(total.panels, group.panels, strict=False):
        panel.add_(added)
    total.panels += [panel.double() for panel in group.panels[len(total.panels) :]]  # the first ones
    total.means = [*_means_of(total), *_means_of(group)]
    total.centre_I = total.centred_sum_I = None
    for name in ("sum_I", "magnitude_sum_I", "counts"):
        ours, theirs = getattr(total, name), getattr(group, name)
        setattr(total, name, None if ours is None else ours.add_(theirs))
    if total.peak_I is not None and group.peak_I is not None:
        total.peak_I = torch.maximum(total.peak_I, group.peak_I)
    total.low, total.high = min(total.low, group.low), max(total.high, group.high)
    total.sample = _joined(total.sample, group.sample, SAMPLE_ROWS)
    total.held_out = _joined(total.held_out, group.held_out, HELD_OUT_ROWS)
    total.num_rows += group.num_rows
    total.num_products += group.num_products
    return total


def _joined(one: Sample | None, other: Sample | None, most: int) -> Sample | None:
    if one is None or other is None:
        return one or other
    every = np.arange(len(other.draws_S))
    return _smallest(one, other.rows_SI, other.draws_S, every, most)[0]


def _means_of(running: Running) -> list[Means]:
    """What is left of the products of centred rows, by group."""
    if running.centre_I is None or running.centred_sum_I is None:
        return running.means
    return [(running.centre_I.double(), running.centred_sum_I, running.num_products)]


def arrays_of(running: Running) -> dict[str, Tensor]:
    """The sums as tensors, to be written to a file."""
    numbers = torch.tensor([running.num_rows, running.num_products], dtype=torch.int64)
    arrays = {"numbers": numbers, "ends": torch.tensor([running.low, running.high], dtype=torch.float64)}
    arrays |= {f"panel{number}": panel for number, panel in enumerate(running.panels)}
    arrays |= {name: tensor for name in TENSORS if (tensor := getattr(running, name)) is not None}
    for name in SAMPLES:
        sample: Sample | None = getattr(running, name)
        if sample is not None:
            arrays |= {f"{name}.rows": sample.rows_SI, f"{name}.draws": torch.from_numpy(sample.draws_S)}
    return {name: tensor.contiguous() for name, tensor in arrays.items()}


def from_arrays(width: int, names: frozenset[str], arrays: Mapping[str, Tensor]) -> Running:
    """The sums of a file, to be merged with others; no rows can be added."""
    running = start(width, names, 0)
    running.num_rows, running.num_products = (int(number) for number in arrays["numbers"])
    running.low, running.high = (float(end) for end in arrays["ends"])
    running.panels = [arrays[f"panel{number}"] for number in range(sum("panel" in name for name in arrays))]
    for name in TENSORS:
        setattr(running, name, arrays.get(name))
    for name in SAMPLES:
        if f"{name}.rows" in arrays:
            draws_S = arrays[f"{name}.draws"].numpy()
            setattr(running, name, Sample(rows_SI=arrays[f"{name}.rows"], draws_S=draws_S))
    return running


def finish(running: Running) -> Finished:
    """The finished statistics; the panels of the second moment are released on the way."""
    count = running.num_rows
    if "second_moment" in running.names and not running.panels and running.held_out:
        _add_products(running, running.held_out.rows_SI)  # there are no other rows
    values: dict[str, Any] = {"num_rows": count}
    if not count:
        return {}, values
    if "range" in running.names:
        values |= {"low": running.low, "high": running.high}
    if running.counts is not None:
        values["quantiles"] = ranges_of(read_bins(running.counts.numpy(), running.low, running.high))
    tensors = {
        "peak": running.peak_I,
        "mean": None if running.sum_I is None else running.sum_I / count,
        "mean_magnitude": None if running.magnitude_sum_I is None else running.magnitude_sum_I / count,
        "sample": None if running.sample is None else running.sample.rows_SI,
        "held_out": None if running.held_out is None else running.held_out.rows_SI,
    }
    arrays: dict[str, Floats] = {
        FIELDS[name]: tensor.float().numpy()
        for name, tensor in tensors.items()
        if name in running.names and tensor is not None
    }
    if "second_moment" in running.names:
        arrays[FIELDS["second_moment"]] = _second_moment(running)
    return arrays, values


def _second_moment(running: Running) -> Floats:
    moment_II = np.empty((running.width, running.width), np.float32)
    means, count = _means_of(running), running.num_products
    # With S the products of centred rows, s their sum and c the centre: S + c s^T + (s + n c) c^T.
    left_IM = torch.stack([v for c_I, s_I, n in means for v in (c_I, (s_I + n * c_I))], 1)
    right_MI = torch.stack([v for c_I, s_I, _ in means for v in (s_I, c_I)])
    panels, running.panels = running.panels[::-1], []
    for begin in range(0, running.width, PANEL):
        panel = panels.pop()
        rows, columns = slice(begin, begin + len(panel)), slice(begin, None)
        panel.addmm_(left_IM[rows], right_MI[:, columns]).div_(count)
        moment_II[rows, columns] = panel.numpy()
        square = np.triu(moment_II[rows, rows])  # the other half differs by rounding
        moment_II[rows, rows] = square + np.triu(square, 1).T
        moment_II[rows.stop :, rows] = moment_II[rows, rows.stop :].T
    return moment_II
