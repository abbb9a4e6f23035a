"""The page of `quantkit inspect --ffn`: hidden units that sleep, repeat or shout, and what that means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.report.figures import figures
from quantkit.report.tables import Page, Table

Json = Mapping[str, Any]
COLUMNS = ("block", "units", "silent", "proved", "alike", "outliers", "peak / typical", "bits lost")
VERDICT = "INT8"


def units_page(document: Json) -> Page:
    """The table, and what its columns mean."""
    layers: Sequence[Json] = document["layers"]
    total = sum(each["hidden_features"] for each in layers)
    silent, proved = (sum(each[key] for each in layers) for key in ("num_silent", "num_proved"))
    counted = f"{len(layers)} FFN{'s' if len(layers) > 1 else ''} on {document['num_tokens']:,} tokens"
    head = f"{document['model']}: hidden units of {counted}"
    kinds = ", ".join(dict.fromkeys(each["ffn"] for each in layers))
    return Page(
        head=(f"{head} of {document['text']}", f"  {kinds}"),
        tables=(units_table(layers),),
        foot=(
            f"silent: {silent:,} of {total:,} units, never active on this text",
            f"proved: {proved:,} add nothing on any text, by their weights alone",
            "alike: key and activity of an earlier unit (cosines above 0.95)",
            "outliers: peak above 8 times the median unit's",
            "bits lost: of 7, by the median unit to the loudest, with one scale and with one for each 64",
            "INT8: what the way down can be read in: 'any' scheme; 'blocks', where one scale loses 3 bits or",
            "  more; 'resists', where blocks of 64 do too: smaller blocks, smoothing, or --layer NAME=float",
        ),
    )


def units_table(layers: Sequence[Json], title: str = "Hidden units") -> Table:
    """One row for each FFN."""
    rows = tuple(
        (
            each["block"],
            f"{each['hidden_features']:,}",
            f"{each['num_silent']:,}",
            f"{each['num_proved']:,}",
            f"{each['num_duplicates']:,}",
            f"{each['num_outliers']:,}",
            _ratio(each),
            f"{each['bits_lost_in_row']:.1f} / {each['bits_lost_in_blocks']:.1f}",
            each["verdict"],
        )
        for each in layers
    )
    return Table(
        title=title,
        columns=(*COLUMNS, VERDICT),
        rows=rows,
        numeric=COLUMNS[1:],
        whole=("block",),
    )


def _ratio(each: Json) -> str:
    typical = each["typical_peak"]
    return f"{figures(each['peak'])} / {figures(typical)}" if typical else "-"
