"""The pages of `quantkit inspect --spec`: every step of a forward pass with its costs, bounds and fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quantkit.model.model_map import to_json
from quantkit.plan.cost.rows import Row
from quantkit.plan.cost.specification import Specification, group_rows
from quantkit.report.tables import Page, Table, to_csv

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """Three figures and a unit: 8.86 G."""
    for size, unit in UNITS:
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}" if value / size >= 1000 else f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def specification_json(specification: Specification) -> dict[str, Any]:
    """Everything, for a program."""
    document: dict[str, Any] = to_json(specification)
    return document


def specification_csv(specification: Specification) -> str:
    """One line a row, with each device's time and verdict beside the counts."""
    columns = [
        "index", "name", "processing", "block", "calls", "input_shape", "output_shape", "formula",
        "parameters", "macs", "flops", "input_bytes", "weight_bytes", "weight_traffic_bytes", "output_bytes",
        "arithmetic_intensity", "advice",
    ]  # fmt: skip
    per_device = [
        f"{device} {what}" for device in specification.devices for what in ("us", "bound", "verdict")
    ]
    rows = []
    for row in specification.rows:
        plain = [_plain(getattr(row, column)) for column in columns]
        fits = [value for fit in row.fits for value in (f"{fit.time_us:.4g}", fit.bound, fit.verdict)]
        rows.append([*plain, *fits])
    return to_csv([*columns, *per_device], rows)


def _plain(value: object) -> object:
    return (
        "x".join(str(size) for size in value) if isinstance(value, tuple) else "" if value is None else value
    )


def specification_page(specification: Specification) -> Page:
    """For a person: identical blocks once, then totals."""
    spec = specification
    past = f", after {spec.past} cached tokens" if spec.past else ""
    return Page(
        head=(f"{spec.model}: batch {spec.batch}, length {spec.length}{past}", *_device_lines(spec)),
        tables=(_shapes(spec), _steps(spec), _fits(spec), _totals(spec), _memory(spec), _estimates(spec)),
        foot=tuple(f"note: {note}" for note in spec.notes),
    )


def _device_lines(spec: Specification) -> Iterable[str]:
    yield f"time and fit on: {', '.join(spec.devices)} (good within 2x of the fastest, fair within 10x)"


def _shapes(spec: Specification) -> Table:
    return Table(
        title="Steps of one forward pass: what goes in and out, and the formula of its work",
        columns=("#", "step", "type", "input", "output", "formula"),
        rows=tuple(_rows(spec, _shape_cells, num_cells=4)),
        numeric=("#",),
        whole=("step",),
    )


def _shape_cells(row: Row) -> tuple[str, ...]:
    return row.processing, _shape(row.input_shape), _shape(row.output_shape), row.formula


def _steps(spec: Specification) -> Table:
    numeric = ("#", "params", "MACs", "FLOPs", "in", "weights", "out", "FLOP/B")
    return Table(
        title="Parameters, operations, and bytes in, of weights and out",
        columns=("#", "step", *numeric[1:]),
        rows=tuple(_rows(spec, _step, num_cells=7)),
        numeric=numeric,
        whole=("step",),
    )


def _fits(spec: Specification) -> Table:
    return Table(
        title="Fit: roofline time, verdict and bound on each device, and what would help",
        columns=("#", "step", *spec.devices, "would help"),
        rows=tuple(_rows(spec, _fit, num_cells=len(spec.devices) + 1)),
        numeric=("#",),
        whole=("step",),
    )


def _rows(
    spec: Specification, cells: Callable[[Row], tuple[str, ...]], *, num_cells: int
) -> Iterable[tuple[str, ...]]:
    """Every step, blocks that are alike once under a line of their own."""
    for group in group_rows(spec):
        is_block = group.rows[0].block is not None
        if is_block:
            yield ("", f"{group.label}:", *("" for _ in range(num_cells)))
        for row in group.rows:
            yield (str(row.index), ("  " if is_block else "") + row.name, *cells(row))


def _step(row: Row) -> tuple[str, ...]:
    counts = (row.parameters, row.macs, row.flops, row.input_bytes, row.weight_bytes, row.output_bytes)
    return (*(short(count) for count in counts), f"{row.arithmetic_intensity:.3g}")


def _fit(row: Row) -> tuple[str, ...]:
    fits = (
        "-" if fit.verdict == "-" else f"{_time(fit.time_us)} {fit.verdict}, {fit.bound}" for fit in row.fits
    )
    return (*fits, row.advice)


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _time(time_us: float) -> str:
    return f"{time_us / 1000:.3g} ms" if time_us >= 1000 else f"{time_us:.3g} us"


def _totals(spec: Specification) -> Table:
    totals = spec.totals
    rows = [
        (
            group,
            f"{totals.parameters_by_group[group]:,}",
            f"{totals.parameter_shares[group]:.1%}",
            short(totals.macs_by_group[group]),
            f"{totals.compute_shares[group]:.1%}",
        )
        for group in totals.parameters_by_group
    ]
    rows.append(("all", f"{totals.parameters:,}", "100%", short(totals.matrix_macs), "100%"))
    rows.append(
        ("", "", "", f"{short(2 * totals.matrix_macs)} FLOPs", f"{short(totals.flops)} with the rest")
    )
    return Table(
        title="Where parameters and compute go",
        columns=("part", "parameters", "share", "matrix MACs", "share of MACs"),
        rows=tuple(rows),
        numeric=("parameters", "share", "matrix MACs", "share of MACs"),
    )


def _memory(spec: Specification) -> Table:
    names = list(spec.memory_bytes)
    cache = [
        f"{spec.kv_cache_bytes[name] / 1e6:,.1f}" if name in spec.kv_cache_bytes else "-" for name in names
    ]
    weights = [f"{spec.memory_bytes[name] / 1e6:,.1f}" for name in names]
    return Table(
        title="Memory in MB (1e6 bytes)",
        columns=("what", *(name.upper() for name in names)),
        rows=(("all weights", *weights), (f"KV cache, {spec.past + spec.length} tokens", *cache)),
        numeric=tuple(name.upper() for name in names),
    )


def _estimates(spec: Specification) -> Table:
    rows = tuple(
        (
            each.device,
            each.phase,
            f"{each.tokens}",
            f"{each.time_ms:.3g}",
            f"{each.tokens_per_second:,.0f}",
            each.bound,
        )
        for each in spec.estimates
    )
    return Table(
        title="Roofline: no run can be faster than this",
        columns=("device", "phase", "tokens", "ms", "tokens/s", "bound by"),
        rows=rows,
        numeric=("tokens", "ms", "tokens/s"),
    )
