"""Every page on terminals of 80, 100 and 160 columns holds the words of a wide one, all of them whole."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import struct
import subprocess
import sys

import pytest
from commands import quantkit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX"),
]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
RULES = set("─━│╭╮╰╯")
FIGURE = re.compile(r"^\d+\.\d+$")
MARK = "=== page"
WIDE = 400
WIDTHS = (80, 100, 160)
# One process for all pages of a width: to import everything takes longer than to print it.
PROGRAM = f"""
import sys
from quantkit import cli
for number, arguments in enumerate({{pages!r}}):
    sys.argv = ["quantkit", *arguments]
    try:
        cli.main()
    except SystemExit as ending:
        print("{MARK}", number, ending.code)
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The commands, over two artifacts with names as long as people give them."""
    folder = tmp_path_factory.mktemp("terminal")
    first, second = (folder / f"demo-{kind}-for-the-edge-of-2026" for kind in ("int8-block32", "again"))
    recipe = folder / "quick.yaml"
    recipe.write_text("measure: {latency: true, memory: false, max_tokens: 400, threads: 1, seconds: 0.2}\n")
    made = quantkit("quantize", "demo", "--recipe", str(recipe), "-o", str(first))
    assert made.returncode == 0, made.stderr
    shutil.copytree(first, second)
    return (
        (),
        ("quantize", "--help"),
        ("inspect", "demo", "--min-dim", "256"),
        ("inspect", "mistral-7b"),
        ("inspect", "demo", "--spec"),
        ("inspect", "demo", "--ffn"),
        ("quantize", "demo", "--dry-run"),
        ("report", first.name),
        ("compare", first.name, second.name),
        ("verify", first.name),
        ("doctor",),
    ), folder


def shown(width, arguments, folder):
    """What stands on a terminal of so many columns, page by page."""
    pty, fcntl, termios = (importlib.import_module(name) for name in ("pty", "fcntl", "termios"))
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(pages=arguments)],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
    )
    os.close(terminal)
    content = b""
    while True:
        try:
            part = os.read(screen, 1 << 16)
        except OSError:  # the other end is closed
            break
        content += part
    os.close(screen)
    process.wait()
    text = ESCAPES.sub("", content.decode().replace("\r\n", "\n"))
    parts = re.split(rf"{MARK} \d+ (\d+|None)\n", text)
    assert parts[1::2] == ["0"] * len(arguments), "every command ends well"
    return parts[0:-1:2]


def words(page):
    """Each once; free memory and the like, which change from second to second, are one word."""
    return {FIGURE.sub("#", word.strip("│")) for word in page.split() if not set(word) <= RULES}


@pytest.fixture(scope="module")
def wide(pages):
    return shown(WIDE, *pages)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_is_broken_or_lost(width, pages, wide):
    for arguments, page, whole in zip(pages[0], shown(width, *pages), wide, strict=True):
        assert whole.strip(), arguments
        assert max(map(len, page.split("\n"))) <= width, arguments
        assert words(page) == words(whole), arguments
