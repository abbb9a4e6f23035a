"""scripts/setup on a pretended machine: a fake Python that writes down what it is asked to do.

What must hold: torch comes first and exactly pinned, a second call installs nothing, an interrupted
or failed install is done again, a changed pyproject.toml is installed again, and a Python that is too
old is one clear line.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]

# `-m venv DIR` copies itself to DIR/bin/python, `-m pip` and `-m ensurepip` succeed unless told otherwise.
FAKE_PYTHON = r"""#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
    *version_info*) exit "${FAKE_TOO_OLD:-0}" ;;
    "--version") echo "Python ${FAKE_VERSION:-3.11.0}" ;;
    "-m venv --without-pip .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m ensurepip") exit "${FAKE_NO_ENSUREPIP:-0}" ;;
    "-m pip --version") test -e .venv/has-pip || test -z "${FAKE_NO_PIP:-}" ;;
    *"--target .venv-transformers5"*)
        test -z "${FAKE_OVERLAY_FAILS:-}" && mkdir -p .venv-transformers5/transformers ;;
    *"--target .venv-qnn"*)
        mkdir -p .venv-qnn/half; echo "no matching distribution"; test -z "${FAKE_QNN_FAILS:-}" ;;
    *"install"*"torch=="*) echo "some output of pip"; test -z "${FAKE_TORCH_FAILS:-}" ;;
    *"install"*) ;;
esac
"""


class Machine:
    """A folder with scripts/setup, pyproject.toml and a fake Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "setup", folder / "scripts" / "setup")
        shutil.copy(ROOT / "pyproject.toml", folder / "pyproject.toml")
        self.python = folder / "a python"  # a path may hold a space
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.calls = folder / "calls"

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        return subprocess.run(
            [self.folder / "scripts" / "setup", *arguments],
            capture_output=True,
            text=True,
            cwd="/",  # it finds its own folder
            check=False,
            env=os.environ | {"PYTHON": str(self.python), "CALLS": str(self.calls)} | environment,
        )

    def installs(self) -> list[str]:
        """What pip was asked to install, options left out."""
        calls = [line for line in self.calls.read_text().splitlines() if " install " in line]
        return [line.partition("--no-input ")[2] for line in calls]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_torch_comes_first_and_a_second_call_installs_nothing(machine: Machine) -> None:
    first = machine.setup()
    assert (first.returncode, first.stderr) == (0, "")
    assert machine.installs() == ["torch==2.13.0", "-e .[trace,test]"]
    assert "some output of pip" not in first.stdout
    assert len(first.stdout.splitlines()) == 3  # one line a step
    second = machine.setup()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert machine.installs() == []


def test_the_overlay_is_installed_once(machine: Machine) -> None:
    machine.setup()
    assert machine.setup("transformers5").returncode == 0
    assert machine.installs() == ["--target .venv-transformers5 transformers>=5,<6"]
    machine.setup("transformers5")
    assert machine.installs() == []


def test_a_failed_install_shows_why_and_is_done_again(machine: Machine) -> None:
    failed = machine.setup(FAKE_TORCH_FAILS="1")
    assert failed.returncode == 1
    assert "some output of pip" in failed.stderr
    assert "running this again tries again" in failed.stderr.splitlines()[-1]
    assert machine.setup().returncode == 0
    assert machine.installs() == ["torch==2.13.0", "-e .[trace,test]"]


def test_a_failed_overlay_is_done_again(machine: Machine) -> None:
    assert machine.setup("transformers5", FAKE_OVERLAY_FAILS="1").returncode == 1
    assert machine.setup("transformers5").returncode == 0
    assert machine.installs() == ["--target .venv-transformers5 transformers>=5,<6"]


def test_the_providers_overlay_is_installed_once_alone_and_outlives_other_changes(machine: Machine) -> None:
    machine.setup()
    assert machine.setup("transformers5", "qnn").returncode == 0
    assert machine.installs()[1:] == [
        "--retries 1 --no-deps --target .venv-qnn onnxruntime-qnn>=2.7,<3",
    ]
    with (machine.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    machine.setup("qnn")
    assert not any("qnn" in line for line in machine.installs())


def test_a_provider_that_cannot_be_had_is_said_and_no_failure(machine: Machine) -> None:
    machine.setup()
    done = machine.setup("qnn", FAKE_QNN_FAILS="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tests on Qualcomm's provider will be skipped" in done.stdout.splitlines()[-1]
    assert not (machine.folder / ".venv-qnn").exists()
    machine.setup("qnn")  # and it is tried again
    assert (machine.folder / ".venv-qnn").exists()


def test_an_unknown_part_is_one_clear_line(machine: Machine) -> None:
    refused = machine.setup("cuda")
    assert refused.returncode == 2
    assert refused.stderr == "setup: no 'cuda'; allowed: transformers5, qnn\n"


def test_changed_requirements_are_installed_again(machine: Machine) -> None:
    machine.setup("transformers5")
    with (machine.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    machine.setup("transformers5")
    assert len(machine.installs()) == 3


@pytest.mark.parametrize("broken", ["python", "pip"])
def test_a_broken_environment_is_made_anew(machine: Machine, broken: str) -> None:
    machine.setup()
    (machine.folder / ".venv" / "left-over").touch()
    if broken == "python":
        (machine.folder / ".venv" / "bin" / "python").unlink()
    done = machine.setup(**({"FAKE_NO_PIP": "1"} if broken == "pip" else {}))
    assert done.returncode == 0
    assert "creating .venv" in done.stdout
    assert not (machine.folder / ".venv" / "left-over").exists()


def test_without_ensurepip_the_pip_of_the_machine_helps_out(machine: Machine) -> None:
    assert machine.setup(FAKE_NO_ENSUREPIP="1").returncode == 0
    assert "-m pip --python .venv/bin/python install pip" in machine.calls.read_text()


def test_an_old_python_is_one_clear_line(machine: Machine) -> None:
    refused = machine.setup(FAKE_TOO_OLD="1", FAKE_VERSION="3.9.2")
    assert refused.returncode == 1
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert "3.11 or newer" in line
    assert "Python 3.9.2" in line
    assert not (machine.folder / ".venv").exists()


def test_no_python_is_one_clear_line(machine: Machine) -> None:
    refused = machine.setup(PYTHON="/nowhere/python")
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert "/nowhere/python" in line


@pytest.mark.parametrize("script", ["setup", "demo", "test", "../.ci/run"])
def test_a_script_can_be_executed_and_has_no_error_of_syntax(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)
