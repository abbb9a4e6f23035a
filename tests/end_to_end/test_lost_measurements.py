"""A finished artifact outlives its measuring; full disks are named by place; a stopped run cleans up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.once, pytest.mark.skipif(os.name != "posix", reason="signals and mounts of POSIX")]
FAST = ("--calibration-windows", "4", "--calibration-length", "64", "--max-tokens", "300")
BROKEN = """
import sys
from quantkit.evaluation import measure
from quantkit.evaluation.memory import ChildRun
def out_of_memory(*_, **__):
    raise MemoryError("std::bad_alloc")
measure.compare = out_of_memory
measure.measure_latency = out_of_memory
measure.run_and_measure = lambda _: ChildRun(peak_bytes=0, seconds=0, exit_code=-9, output="", errors="")
from quantkit.cli import main
main()
"""


def quantkit(*arguments, code=None, **environment):
    start = ["-c", code] if code else ["-m", "quantkit.cli"]
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **{key: str(value) for key, value in environment.items()}},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of a few bytes; only root may."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mount(size):
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a disk needs root")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def refused(done):
    assert done.returncode == 2, done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("quantkit:")]
    assert "Traceback" not in done.stderr
    return line


def test_an_artifact_outlives_its_measuring(tmp_path):
    done = quantkit("quantize", "demo", *FAST, "-o", tmp_path / "out", code=BROKEN)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["failures"] == [
        "accuracy was not measured: MemoryError: std::bad_alloc",
        "latency was not measured: MemoryError: std::bad_alloc",
        "memory was not measured: SIGKILL ended the process that was to load the model",
    ]
    shown = " ".join(done.stdout.split())
    assert all(f"NOT MEASURED: {failure[:30]}" in shown for failure in report["failures"])
    assert quantkit("generate", tmp_path / "out", "The king", "--max-new-tokens", 2).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
def test_the_disk_of_the_output_is_full(small_disk):
    folder = small_disk("1m")
    line = refused(quantkit("quantize", "demo", "--no-eval", "-o", folder / "out"))
    assert re.match(rf"quantkit: {folder}: the run needs \d+ MB there, and 1 MB are free", line)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_no_room_beside_the_artifact_for_the_float_reference(small_disk):
    """The disk is filled while the reference is written, after its size was found to fit."""
    folder = small_disk("20m")
    code = """
from quantkit.pipeline.stages import float_reference
float_reference.float_bytes = lambda _: 1
from quantkit.cli import main
main()
"""
    done = quantkit("quantize", "demo", *FAST, "-o", folder / "out", code=code)
    assert done.returncode == 1, done
    (failure,) = json.loads((folder / "out" / "report.json").read_text())["failures"]
    assert failure.startswith(
        "the float reference was not measured: OSError: [Errno 28] No space left on device"
    )


@pytest.mark.slow
def test_the_disk_of_the_cache_is_full(small_disk, tmp_path):
    folder = small_disk("256k")
    arguments = ("quantize", "demo", "--fit", "gptq", "--no-eval", *FAST, "-o", tmp_path / "out")
    line = refused(quantkit(*arguments, QUANTKIT_CACHE=folder))
    assert f"quantkit: {folder}" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_disk_of_temporary_files_is_full(small_disk, tmp_path):
    folder = small_disk("64k")
    line = refused(quantkit("generate", "demo", "The king", TMPDIR=folder))
    assert line.startswith(f"quantkit: {folder}: the disk is full (0 MB are left)")
    assert "TMPDIR" in line
    done = quantkit("quantize", "demo", *FAST, "-o", tmp_path / "out", TMPDIR=folder)
    assert "Traceback" not in done.stderr
    failures = json.loads((tmp_path / "out" / "report.json").read_text())["failures"]
    assert done.returncode == bool(failures)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stopped_run_cleans_up_and_goes_on(number, tmp_path):
    temporary, cache = tmp_path / "temporary", tmp_path / "cache"
    temporary.mkdir()
    recipe = tmp_path / "temporary" / "recipe.yaml"
    recipe.write_text(
        "fit: gptq\ncalibration: {windows: 8, length: 64, gradient_windows: 0}\n"
        "measure: {accuracy: false, latency: false, memory: false}\n"
    )
    command = [sys.executable, "-m", "quantkit.cli", "quantize", "demo", "--recipe", str(recipe)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(temporary),
        "QUANTKIT_CACHE": str(cache),
    }
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "out")], stderr=subprocess.PIPE, text=True, env=environment
    )
    end = time.monotonic() + 120
    while not list(cache.glob("statistics/*/*/index.json")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert errors.splitlines()[-1] == (
        "quantkit: stopped; the same command goes on from the calibration that is done"
    )
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "temporary"]
    assert not list(temporary.glob("quantkit*"))
    assert list(cache.glob("statistics/*/*/index.json")), "the next run continues from here"
    again = subprocess.run(
        [*command, "-o", str(tmp_path / "out")], env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert not list(cache.glob("statistics/*"))


def test_the_process_of_a_memory_trial_ends_with_its_parent(tmp_path):
    code = (
        "import sys\nfrom quantkit.cli import main\nfrom quantkit.evaluation.memory import run_and_measure\n"
        "from quantkit.cli.app import app\n"
        "child = 'import os, sys, time; open(sys.argv[1], \"w\").write(str(os.getpid())); time.sleep(99)'\n"
        f"command = [sys.executable, '-c', child, {str(tmp_path / 'pid')!r}]\n"
        "app.command('trial')(lambda: run_and_measure(command))\nmain()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, "trial"], stderr=subprocess.PIPE, text=True)
    path: Path = tmp_path / "pid"
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    child = int(path.read_text())
    process.terminate()
    assert process.communicate(timeout=60)[1].strip() == "quantkit: stopped; nothing was written"
    end = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
