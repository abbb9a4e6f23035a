"""The command answers at once: nothing heavy is imported before the verb that needs it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

PACKAGE = Path(__file__).parents[2] / "quantkit"
MAX_CPU_SECONDS = 0.7
HEAVY = {"torch", "transformers", "optimum", "onnx", "onnx_ir", "onnxruntime", "pydantic", "huggingface_hub"}
TORCH_FREE = ("errors", "plan", "progress", "recipe", "report", "runtime")


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    # A coverage hook or a fake terminal of the outer test run would be timed along with the command.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("COV_", "PYTEST_"))}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout


def imported_with(module: str) -> set[str]:
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    return {name.partition(".")[0] for name in run_python(code, module).split()}


def test_help_takes_little_time() -> None:
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        page = run_python("from quantkit.cli import main; main()", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "inspect" in page
        assert "doctor" in page
        return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)

    assert min(cpu_seconds() for _ in range(3)) < MAX_CPU_SECONDS  # the first one may compile bytecode


def test_the_command_line_imports_nothing_heavy() -> None:
    assert imported_with("quantkit.cli") & HEAVY == set()


@pytest.mark.parametrize("name", TORCH_FREE)
def test_what_is_free_of_torch_does_not_bring_it_in_either(name: str) -> None:
    """The fence sees direct imports; this sees the ones that come along with others."""
    paths = [path for path in (PACKAGE / f"{name}.py", *(PACKAGE / name).rglob("*.py")) if path.exists()]
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted(paths)
        if path.parent.name != "on_device"  # runners of a package, which import device.py
    ]
    assert modules
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if {'torch', 'transformers'} & set(sys.modules):\n"
        "        sys.exit(name)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
