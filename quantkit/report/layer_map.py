"""The map of a model: blocks down, projections across, each with its format, error and reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.report.figures import figures
from quantkit.report.tables import Json, Table

STEPS = 5  # shades of a colour
DENSE_BLOCKS = 48  # with more, a row of the map has no text
FLOAT = "float"
Layer = dict[str, Any]  # an entry of `layers`, with its errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A projection, or the experts of one role in a block."""

    format: str
    format_step: int | None  # None: float
    error: str
    error_step: int | None
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MapRow:
    label: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spark:
    """Error of one role by depth: points of a line in a box of 100 x 30."""

    role: str
    points: str
    caption: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMap:
    columns: tuple[str, ...]
    rows: tuple[MapRow, ...]
    outside: tuple[MapRow, ...]  # projections outside of blocks, a cell each
    formats: tuple[tuple[str, int | None], ...]  # legend
    error_name: str
    errors: tuple[str, str] | None  # lowest and highest
    sparks: tuple[Spark, ...]
    is_dense: bool


def layer_map(document: Json) -> LayerMap | None:
    """The map, from the content of report.json; None for a report without its projections."""
    layers = with_errors(document)
    if not layers:
        return None
    key, error_name = error_of(layers)
    values = [layer[key] for layer in layers if layer.get(key)]
    # A head in finer blocks would leave the blocks one shade.
    values = [layer[key] for layer in layers if layer.get(key) and layer.get("block")] or values
    span = (min(values), max(values)) if values else None
    names = sorted({layer["format"] for layer in layers if layer.get("format")}, key=_coarseness)
    steps = {name: int((index + 0.5) / len(names) * STEPS) for index, name in enumerate(names)}

    def cell(members: Sequence[Layer]) -> Cell:
        worst = max(members, key=lambda layer: layer.get(key) or 0.0)
        formats = dict.fromkeys(layer.get("format") or FLOAT for layer in members)
        error = worst.get(key)
        more = (f"the worst of {len(members)}",) if len(members) > 1 else ()
        return Cell(
            format=short_format(next(iter(formats))) if len(formats) == 1 else "mixed",
            format_step=steps.get(worst.get("format") or ""),
            error=FLOAT if error is None else f"{error:.2%}",
            error_step=None if error is None or span is None else _step(error, *span),
            description="\n".join((*more, *_lines(worst))),
        )

    columns = tuple(dict.fromkeys(layer["role"] for layer in layers if layer.get("block")))
    blocks: dict[str, dict[str, list[Layer]]] = {}
    for layer in layers:
        if layer.get("block"):
            blocks.setdefault(layer["block"], {}).setdefault(layer["role"], []).append(layer)
    rows = tuple(
        MapRow(label=block, cells=tuple(cell(roles[role]) if role in roles else None for role in columns))
        for block, roles in blocks.items()
    )
    return LayerMap(
        columns=tuple(short_role(role) for role in columns),
        rows=_short_labels(rows),
        outside=tuple(
            MapRow(label=layer["name"], cells=(cell([layer]),)) for layer in layers if not layer.get("block")
        ),
        formats=(
            *((long_format(name), steps[name]) for name in names),
            *([(FLOAT, None)] if any(not layer.get("format") for layer in layers) else []),
        ),
        error_name=error_name,
        errors=(f"{span[0]:.2%}", f"{span[1]:.2%}") if span else None,
        sparks=tuple(_sparks(blocks, columns, key)) if span else (),
        is_dense=len(rows) > DENSE_BLOCKS,
    )


def layer_table(document: Json) -> Table:
    """Every projection in a row, for readers of text."""
    layers = with_errors(document)
    columns = {
        "weight_error": "error of weights",
        "output_error": "error of outputs",
        "kl_divergence": "KL, alone",
    }
    keys = [key for key in columns if any(key in layer for layer in layers)]
    numeric = ("in", "out", *(columns[key] for key in keys))
    return Table(
        title="All projections",
        columns=("projection", "role", "format", *numeric, "reason"),
        rows=tuple(
            (
                layer["name"],
                short_role(layer["role"]),
                long_format(layer.get("format") or FLOAT),
                f"{layer['in_features']:,}",
                f"{layer['out_features']:,}",
                *(_error_text(key, layer.get(key)) for key in keys),
                layer["reason"],
            )
            for layer in layers
        ),
        numeric=numeric,
    )


