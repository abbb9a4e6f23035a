"""One table record, and its forms: terminal, Markdown and CSV.

What a table says is decided once, as text; the forms only lay it out, so none can say something else.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

ROOMY_WIDTH = 100  # below this, long names fold rather than push other columns off the screen
PIPED_WIDTH = 110  # a pipe has no width of its own; the widest table fits in this


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A title, columns and cells; `numeric` columns are set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()  # never broken over lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What one command prints: lines before, tables, lines after; warnings stand out, alarms most."""

    head: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    foot: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()  # results that are worse than they should be


def print_page(page: Page) -> None:
    """To the terminal, in colour where there is one."""
    console = Console(highlight=False, width=None if os.isatty(1) else PIPED_WIDTH)
    for line in page.head:
        console.print(Text(line))
    for table in page.tables:
        console.print()
        console.print(_rich(table, console.width))
    if page.foot:
        console.print()
    for line in page.foot:
        console.print(Text(line))
    for line in page.warnings:
        console.print(Text(f"warning: {line}", style="bold yellow"))
    for line in page.alarms:
        console.print(Text(line, style="bold red"))


def _rich(table: Table, width: int) -> RichTable:
    rich = RichTable(
        title=table.title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, padding=(0, 1)
    )
    for column in table.columns:
        is_numeric = column in table.numeric
        rich.add_column(
            column,
            justify="right" if is_numeric else "left",
            no_wrap=is_numeric or (column in table.whole and width >= ROOMY_WIDTH),
            overflow="fold",
        )
    for row in table.rows:
        rich.add_row(*(Text(cell) for cell in row))
    return rich


def to_markdown(page: Page) -> str:
    """The same page as Markdown."""
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
    """Rows for a spreadsheet: raw values, one header line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
