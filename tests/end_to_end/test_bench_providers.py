"""`quantkit bench --provider`: processes that crash, hang or lack their package are rows with cures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import quantkit, refused

from quantkit.runtime.providers.trial import ProviderChoice, outcome_of, run_limited

pytestmark = pytest.mark.once
QUICK = ("--prompt", "8", "--decode", "2", "--threads", "1")
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
posix = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("providers") / "out"
    recipe = folder.parent / "quick.yaml"
    recipe.write_text("measure: {threads: 1, seconds: 0.5}\n")
    made = quantkit("quantize", "demo", "--recipe", str(recipe), "--no-eval", "-o", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


def install_webgpu(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A plugin package as pip would leave it, whose library does `code` when it is asked for."""
    package = folder / "onnxruntime_ep_webgpu"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def get_ep_name(): return 'WebGpuExecutionProvider'\n"
        f"def get_library_path():\n    {code}\n    return 'none.so'\n"
    )
    metadata = folder / "onnxruntime_ep_webgpu-0.4.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-ep-webgpu\nVersion: 0.4.0\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def rows(*arguments: str, exit_code: int = 0) -> list[dict]:
    ran = quantkit("bench", *arguments, *QUICK, "--json")
    assert ran.returncode == exit_code, ran.stderr
    return json.loads(ran.stdout)["providers"]


def test_the_cpu_runs_all_of_it_close_to_the_original(artifact):
    (row,) = rows(str(artifact), "--provider", "cpu", "--strict")
    assert row["outcome"] == "ran" and "why_not" not in row
    assert (row["placement"]["node_fraction"], row["placement"]["mac_fraction"]) == (1, 1)
    assert row["placement"]["unplaced"] == []
    assert row["placement"]["num_nodes"] == sum(each["num_nodes"] for each in row["placement"]["operators"])
    accuracy = row["accuracy"]
    assert accuracy["reference"] == "demo in float32" and accuracy["num_tokens"] == 256
    assert 0 < accuracy["max_relative_logit_error"] < 0.03
    assert accuracy["top1_agreement"] > 0.9
    assert row["start_ms"] > 0 and row["prompt_length"] == 8
    for phase in ("prefill", "decode"):
        assert 0 < row[phase]["lowest_ms"] <= row[phase]["median_ms"]
    assert 3e7 < row["peak_bytes"] < 1e9


def test_a_provider_that_is_not_installed_is_a_row_with_its_cure(artifact):
    missing, cpu = rows(str(artifact), "--provider", "nv-tensorrt-rtx,cpu", "--strict", exit_code=1)
    assert (missing["outcome"], missing["why_not"]) == ("failed", "not installed")
    assert missing["cure"] == "pip install onnxruntime-ep-nv-tensorrt-rtx"
    assert cpu["outcome"] == "ran"
    (alone,) = rows(str(artifact), "--provider", "nv-tensorrt-rtx", exit_code=1)
    assert alone["outcome"] == "failed"


def test_generate_on_a_provider_that_is_not_installed_exits_with_1(artifact):
    ran = quantkit("generate", str(artifact), "The king", "--provider", "cuda")
    assert ran.returncode == 1
    assert ran.stderr.startswith("quantkit: --provider: provider 'cuda': not ")
    assert "onnxruntime-gpu" in ran.stderr


@posix
def test_a_library_that_crashes_ends_its_own_process_alone(artifact, tmp_path, monkeypatch):
    install_webgpu(tmp_path, monkeypatch, DIES)
    crashed, cpu = rows(str(artifact), "--provider", "webgpu,cpu", exit_code=1)
    assert crashed["outcome"] == "failed" and cpu["outcome"] == "ran"
    assert crashed["why_not"] == "its process died of SIGSEGV while looking for the provider"
    assert "pip install --upgrade onnxruntime-ep-webgpu" in crashed["cure"]


@posix
def test_a_library_that_hangs_is_stopped(artifact, tmp_path, monkeypatch):
    install_webgpu(tmp_path, monkeypatch, "import time; time.sleep(600)")
    began = time.monotonic()
    (hung,) = rows(str(artifact), "--provider", "webgpu", "--time-limit", "3", exit_code=1)
    assert time.monotonic() - began < 60
    assert hung["outcome"] == "failed"
    assert hung["why_not"] == "no answer within 3 s while looking for the provider"
    assert "--time-limit 6" in hung["cure"]


def test_a_library_that_does_not_load_says_so(artifact, tmp_path, monkeypatch):
    install_webgpu(tmp_path, monkeypatch, "pass")
    (broken,) = rows(str(artifact), "--provider", "webgpu", exit_code=1)
    assert broken["outcome"] == "failed" and "none.so" in broken["why_not"]
    assert "pip uninstall -y onnxruntime-ep-webgpu" in broken["cure"]


@posix
def test_the_time_limit_ends_what_the_process_started_too(tmp_path):
    told = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(told)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    ended = run_limited([sys.executable, "-c", code], time_limit=2)
    assert ended.exit_code is None
    child = int(told.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child is left over"
        time.sleep(0.05)


@posix
def test_what_was_found_before_a_crash_is_kept():
    line = json.dumps({"stage": "timing it", "start_ms": 5.5})
    code = f"print('vendor says hello'); print({line!r}, flush=True); {DIES}"
    found = outcome_of(run_limited([sys.executable, "-c", code], time_limit=60), ProviderChoice(name="qnn"))
    assert (found["outcome"], found["start_ms"]) == ("partly", 5.5)
    assert found["why_not"] == f"its process died of {signal.SIGSEGV.name} while timing it"


def test_another_environment_runs_it_and_one_without_packages_says_so(artifact, tmp_path):
    (row,) = rows(str(artifact), "--provider", f"cpu@{sys.executable}")
    assert row["outcome"] == "ran" and row["python"] == sys.executable
    ended = run_limited([sys.executable, "-S", "-c", "import onnxruntime"], time_limit=60)
    found = outcome_of(ended, ProviderChoice(name="openvino", python="/other/python"))
    assert found["outcome"] == "failed" and "No module named 'onnxruntime'" in found["why_not"]
    assert found["cure"] == "/other/python -m pip install onnxruntime numpy psutil"


def test_the_page_has_a_bar_for_each_provider(artifact):
    ran = quantkit("bench", str(artifact), "--provider", "cpu,nv-tensorrt-rtx", "--strict", *QUICK)
    assert ran.returncode == 1
    assert f"{'█' * 20}  100.0%" in ran.stdout
    assert "░" * 20 in ran.stdout
    for words in (
        "ms/token",
        "beside demo in float32",
        "Failures",
        "pip install onnxruntime-ep",
    ):
        assert words in ran.stdout
    assert "nv-tensorrt-rtx did not run the model: not installed" in ran.stdout


def test_wrong_input_is_one_line(artifact):
    path = str(artifact)
    assert "no provider 'npu'; allowed: cpu, cuda" in refused("bench", path, "--provider", "cpu,npu")
    assert "no such interpreter" in refused("bench", path, "--provider", "cpu@/no/python")
    assert "no provider; allowed" in refused("bench", path, "--provider", ",")
    assert "--time-limit: 0 seconds" in refused("bench", path, "--provider", "cpu", "--time-limit", "0")


def test_without_a_tokenizer_random_tokens_are_compared(artifact, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(artifact, folder)
    (folder / "tokenizer.json").unlink()
    ran = quantkit("bench", str(folder), "--provider", "cpu", "--check", "none", *QUICK, "--json")
    document = json.loads(ran.stdout)
    assert document["providers"][0]["accuracy"]["num_tokens"] == 256
    assert "random tokens" in document["notes"][0]
