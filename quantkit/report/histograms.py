"""Pictures of the packs with the largest errors: weights before and after rounding, and inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.report.figures import figures
from quantkit.report.tables import Json

WIDTH, HEIGHT = 320, 110


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramPicture:
    """Steps of counts on a logarithmic scale, with lines at the values of the largest code."""

    title: str
    caption: str
    area: str  # points of the counts before rounding
    line: str  # after it
    solid: tuple[float, ...]  # the largest of these values
    dashed: tuple[float, ...]  # their median
    ends: tuple[str, str]
    zero: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPictures:
    name: str
    format: str
    pictures: tuple[HistogramPicture, ...]


def pack_pictures(histograms: Sequence[Json]) -> tuple[PackPictures, ...]:
    return tuple(
        PackPictures(
            name=entry["name"],
            format=entry["format"],
            pictures=(_weights(entry), *([_inputs(entry)] if "inputs" in entry else [])),
        )
        for entry in histograms
    )


def _weights(entry: Json) -> HistogramPicture:
    clipping = entry["weight_clipping"]
    peak, median = clipping["highest"], clipping["median"]
    return _picture(
        "weights",
        f"the largest code is worth {_range(clipping)}, median {figures(median)}",
        entry["weights"],
        entry["rounded"]["counts"],
        solid=(-peak, peak),
        dashed=(-median, median),
    )


def _inputs(entry: Json) -> HistogramPicture:
    fixed, clipping = entry.get("input_range"), entry.get("input_clipping")
    if fixed:
        caption = f"clipped to {figures(fixed[0])} to {figures(fixed[1])}, a range from calibration"
        return _picture("inputs", caption, entry["inputs"], (), solid=fixed, dashed=())
    if not clipping:
        is_float = entry["format"].endswith("inputs by float")
        caption = "not rounded" if is_float else "their range stands in the graph"
        return _picture("inputs", caption, entry["inputs"], (), solid=(), dashed=())
    peak, median = clipping["highest"], clipping["median"]
    caption = f"peaks of a scale {_range(clipping)}, median {figures(median)}; none is clipped"
    return _picture("inputs", caption, entry["inputs"], (), solid=(-peak, peak), dashed=(-median, median))


def _range(clipping: Json) -> str:
    low, high = figures(clipping["lowest"]), figures(clipping["highest"])
    return low if low == high else f"{low} to {high}"


def _picture(
    title: str,
    caption: str,
    histogram: Json,
    after: Sequence[int],
    *,
    solid: Sequence[float],
    dashed: Sequence[float],
) -> HistogramPicture:
    low, high = float(histogram["low"]), float(histogram["high"])
    tallest = math.log1p(max((*histogram["counts"], *after)))

    def at(value: float) -> float:
        return round((value - low) / (high - low) * WIDTH, 1)

    def steps(counts: Sequence[int]) -> str:
        width = WIDTH / len(counts)
        heights = [round(HEIGHT * (1 - math.log1p(count) / tallest), 1) for count in counts]
        return " ".join(
            f"{round(width * place, 1)},{height}"
            for number, height in enumerate(heights)
            for place in (number, number + 1)
        )

    def inside(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(at(value) for value in values if low <= value <= high)

    return HistogramPicture(
        title=title,
        caption=caption,
        area=f"0,{HEIGHT} {steps(histogram['counts'])} {WIDTH},{HEIGHT}",
        line=steps(after) if after else "",
        solid=inside(solid),
        dashed=inside(dashed),
        ends=(figures(low), figures(high)),
        zero=at(0.0),
    )
