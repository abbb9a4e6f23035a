"""The pages of `quantkit inspect --spec`: costs, roofline times and advice of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from quantkit.plan.cost.roofline import short
from quantkit.plan.cost.rows import Fit, Row
from quantkit.plan.cost.specification import Specification
from quantkit.report.tables import Cells, Page, Table, table_of, to_csv

CSV_COLUMNS = (
    "index", "name", "processing", "block", "calls", "input_shape", "output_shape", "formula", "parameters",
    "macs", "flops", "input_bytes", "weight_bytes", "weight_traffic_bytes", "output_bytes",
    "arithmetic_intensity", "advice",
)  # fmt: skip
SHAPES: Cells = {
    "type": lambda row: row.processing,
    "input": lambda row: _shape(row.input_shape),
    "output": lambda row: _shape(row.output_shape),
}
WORK: Cells = {
    "formula": lambda row: row.formula,
    "MACs": lambda row: short(row.macs),
    "FLOPs": lambda row: short(row.flops),
}
TRAFFIC: Cells = {
    "params": lambda row: short(row.parameters),
    "input": lambda row: short(row.input_bytes),
    "weights": lambda row: short(row.weight_bytes),
    "output": lambda row: short(row.output_bytes),
    "FLOP/B": lambda row: f"{row.arithmetic_intensity:.3g}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Rows that are shown once for `count` equal blocks."""

    label: str
    count: int
    rows: tuple[Row, ...]


def specification_csv(specification: Specification) -> str:
    """One line for each row, with time, bound and verdict of each device."""
    devices = [
        f"{device} {value}" for device in specification.devices for value in ("us", "bound", "verdict")
    ]
    lines = []
    for row in specification.rows:
        fits = [value for fit in row.fits for value in (f"{fit.time_us:.4g}", fit.bound, fit.verdict)]
        lines.append([*(_csv_cell(getattr(row, column)) for column in CSV_COLUMNS), *fits])
    return to_csv([*CSV_COLUMNS, *devices], lines)


def _csv_cell(value: object) -> object:
    if isinstance(value, tuple):
        return "x".join(str(size) for size in value)
    return "" if value is None else value


def specification_page(specification: Specification) -> Page:
    """The page; equal blocks are shown once."""
    spec, groups = specification, group_rows(specification)
    past = f", after {spec.past} cached tokens" if spec.past else ""
    fits: Cells = {device: _fit_cell(index) for index, device in enumerate(spec.devices)}
    advised = [replace(group, rows=tuple(row for row in group.rows if row.advice)) for group in groups]
    return Page(
        head=(
            f"{spec.model}: batch {spec.batch}, length {spec.length}{past}",
            f"devices: {', '.join(spec.devices)}",
        ),
        tables=(
            _steps("Steps of one forward pass", groups, SHAPES),
            _steps("Operations of each step", groups, WORK, numeric=("MACs", "FLOPs")),
            _steps(
                "Parameters, and bytes of activations and weights", groups, TRAFFIC, numeric=tuple(TRAFFIC)
            ),
            _steps("Roofline time, verdict and bound on each device", groups, fits),
            _steps("Advice", [group for group in advised if group.rows], {"advice": lambda row: row.advice}),
            _totals(spec),
            _memory(spec),
            _estimates(spec),
        ),
        foot=(
            "verdict: good within 2x of the fastest device, fair within 10x, otherwise poor",
            *(f"note: {note}" for note in spec.notes),
        ),
    )


def group_rows(specification: Specification) -> tuple[RowGroup, ...]:
    """Rows in order; blocks that differ only in names and numbers are one group, at the first one's place."""
    blocks_of: dict[tuple[Row, ...], list[list[Row]]] = {}
    for _, block in groupby(specification.rows, key=lambda row: (row.block, row.block or row.index)):
        rows = list(block)
        blocks_of.setdefault(tuple(_without_names(row) for row in rows), []).append(rows)
    stacks = {row.stack for row in specification.rows if row.block is not None}
    return tuple(
        RowGroup(label=_label(blocks, len(stacks) > 1), count=len(blocks), rows=tuple(blocks[0]))
        for blocks in blocks_of.values()
    )


