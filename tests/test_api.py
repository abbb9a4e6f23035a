"""The public functions: their examples run, their names resolve, and importing them costs nothing heavy."""

from __future__ import annotations

import doctest
import hashlib
import importlib
import os
import subprocess
import sys

import pytest
from exporting import build_tiny

import quantkit
from quantkit import cli

pytestmark = pytest.mark.once
MODULES = ("quantkit.pipeline.quantize", "quantkit.pipeline.artifact", "quantkit.pipeline.inspect")
HEAVY = {"torch", "transformers", "optimum", "onnx", "onnxruntime", "numpy", "pydantic", "rich", "typer"}
MAX_CPU_SECONDS = 0.1
NOT_MEASURED = {"accuracy": False, "latency": False, "memory": False}
TINY = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}


@pytest.fixture(scope="module")
def demo_artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "demo"
    quantkit.quantize("demo", output=folder, transforms=[], **NOT_MEASURED)
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name, tmp_path, demo_artifact):
    values = {"tmp_path": tmp_path, "demo_artifact": demo_artifact}
    results = doctest.testmod(importlib.import_module(name), extraglobs=values)
    assert results.attempted > 0
    assert results.failed == 0


def test_every_public_name_resolves():
    assert set(quantkit.__all__) == {
        "Artifact",
        "DryRun",
        "InputError",
        "compare",
        "dry_run",
        "inspect",
        "load",
        "quantize",
        "sweep",
    }
    for name in quantkit.__all__:
        assert callable(getattr(quantkit, name))
        assert name in dir(quantkit)
    with pytest.raises(AttributeError, match="quantise"):
        _ = quantkit.quantise


def test_the_import_is_light():
    """CPU time and new modules of `import quantkit` in a fresh process."""
    code = (
        "import sys, time; before = set(sys.modules); start = time.process_time(); import quantkit; "
        "print(time.process_time() - start, *(set(sys.modules) - before))"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV_")}

    def imported() -> list[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment
        ).stdout.split()

    runs = [imported() for _ in range(3)]
    assert min(float(seconds) for seconds, *_ in runs) < MAX_CPU_SECONDS
    assert {name.partition(".")[0] for name in runs[0][1:]} & HEAVY == set()


@pytest.mark.parametrize(
    "wrong_call",
    [
        quantkit.quantize,
        lambda: quantkit.inspect("demo", include=["no_such_role"]),
        lambda: quantkit.load("no-such-folder"),
    ],
)
def test_an_error_has_four_parts(wrong_call):
    with pytest.raises(quantkit.InputError) as raised:
        wrong_call()
    error = raised.value
    parts = (error.what, error.where, error.allowed, error.next_step)
    assert all(isinstance(part, str) for part in parts)
    assert error.what
    assert error.where
    assert error.allowed or error.next_step
    assert all(" ".join(part.split()) in str(error) for part in parts)


def hashes(folder):
    files = [path for pattern in ("*.onnx", "weights*") for path in folder.glob(pattern)]
    assert files
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_live_module_and_the_command_write_equal_bytes(tmp_path, monkeypatch):
    """Defaults included: smoothing runs on the checkpoint and on the module alike."""
    monkeypatch.chdir(tmp_path)
    model = build_tiny("GPT2LMHeadModel", TINY)
    model.save_pretrained("model")
    module = type(model).from_pretrained("model")
    recipe = tmp_path / "outside.yaml"
    recipe.write_text("single_file_mb: 0\n")  # weights beside the graph, so that both are compared
    live = quantkit.quantize(module, recipe=recipe, output="live", min_dim=1, **NOT_MEASURED)
    command = ["quantkit", "quantize", "model", "--recipe", str(recipe), "-o", "disk"]
    monkeypatch.setattr(sys, "argv", [*command, "--min-dim", "1", "--no-eval"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert len(hashes(live.folder)) == 2
    assert hashes(live.folder) == hashes(tmp_path / "disk")
