"""The page of `quantkit inspect --ffn`: dead, duplicate and outlier hidden units of every FFN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.report.figures import figures
from quantkit.report.tables import Page, Table

Json = Mapping[str, Any]
COLUMNS = ("block", "units", "inactive", "dead", "copies", "outliers", "peak ratio", "bits lost")
VERDICT = "INT8"


def units_page(document: Json) -> Page:
    layers: Sequence[Json] = document["layers"]
    total = sum(layer["hidden_features"] for layer in layers)
    inactive, dead = (sum(layer[key] for layer in layers) for key in ("num_silent", "num_proved"))
    counted = f"{len(layers)} FFN{'s' if len(layers) > 1 else ''} on {document['num_tokens']:,} tokens"
    kinds = ", ".join(dict.fromkeys(layer["ffn"] for layer in layers))
    return Page(
        head=(f"{document['model']}: hidden units of {counted} of {document['text']}", f"  {kinds}"),
        tables=(units_table(layers),),
        foot=(
            f"inactive: {inactive:,} of {total:,} units, never active on this text",
            f"dead: {dead:,} units that add nothing on any text, by their weights alone",
            "copies: units with key and activity of an earlier unit (cosines above 0.95)",
            "outliers: units with a peak above 8 times the median unit's",
            "peak ratio: peak of the largest unit over that of the median unit",
            "bits lost: of 7, between median and largest unit; one scale / a scale for each 64 units",
            "INT8: inputs that the down projection accepts",
            "  any: every scheme",
            "  blocks: schemes in blocks, because one scale loses 3 bits or more",
            "  resists: blocks of 64 lose 3 bits too; try smaller blocks, smoothing or --layer NAME=float",
        ),
    )


def units_table(layers: Sequence[Json], title: str = "Hidden units") -> Table:
    """One row for each FFN."""
    rows = tuple(
        (
            layer["block"],
            f"{layer['hidden_features']:,}",
            f"{layer['num_silent']:,}",
            f"{layer['num_proved']:,}",
            f"{layer['num_duplicates']:,}",
            f"{layer['num_outliers']:,}",
            f"{figures(layer['peak'] / layer['typical_peak'])}x" if layer["typical_peak"] else "-",
            f"{layer['bits_lost_in_row']:.1f}/{layer['bits_lost_in_blocks']:.1f}",
            layer["verdict"],
        )
        for layer in layers
    )
    return Table(title=title, columns=(*COLUMNS, VERDICT), rows=rows, numeric=COLUMNS[1:], whole=("block",))
