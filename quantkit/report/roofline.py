"""The roofline of a model's layers on this machine: a picture and its table."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.report.figures import figures, megabytes
from quantkit.report.pictures import Point, Scatter, scatter
from quantkit.report.tables import Json, Table

TITLE = "Roofline of the layers on this machine"
NOTE = (
    "the line is what its memory and its products allow. Rings are groups of layers at their least time; "
    "full points are the whole model as measured."
)


def roofline_picture(roofline: Json) -> Scatter:
    """Operations a byte against operations a second, both logarithmic."""
    bandwidth, peak = roofline["bandwidth_gb_per_s"], 1e3 * max(roofline["peak_tera_ops"].values())
    points = [point for phase in roofline["phases"] for point in _points(phase)]
    places = [point.x for point in points]
    ends = sorted((min(places), max(*places, 4 * peak / bandwidth), peak / bandwidth))
    roof = [(x, min(peak, bandwidth * x)) for x in ends]
    names = ("operations for each byte moved", "operations a second, 1e9")
    return scatter(TITLE, names, points, note=NOTE, line=roof)


def roofline_table(roofline: Json) -> Table:
    """Bytes, multiply-adds and least time of each group, and the measured time of the whole."""
    phases = roofline["phases"]
    names = list(dict.fromkeys(group["group"] for phase in phases for group in phase["groups"]))
    columns = ["layers"]
    rows = [[name] for name in (*names, "all, at least", "measured")]
    for phase in phases:
        columns += [f"{phase['phase']}: {unit}" for unit in ("MB", "M MACs", "ms")]
        groups = {group["group"]: group for group in phase["groups"]}
        for row, name in zip(rows, names, strict=False):
            row.extend(_cells([groups[name]]) if name in groups else ["-"] * 3)
        rows[-2] += _cells(phase["groups"])
        rows[-1] += ["-", "-", figures(phase["measured_ms"])]
    return Table(
        title=f"Bytes, multiply-adds and least time at {roofline['bandwidth_gb_per_s']:.3g} GB/s and "
        f"{max(roofline['peak_tera_ops'].values()):.2g}e12 integer operations a second",
        columns=tuple(columns),
        rows=tuple(tuple(row) for row in rows),
        numeric=tuple(columns[1:]),
    )


def _cells(groups: list[Json]) -> list[str]:
    moved, macs, floor = (sum(group[key] for group in groups) for key in ("moved_bytes", "macs", "floor_ms"))
    return [megabytes(moved), figures(macs / 1e6), figures(floor)]


def _points(phase: Json) -> Iterable[Point]:
    groups = phase["groups"]
    for group in groups:
        if group["flops"] and group["floor_ms"]:
            yield _point(phase["phase"], group["group"], [group], group["floor_ms"], "at least")
    yield _point(phase["phase"], "whole model", groups, phase["measured_ms"], "measured", is_chosen=True)


def _point(
    phase: str, name: str, groups: list[Json], spent_ms: float, how: str, *, is_chosen: bool = False
) -> Point:
    flops, moved = (sum(group[key] for group in groups) for key in ("flops", "moved_bytes"))
    return Point(
        x=flops / moved,
        y=flops / spent_ms / 1e6,
        label=f"{phase}, {how}" if is_chosen else "",
        description=f"{phase}: {name}\n{megabytes(moved)} MB, {figures(flops / 1e6)} M operations\n"
        f"{figures(spent_ms)} ms {how}",
        is_chosen=is_chosen,
        is_labelled=is_chosen,
    )
