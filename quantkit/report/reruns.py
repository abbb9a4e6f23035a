"""The page of `quantkit eval` and `quantkit bench`: one stage measured again on a written artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.report.measurements import measured_tables, protocol_lines
from quantkit.report.tables import Page


def rerun_page(document: Mapping[str, Any]) -> Page:
    """The page, from the content of `rerun_json` or `evaluation_json`."""
    reference = f"; reference: {document['reference']}" if "reference" in document else ""
    return Page(
        head=(f"{artifact_line(document)}{reference}",),
        tables=measured_tables(document),
        foot=tuple(protocol_lines(document)),
        warnings=tuple(document["notes"]),
    )


def artifact_line(document: Mapping[str, Any]) -> str:
    return f"{document['artifact']}: {document['scheme']} of {document['model']}"
