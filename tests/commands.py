"""The command for tests: in this process, where torch is loaded already, or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from unittest import mock

import pytest

from quantkit import cli

SETTINGS = {"HF_HUB_OFFLINE": "1", "COLUMNS": "110"}


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


def quantkit(*arguments: str) -> Ran:
    """The command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["quantkit", *arguments]),
        mock.patch.dict(os.environ, SETTINGS),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return Ran(returncode=int(ended.value.code or 0), stdout=out.getvalue(), stderr=err.getvalue())


def quantkit_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user starts it."""
    command = [sys.executable, "-m", "quantkit.cli", *arguments]
    environment = {**os.environ, **SETTINGS}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def refused(*arguments: str) -> str:
    """The one line by which a wrong input is refused."""
    ran = quantkit(*arguments)
    assert ran.returncode == 2, ran
    assert ran.stdout == ""
    (line,) = (line for line in ran.stderr.strip().splitlines() if not line.startswith("note: "))
    assert line.startswith("quantkit: ")
    return line
