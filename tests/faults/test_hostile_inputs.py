"""Hostile bytes reach every parser: each case is read or refused in one line, in time and in a gigabyte.

QUANTKIT_FAULT_CASES sets the cases a parser, as `scripts/test --faults` does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from parsers import PARSERS

pytestmark = pytest.mark.once
CASES = int(os.environ.get("QUANTKIT_FAULT_CASES", "12"))
SECONDS = 80.0  # of a parser: with the rest of --faults half an hour on two cores
STUCK_SECONDS = 900.0
OFTEN = ("config", "recipe", "weights", "tokenizer", "manifest")  # with the fast tests; --faults runs all
FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in PARSERS]
)
def test_no_traceback_and_no_hang(name, record_property):
    if name == "GGUF":
        pytest.importorskip("gguf")
    tests = Path(__file__).parents[1]
    paths = [os.environ.get("PYTHONPATH", ""), str(tests), str(tests.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FUZZ), name, str(CASES), str(SECONDS)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=STUCK_SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for count in ("cases", "tracebacks", "hangs"):
        record_property(count, result[count])
    assert result["cases"] >= min(CASES, 12) // 2, "hardly a case in the time"
    assert (result["tracebacks"], result["hangs"]) == (0, 0), json.dumps(result["places"], indent=1)
