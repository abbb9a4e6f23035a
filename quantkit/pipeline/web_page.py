"""The web page of an artifact, written again from its report.json."""

from __future__ import annotations

import json
from pathlib import Path

from quantkit.report.stored import showing
from quantkit.report.tables import Json
from quantkit.report.web_page import PAGE_FILE, report_html
from quantkit.runtime.machine.disk import writing
from quantkit.runtime.manifest import MANIFEST, read_manifest, sha256_of

NEXT_STEP = "make the folder writable, or copy the artifact first"


def write_page(folder: Path, document: Json) -> Path:
    """Write the page and its hash in the manifest, where they differ; the path of the page."""
    page = folder / PAGE_FILE
    with showing(folder):
        content = report_html(document).encode("utf-8", "replace")
    with writing(page, next_step=NEXT_STEP):
        if not page.exists() or page.read_bytes() != content:
            page.write_bytes(content)
        if (folder / MANIFEST).exists():
            manifest = read_manifest(folder)
            digest = sha256_of(page)
            if manifest["files"].get(PAGE_FILE) != digest:
                manifest["files"][PAGE_FILE] = digest
                text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
                (folder / MANIFEST).write_text(text, encoding="utf-8")
    return page
