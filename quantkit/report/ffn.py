"""The page of `quantkit inspect --ffn`: dead, duplicate and outlier hidden units of every FFN."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.report.figures import figures
from quantkit.report.tables import Cells, Json, Page, Table, table_of

# Column -> cell of one FFN; the last column is the verdict.
COLUMNS: Cells = {
    "block": lambda ffn: str(ffn["block"]),
    "units": lambda ffn: f"{ffn['hidden_features']:,}",
    "inactive": lambda ffn: f"{ffn['num_silent']:,}",
    "dead": lambda ffn: f"{ffn['num_proved']:,}",
    "copies": lambda ffn: f"{ffn['num_duplicates']:,}",
    "outliers": lambda ffn: f"{ffn['num_outliers']:,}",
    "peak ratio": lambda ffn: (
        f"{figures(ffn['peak'] / ffn['typical_peak'])}x" if ffn["typical_peak"] else "-"
    ),
    "bits lost": lambda ffn: f"{ffn['bits_lost_in_row']:.1f}/{ffn['bits_lost_in_blocks']:.1f}",
    "INT8": lambda ffn: str(ffn["verdict"]),
}


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
    return table_of(title, layers, COLUMNS, whole=("block",))
