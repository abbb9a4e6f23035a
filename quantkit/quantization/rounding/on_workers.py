"""Quantizing a whole model on workers: a task a pack, with the bytes of `apply` in one process.

A pack's rounding depends on its weights and its statistics alone, which a worker reads from the checkpoint
and from the folder of statistics, and BLAS runs with one thread in both cases. Large packs come first, so
that none is left over at the end. Parts come out as packs are done: the place of a tensor in the file is
known before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.calibration.statistics import StatisticsOf
from quantkit.quantization.layout import Contents, Pack, Part
from quantkit.quantization.rounding.apply import quantized_parts
from quantkit.quantization.rounding.errors import Sums
from quantkit.workers.record import THREADS, Workers
from quantkit.workers.shared import opened

AHEAD = 2  # tasks a worker that are submitted and not yet written: their results lie in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Everything that all packs share."""

    source: TensorSource
    fit: str
    statistics: StatisticsOf


def parts_on_workers(
    workers: Workers,
    contents: Contents,
    source: TensorSource,
    *,
    gain_offset: float,
    fit: str,
    statistics: StatisticsOf,
    progress: Callable[[int], None],
    losses: dict[str, Sums],
) -> Iterator[Part]:
    """Every tensor of `contents`, as `quantized_parts` gives them; packs come in the order of their ends."""
    shared = workers.share(Weights(source=source, fit=fit, statistics=statistics))
    waiting = sorted((pack for pack in contents.packs if pack.grid), key=_work)  # taken from the end
    running: dict[Future[Any], Pack] = {}
    found: dict[str, Sums] = {}

    def submit() -> None:
        while waiting and len(running) < AHEAD * workers.number:
            pack = waiting.pop()
            running[workers.submit(rounded_pack, shared, pack)] = pack

    submit()
    rest = replace(contents, packs=tuple(pack for pack in contents.packs if not pack.grid))
    yield from quantized_parts(rest, source, gain_offset=gain_offset, threads=THREADS, progress=progress)
    while running:
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            pack = running.pop(done)
            parts, sums = done.result()
            submit()
            found |= sums
            progress(pack.out_features * pack.in_features)
            yield from parts
    losses.update({pack.name: found[pack.name] for pack in contents.packs if pack.name in found})


def rounded_pack(shared: Any, pack: Pack) -> tuple[list[Part], dict[str, Sums]]:
    """(the tensors of one pack, its rounding errors); runs in a worker."""
    weights: Weights = opened(shared)
    losses: dict[str, Sums] = {}
    alone = Contents(packs=(pack,), tables=(), norms=(), norm_biases=frozenset())
    parts = quantized_parts(
        alone,
        weights.source,
        fit=weights.fit,
        statistics=weights.statistics,
        threads=THREADS,
        losses=losses,
    )
    return list(parts), losses


def _work(pack: Pack) -> int:
    """Operations of a fit with second moments, which is the slowest."""
    return (pack.out_features + pack.in_features) * pack.in_features**2
