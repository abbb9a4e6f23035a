#!/usr/bin/env python3
"""The pictures of the documentation, from the page of an artifact and from the terminal.

    .venv/bin/python scripts/take_pictures.py ARTIFACT [--output docs]

ARTIFACT is a folder that `quantize` wrote, best of a released model on an idle machine. Needs the extra
`browser` and Debian's chromium. Writes report.png (desktop, and the map in the dark scheme), report-phone.png
(the first screen and the map on a phone, in both schemes), report-print.png (the first two sheets) and
terminal.png (`quantkit report ARTIFACT` on 80 columns).
"""

from __future__ import annotations

import argparse
import html
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

CELL = "#map .map td"
MARGIN = 12


@contextmanager
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as started:
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


def picture(page: Page) -> Image.Image:
    return Image.open(BytesIO(page.screenshot()))


def opened(launched: Any, address: str, width: int, height: int, scheme: str, scale: float = 1) -> Page:
    context = launched.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=scale
    )
    page: Page = context.new_page()
    page.goto(address)
    return page


def show_map(page: Page, hovered: int | None = None) -> None:
    """The map by error at the top of the screen, with the details of a cell."""
    page.get_by_role("button", name="Error").click()
    page.mouse.move(0, 0)
    page.locator("#map-title").evaluate(
        "title => window.scrollTo(0, title.getBoundingClientRect().top + window.scrollY - 36)"
    )
    if hovered is not None:
        page.locator(CELL).nth(hovered).hover()


def beside(pictures: Sequence[Image.Image], path: Path, *, gap: int = 0) -> None:
    """One file with a palette; pages differ by few colours."""
    width = sum(part.width for part in pictures) + gap * (len(pictures) + 1)
    whole = Image.new("RGB", (width, max(part.height for part in pictures) + 2 * gap), "#c9ced3")
    left = gap
    for part in pictures:
        whole.paste(part, (left, gap))
        left += part.width + gap
    whole.quantize(128).save(path, optimize=True)
    print(path, whole.size, path.stat().st_size)


def terminal_text(command: Sequence[str], columns: int, folder: Path) -> str:
    """What a command writes on a terminal of this width, without colours."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=slave, env=environment, cwd=folder) as process:
        os.close(slave)
        parts = []
        while True:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # its end
                break
            if not part:
                break
            parts.append(part)
        process.wait()
    os.close(master)
    return b"".join(parts).decode().replace("\r", "")


def terminal_picture(launched: Any, text: str, columns: int) -> Image.Image:
    page = opened(launched, "about:blank", 900, 500, "light")
    page.set_content(
        "<style>body{margin:0;background:#16181b}pre{display:inline-block;margin:16px;"
        f"width:{columns}ch;color:#e6e8ea;font:15px/1.3 'DejaVu Sans Mono',monospace}}</style>"
        f"<pre>{html.escape(text)}</pre>"
    )
    box = page.locator("pre").bounding_box()
    assert box
    page.set_viewport_size({"width": int(box["width"]) + 32, "height": int(box["height"]) + 32})
    return picture(page)


def print_pictures(launched: Any, address: str, num_sheets: int) -> list[Image.Image]:
    """The first sheets, A4 at 96 dots an inch, as the printing styles lay them out."""
    width, height, margin = 794, 1123, 38
    inside = (width - 2 * margin, height - 2 * margin)
    page = opened(launched, address, *inside, "light")
    page.emulate_media(media="print")
    sheets = []
    for number in range(num_sheets):
        page.evaluate(f"window.scrollTo(0, {inside[1] * number})")
        sheet = Image.new("RGB", (width, height), "white")
        sheet.paste(picture(page), (margin, margin))
        sheets.append(sheet)
    return sheets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    artifact, output = arguments.artifact.resolve(), arguments.output
    address = (artifact / "report.html").as_uri()
    with browser() as launched:
        light, dark = (opened(launched, address, 760, 980, scheme) for scheme in ("light", "dark"))
        show_map(dark, hovered=48)
        beside([picture(light), picture(dark)], output / "report.png")
        phones = [opened(launched, address, 390, 844, scheme, 1.5) for scheme in ("light", "dark", "dark")]
        show_map(phones[2])
        beside([picture(phone) for phone in phones], output / "report-phone.png", gap=MARGIN)
        beside(print_pictures(launched, address, 2), output / "report-print.png", gap=MARGIN)
        command = [sys.executable, "-m", "quantkit.cli", "report", artifact.name]
        shown = terminal_text(command, 80, artifact.parent)
        beside([terminal_picture(launched, shown, 80)], output / "terminal.png")


if __name__ == "__main__":
    main()
