"""The pages of `quantkit sweep`: rows with their figures, and the forecast of a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from quantkit.report.comparison import METRICS
from quantkit.report.figures import duration, megabytes
from quantkit.report.tables import Json, Page, Table

AXES = ("model", "recipe", "target", "text")
OTHERS = "(in parentheses): measured under other conditions, so without a ratio"
RATIOS = ("size_bytes", "prefill_ms", "decode_ms_per_token")


def sweep_page(document: Json) -> Page:
    """The content of sweep.json."""
    rows = document["rows"]
    hosts = _hosts(rows)
    figures = [key for key in METRICS if any(key in row.get("figures", {}) for row in rows)]
    ratios = [key for key in RATIOS if any(row.get("ratios", {}).get(key) for row in rows)]
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    failed = [row for row in rows if row["state"] == "failed"]
    has_others = any(row.get("not_compared") for row in rows)
    return Page(
        head=(f"{len(rows)} cells: {counts}",),
        tables=(
            _table("Figures", rows, hosts, [(METRICS[key].title, _figure(key)) for key in figures]),
            _table(
                "Ratio to the first row of the model",
                rows,
                hosts,
                [(METRICS[key].title, _ratio(key)) for key in ratios],
            ),
        )[: 2 if ratios else 1],
        foot=(
            *(f"host {letter}: {described}" for described, letter in hosts.items()),
            *(
                ["(in parentheses): measured under other conditions, so without a ratio"]
                if has_others
                else []
            ),
        ),
        warnings=tuple(f"{row['name']}: {failure}" for row in rows for failure in row["failures"]),
        alarms=(
            *(f"{row['name']} failed: {row['error']}" for row in failed),
            *(["failed cells run again with --retry"] if failed else []),
        ),
    )


def _hosts(rows: Sequence[Json]) -> dict[str, str]:
    """Host and class of machine -> letter."""
    described = dict.fromkeys(_host(row) for row in rows if row["host"])
    return {host: _letter(number) for number, host in enumerate(described)}


def _host(row: Json) -> str:
    return f"{row['host']}, {row['processor']}, {row['num_cores']:g} cores"


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _table(
    title: str,
    rows: Sequence[Json],
    hosts: dict[str, str],
    columns: Iterable[tuple[str, Callable[[Json], str]]],
) -> Table:
    """Only axes with several names have a column, and hosts where there are several."""
    axes = [axis for axis in AXES if len({row[axis] for row in rows}) > 1] or ["recipe"]
    shows_state = any(row["state"] != "done" for row in rows)
    labels: list[tuple[str, Callable[[Json], str]]] = [(axis, itemgetter(axis)) for axis in axes]
    labels += [("state", itemgetter("state"))] if shows_state else []
    labels += [("host", lambda row: hosts[_host(row)] if row["host"] else "-")] if len(hosts) > 1 else []
    every = [*labels, *columns]
    return Table(
        title=title,
        columns=tuple(name for name, _ in every),
        rows=tuple(tuple(cell(row) for _, cell in every) for row in rows),
        numeric=tuple(name for name, _ in every[len(labels) :]),
        whole=tuple(name for name, _ in labels),
    )


def _figure(key: str) -> Callable[[Json], str]:
    def cell(row: Json) -> str:
        value = row.get("figures", {}).get(key)
        if value is None:
            return "-"
        shown = METRICS[key].show(value)
        return f"({shown})" if key in row["not_compared"] else shown

    return cell


def _ratio(key: str) -> Callable[[Json], str]:
    def cell(row: Json) -> str:
        ratio = row.get("ratios", {}).get(key)
        return "-" if ratio is None else f"{ratio:.3g}x"

    return cell


def sweep_forecast_page(document: Json) -> Page:
    """What a sweep would do."""
    cells = document["cells"]
    refused = [cell for cell in cells if cell["error"]]
    hours = duration(3600 * document["hours"])
    unknown = sum(cell["state"] == "to run" and cell["minutes"] is None for cell in cells) - len(refused)
    return Page(
        head=(
            f"{document['count']} cells: {document['to_run']} to run, {document['kept']} done already",
            f"size: {megabytes(document['num_bytes'])} MB of graphs and weights",
            f"time: about {hours} of cells one after the other, at this machine's present speed"
            + (f", and {unknown} searches that no estimate covers" if unknown else ""),
            f"output: {document['output']} (nothing was written)",
        ),
        tables=(
            Table(
                title="Cells",
                columns=("cell", "state", "MB", "minutes"),
                rows=tuple(
                    (
                        cell["name"],
                        "refused" if cell["error"] else cell["state"],
                        "-" if cell["num_bytes"] is None else megabytes(cell["num_bytes"]),
                        "-" if cell["minutes"] is None else f"{cell['minutes']:.1f}",
                    )
                    for cell in cells
                ),
                numeric=("MB", "minutes"),
                whole=("state",),
            ),
        ),
        alarms=tuple(f"{cell['name']}: {cell['error']}" for cell in refused),
    )