def with_errors(document: Json) -> list[Layer]:
    """The projections, each with the errors of its pack."""
    losses = {name: loss for loss in document.get("layer_losses", ()) for name in loss["layers"]}
    unwanted = ("name", "layers", "format")
    return [
        {
            **{key: value for key, value in losses.get(layer["name"], {}).items() if key not in unwanted},
            **layer,
        }
        for layer in document.get("layers", ())
    ]


def error_of(layers: Sequence[Layer]) -> tuple[str, str]:
    """The key of the error that is shown, and its name."""
    if any("output_error" in layer for layer in layers):
        return "output_error", "relative error of outputs"
    return "weight_error", "relative error of weights"


def short_role(role: str) -> str:
    for prefix in ("attention_", "ffn_"):
        role = role.replace(prefix, "")
    return role.replace("_", " ")


def short_format(name: str) -> str:
    return name.split(" ", maxsplit=1)[0].upper() if name != FLOAT else FLOAT


def long_format(name: str) -> str:
    return name.replace("int", "INT", 1) if name.startswith("int") else name


def _coarseness(name: str) -> tuple[int, int, str]:
    """Order of formats from fine to coarse: many bits first, then small blocks."""
    bits, _, rest = name.removeprefix("int").partition(" ")
    block = rest.split(",")[0].removeprefix("block ")
    return -int(bits) if bits.isdigit() else 0, int(block) if block.isdigit() else 1 << 30, name


def _step(value: float, lowest: float, highest: float) -> int:
    """The shade of a value, by its logarithm."""
    if value <= lowest or highest <= lowest:
        return 0 if value < highest or highest <= lowest else STEPS - 1
    share = math.log(value / lowest) / math.log(highest / lowest)
    return min(STEPS - 1, int(share * STEPS))


def _lines(layer: Layer) -> Iterable[str]:
    yield layer["name"]
    yield f"{short_role(layer['role'])}: {layer['in_features']:,} in, {layer['out_features']:,} out"
    yield long_format(layer.get("format") or FLOAT)
    for key, name in (("output_error", "outputs"), ("weight_error", "weights")):
        if layer.get(key) is not None:
            plain = layer[f"plain_{key}"]
            beside = f", round-to-nearest {plain:.2%}" if plain != layer[key] else ""
            yield f"error of {name} {layer[key]:.2%}{beside}"
    if "kl_divergence" in layer:
        yield f"KL divergence with this pack alone {figures(layer['kl_divergence'])}"
    yield f"reason: {layer['reason']}"


def _error_text(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2g}" if key == "kl_divergence" else f"{value:.2%}"


def _short_labels(rows: Sequence[MapRow]) -> tuple[MapRow, ...]:
    """Rows without the beginning that all names of blocks share."""
    parts = [row.label.split(".") for row in rows]
    shared = 0
    while parts and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return tuple(
        MapRow(label=".".join(part[shared:]), cells=row.cells) for part, row in zip(parts, rows, strict=True)
    )


def _sparks(blocks: dict[str, dict[str, list[Layer]]], columns: Sequence[str], key: str) -> Iterable[Spark]:
    """A line for each role; all lines have one scale."""
    lines = {
        role: [
            max((layer.get(key) or 0.0 for layer in roles.get(role, ())), default=0.0)
            for roles in blocks.values()
        ]
        for role in columns
    }
    highest = max((value for line in lines.values() for value in line), default=0.0)
    labels = [name.rsplit(".", 1)[-1] for name in blocks]
    for role, line in lines.items():
        if len(line) < 2 or not any(line):
            continue
        points = " ".join(
            f"{100 * index / (len(line) - 1):.1f},{29 - 27 * value / highest:.1f}"
            for index, value in enumerate(line)
        )
        worst = max(range(len(line)), key=line.__getitem__)
        median = sorted(line)[len(line) // 2]
        caption = f"median {median:.2%}, highest {line[worst]:.2%} in block {labels[worst]}"
        yield Spark(role=short_role(role), points=points, caption=caption)
