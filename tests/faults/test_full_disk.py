"""Full disks of ten sizes in three places: one line and exit code 2, or a whole artifact; nothing half."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parsers import CORPUS

pytestmark = [pytest.mark.once, pytest.mark.slow]
KILOBYTES = (4, 8, 16, 32, 48, 64, 96, 128, 160, 256)
IN_SMALL_PLACE = 'mount -t tmpfs -o size="$1"k none "$2" && shift 2 && exec "$@"'


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces to mount a small disk")
@pytest.mark.parametrize("kilobytes", KILOBYTES)
@pytest.mark.parametrize("place", ["output", "cache", "temporary"])
def test_a_full_disk(place, kilobytes, tmp_path, record_property):
    record_property("cases", 1)
    small = tmp_path / "small"
    small.mkdir()
    output = (small if place == "output" else tmp_path) / "artifact"
    environment = os.environ | {
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{Path(__file__).parents[2]}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "QUANTKIT_CACHE": str(small if place == "cache" else tmp_path / "cache"),
        "TMPDIR": str(small if place == "temporary" else tmp_path),
    }
    quantize = [
        sys.executable, "-m", "quantkit.cli", "quantize", str(CORPUS / "model"), "--min-dim", "1",
        "--fit", "gptq",
        "--calibration-windows", "2", "--calibration-length", "8", "--max-tokens", "64", "-o", str(output),
    ]  # fmt: skip
    # The disk goes with the process, so what it holds is listed from inside.
    script = f"""
import os, subprocess, sys
code = subprocess.run({quantize!r}).returncode
print("left:", sorted(os.listdir({str(output)!r})) if os.path.exists({str(output)!r}) else [])
sys.exit(code)"""
    command = [
        "unshare", "--user", "--map-root-user", "--mount",
        "bash", "-c", IN_SMALL_PLACE, "bash", str(kilobytes), str(small), sys.executable, "-c", script,
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    record_property("tracebacks", int("Traceback" in done.stderr))
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    left = done.stdout.strip().splitlines()[-1]
    assert ("manifest.json" in left) == (done.returncode in (0, 1)), (
        done.returncode,
        left,
        done.stderr[-500:],
    )
    if done.returncode == 2:
        assert "quantkit: " in done.stderr
    # A figure that was not measured is no damage, and its line names the place.
    assert not re.search(r"was not measured: \w+:", " ".join(done.stdout.split())), done.stdout[-2000:]
