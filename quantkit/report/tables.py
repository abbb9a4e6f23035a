"""Records of a page and its tables, and their three forms: terminal, Markdown and CSV.

Cells are text before any form sees them, so all forms show the same figures. Tables are laid out for a
terminal of 80 columns: a header is broken at its spaces rather than made wider than its column.
"""

from __future__ import annotations

import csv
import io
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

Json = Mapping[str, Any]
Cells = Mapping[str, Callable[[Any], str]]  # column -> text of a record
GAP = 2  # between two columns
LEAST_WIDTH = 15  # of a column that may be broken
PIPED_WIDTH = 110  # a pipe has no width of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A title, columns and cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[str, ...] = ()  # columns aligned to the right and never broken
    whole: tuple[str, ...] = ()  # columns broken only where the screen has no room for them
    is_folded: bool = False  # on a web page, until it is asked for


def table_of(
    title: str,
    records: Iterable[Any],
    cells: Cells,
    *,
    text: int = 1,
    whole: tuple[str, ...] = (),
) -> Table:
    """One row per record, one column per entry of `cells`; all but the first `text` columns are numeric."""
    columns = tuple(cells)
    rows = tuple(tuple(cell(record) for cell in cells.values()) for record in records)
    return Table(title=title, columns=columns, rows=rows, numeric=columns[text:], whole=whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Output of one command: lines, tables, lines, then warnings and alarms."""

    head: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    foot: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()  # results that are worse than they should be


def print_page(page: Page) -> None:
    """Print to the terminal, in colour where there is one."""
    console = Console(highlight=False, width=None if os.isatty(1) else PIPED_WIDTH)
    for line in page.head:
        console.print(Text(line))
    for table in page.tables:
        for part in _parts(table, console.width):
            console.print()
            console.print(_rich(part, console.width))
    if page.foot:
        console.print()
    for line in page.foot:
        console.print(Text(line))
    for line in page.warnings:
        console.print(Text(f"warning: {line}", style="bold yellow"))
    for line in page.alarms:
        console.print(Text(line, style="bold red"))


def _parts(table: Table, width: int) -> list[Table]:
    """The table, or several beside the same labels where their figures have no room on one screen."""
    labels = tuple(column for column in table.columns if column not in table.numeric)
    least = {column: _least_width(table, index) for index, column in enumerate(table.columns)}
    room = width - sum(least[column] for column in labels)
    parts: list[tuple[str, ...]] = [()]
    for column in table.columns[len(labels) :]:
        if sum(least[part] + GAP for part in (*parts[-1], column)) > room and parts[-1]:
            parts.append(())
        parts[-1] += (column,)
    if len(parts) == 1 or table.columns[: len(labels)] != labels:
        return [table]
    return [_columns_of(table, (*labels, *part)) for part in parts]


def _least_width(table: Table, index: int) -> int:
    """Of a column whose words are whole."""
    column = table.columns[index]
    cells = [row[index] for row in table.rows]
    texts = cells if column in table.numeric else [word for cell in cells for word in cell.split()]
    return max(map(len, (*column.split(), *texts)), default=0)


def _columns_of(table: Table, columns: tuple[str, ...]) -> Table:
    places = [table.columns.index(column) for column in columns]
    rows = tuple(tuple(row[place] for place in places) for row in table.rows)
    return replace(table, columns=columns, rows=rows)


def _rich(table: Table, width: int) -> RichTable:
    rich = RichTable(
        title=table.title or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    keeps_whole = _fits(table, width)
    for index, column in enumerate(table.columns):
        is_numeric = column in table.numeric
        rich.add_column(
            _header(column, (row[index] for row in table.rows)) if is_numeric else column,
            justify="right" if is_numeric else "left",
            no_wrap=is_numeric or (column in table.whole and keeps_whole),
            overflow="fold",
        )
    for row in table.rows:
        rich.add_row(*(Text(cell) for cell in row))
    return rich


def _fits(table: Table, width: int) -> bool:
    """Whether the `whole` columns leave enough room for the others."""
    required = GAP * (len(table.columns) - 1)
    for index, column in enumerate(table.columns):
        longest = max((len(row[index]) for row in table.rows), default=0)
        is_broken = column not in (*table.numeric, *table.whole)
        required += min(longest, LEAST_WIDTH) if is_broken else longest
    return required <= width


def _header(column: str, cells: Iterable[str]) -> str:
    """A column's name, broken at spaces where its cells are narrower."""
    longest_word = max(map(len, column.split()), default=0)
    return "\n".join(textwrap.wrap(column, max((longest_word, *map(len, cells), 1))))


def to_markdown(page: Page) -> str:
    parts = [*page.head]
    for table in page.tables:
        parts.extend(["", f"### {table.title}" if table.title else "", "", *_markdown_rows(table)])
    parts.extend(["", *(f"- {line}" for line in page.foot)])
    parts.extend(f"- **warning:** {line}" for line in page.warnings)
    parts.extend(f"- **{line}**" for line in page.alarms)
    return "\n".join(parts).strip() + "\n"


def _markdown_rows(table: Table) -> list[str]:
    rule = ["---:" if column in table.numeric else "---" for column in table.columns]
    rows: Sequence[Sequence[str]] = [table.columns, rule, *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def to_csv(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Raw values for a spreadsheet, under one header line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
