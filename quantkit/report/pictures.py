"""Geometry of the pictures of a web page: bars, and points on two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 16, 44  # margins
LOGARITHMIC_FROM = 8  # highest over lowest value
FRONTIER = "each point is a measured configuration; the line joins those that no other beats in both."


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    label: str
    text: str
    share: float  # of the longest bar
    mark: float | None = None  # a line across the bar, as a share too
    is_reference: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    title: str
    columns: tuple[str, str]
    bars: tuple[Bar, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float
    y: float
    label: str
    description: str
    is_chosen: bool = False
    is_labelled: bool = False  # in the picture too


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A scale of values with its ticks: (position, text)."""

    lowest: float
    highest: float
    is_logarithmic: bool
    start: float
    end: float

    def at(self, value: float) -> float:
        values = (value, self.lowest, self.highest)
        value, lowest, highest = (math.log(max(v, 1e-300)) for v in values) if self.is_logarithmic else values
        return round(self.start + (value - lowest) / (highest - lowest) * (self.end - self.start), 1)

    @property
    def ticks(self) -> tuple[tuple[float, str], ...]:
        if self.is_logarithmic:
            powers = range(math.floor(math.log10(self.lowest)), math.ceil(math.log10(self.highest)) + 1)
            values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            inside = [value for value in values if self.lowest <= value <= self.highest]
            ones = [value for value in inside if math.isclose(math.log10(value) % 1, 0, abs_tol=1e-9)]
            values = inside if len(inside) <= 7 else ones
        else:
            step = _round_step((self.highest - self.lowest) / 5)
            first = math.ceil(self.lowest / step - 1e-9)
            values = [step * index for index in range(first, math.floor(self.highest / step + 1e-9) + 1)]
        return tuple((self.at(value), f"{value:.6g}") for value in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    title: str
    note: str
    x_name: str
    y_name: str
    x: Axis
    y: Axis
    points: tuple[Point, ...]
    frontier: str  # points of a line
    limit: tuple[float, str] | None  # a horizontal line


def bars_of(
    title: str,
    columns: tuple[str, str],
    rows: Sequence[tuple[str, float, str]],
    *,
    references: Sequence[str] = (),
    marks: dict[str, float] | None = None,
    note: str = "",
) -> Bars | None:
    """Bars of (label, value, text); None where all values are zero."""
    longest = max((value for _, value, _ in rows), default=0.0)
    if not longest > 0:
        return None
    bars = tuple(
        Bar(
            label=label,
            text=text,
            share=value / longest,
            mark=marks[label] / longest if marks and label in marks else None,
            is_reference=label in references,
        )
        for label, value, text in rows
    )
    return Bars(title=title, columns=columns, bars=bars, note=note)


def scatter(
    title: str,
    names: tuple[str, str],
    points: Sequence[Point],
    *,
    note: str = FRONTIER,
    limit: tuple[float, str] | None = None,
    line: Sequence[tuple[float, float]] | None = None,
) -> Scatter:
    """Points, and a line: the given one, or through the points that no other beats in both."""
    if line is None:
        line = frontier(points)
    x = _axis([point.x for point in points] + [place for place, _ in line], LEFT, WIDTH - RIGHT)
    heights = [point.y for point in points] + [height for _, height in line] + ([limit[0]] if limit else [])
    y = _axis(heights, HEIGHT - BOTTOM, TOP)
    return Scatter(
        title=title,
        note=note,
        x_name=names[0],
        y_name=names[1],
        x=x,
        y=y,
        points=tuple(points),
        frontier=" ".join(f"{x.at(place)},{y.at(height)}" for place, height in line),
        limit=(y.at(limit[0]), limit[1]) if limit else None,
    )


def frontier(points: Sequence[Point]) -> list[tuple[float, float]]:
    """The points that no other beats in both."""
    line: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not line or point.y < line[-1][1]:
            line.append((point.x, point.y))
    return line


def _axis(values: Sequence[float], start: float, end: float) -> Axis:
    lowest, highest = min(values), max(values)
    is_logarithmic = lowest > 0 and highest / lowest > LOGARITHMIC_FROM
    if is_logarithmic:
        lowest, highest = lowest / 1.4, highest * 1.4
    else:
        room = (highest - lowest) * 0.08 or abs(highest) * 0.1 or 1.0
        lowest, highest = lowest - room, highest + room
    return Axis(lowest=lowest, highest=highest, is_logarithmic=is_logarithmic, start=start, end=end)


def _round_step(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step), 10 * power)