def _without_names(row: Row) -> Row:
    if row.block is None:
        return row
    return replace(row, index=0, name="", block=None, block_index=None, modules=())


def _label(blocks: Sequence[Sequence[Row]], with_stack: bool) -> str:
    first = blocks[0][0]
    if first.block is None:
        return first.name
    indices = sorted(rows[0].block_index or 0 for rows in blocks)
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    numbers = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    label = f"{'block' if len(indices) == 1 else 'blocks'} {numbers}"
    label = f"{first.stack} {label}" if with_stack else label
    if len(indices) > 1:
        return f"{label} ({len(indices)}x)"
    return f"{label} (run {first.calls} times)" if first.calls > 1 else label


def _steps(title: str, groups: Sequence[RowGroup], cells: Cells, *, numeric: tuple[str, ...] = ()) -> Table:
    """One row for each step; steps of blocks are indented under the name of the blocks."""
    rows: list[tuple[str, ...]] = []
    for group in groups:
        indent = ""
        if group.rows[0].block is not None:
            indent = "  "
            rows.append(("", f"{group.label}:", *("" for _ in cells)))
        for row in group.rows:
            rows.append((str(row.index), indent + row.name, *(cell(row) for cell in cells.values())))
    return Table(
        title=title,
        columns=("#", "step", *cells),
        rows=tuple(rows),
        numeric=("#", *numeric),
        whole=("step",),
    )


def _fit_cell(index: int) -> Callable[[Row], str]:
    def text(fit: Fit) -> str:
        if fit.verdict == "-":
            return "-"
        time = f"{fit.time_us / 1000:.3g} ms" if fit.time_us >= 1000 else f"{fit.time_us:.3g} us"
        return f"{time}, {fit.verdict}, {fit.bound}"

    return lambda row: text(row.fits[index])


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _totals(spec: Specification) -> Table:
    totals = spec.totals
    columns = ("part", "parameters", "share", "matrix MACs", "share of MACs", "FLOPs")
    rows = [
        (
            group,
            f"{parameters:,}",
            f"{totals.parameter_shares[group]:.1%}",
            short(totals.macs_by_group[group]),
            f"{totals.compute_shares[group]:.1%}",
            short(sum(row.flops for row in spec.rows if row.group == group)),
        )
        for group, parameters in totals.parameters_by_group.items()
    ]
    total = (f"{totals.parameters:,}", "100%", short(totals.matrix_macs), "100%", short(totals.flops))
    return Table(
        title="Parameters and operations by part",
        columns=columns,
        rows=(*rows, ("all", *total)),
        numeric=columns[1:],
    )


def _memory(spec: Specification) -> Table:
    def megabytes(sizes: Mapping[str, int]) -> list[str]:
        return [f"{sizes[dtype] / 1e6:,.1f}" if dtype in sizes else "-" for dtype in spec.memory_bytes]

    dtypes = tuple(dtype.upper() for dtype in spec.memory_bytes)
    return Table(
        title="Memory in MB (1e6 bytes)",
        columns=("content", *dtypes),
        rows=(
            ("all weights", *megabytes(spec.memory_bytes)),
            (f"KV cache, {spec.past + spec.length} tokens", *megabytes(spec.kv_cache_bytes)),
        ),
        numeric=dtypes,
    )


def _estimates(spec: Specification) -> Table:
    cells: Cells = {
        "device": lambda estimate: estimate.device,
        "phase": lambda estimate: estimate.phase,
        "bound": lambda estimate: estimate.bound,
        "tokens": lambda estimate: f"{estimate.tokens}",
        "ms": lambda estimate: f"{estimate.time_ms:.3g}",
        "tokens/s": lambda estimate: f"{estimate.tokens_per_second:,.0f}",
    }
    title = "Roofline of a whole pass: a lower bound of its time"
    return table_of(title, spec.estimates, cells, text=3)
