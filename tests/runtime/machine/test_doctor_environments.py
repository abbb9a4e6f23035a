"""`quantkit doctor` in real processes, with site-packages folders as broken installations leave them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

pytestmark = pytest.mark.once


def distribution(folder: Path, name: str, version: str, *lines: str) -> None:
    """What pip writes beside a package, of which the package's files may be missing."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    text = "\n".join(("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines)) + "\n"
    (metadata / "METADATA").write_text(text)


def plugin(folder: Path, module: str, name: str, library: str) -> None:
    """A provider's package, whose library is whatever `library` names."""
    package = folder / module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"def get_ep_name(): return {name!r}\ndef get_library_path(): return {library!r}\n"
    )


def doctor(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """(exit code, the checks by name) with the folder in front of what is installed here."""
    code = "import sys; sys.argv[1:] = ['doctor', '--json']; from quantkit.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )
    assert ran.stdout, ran.stderr
    return ran.returncode, {check["name"]: check for check in json.loads(ran.stdout)["checks"]}


@pytest.mark.parametrize("wheel", ["onnxruntime-openvino", "onnxruntime-gpu", "onnxruntime-directml"])
def test_two_wheels_that_write_one_folder_are_a_problem_with_its_cure(wheel: str, tmp_path: Path) -> None:
    distribution(tmp_path, wheel, "1.24.1")
    exit_code, checks = doctor(tmp_path)
    check = checks["onnxruntime-wheels"]
    assert exit_code == 1 and check["status"] == "problem"
    assert f"{wheel} 1.24.1" in check["message"] and "overwrite each other" in check["message"]
    assert check["cure"].startswith(f"pip uninstall -y onnxruntime {wheel} && pip install ")


def test_files_of_another_version_than_the_metadata_are_a_problem(tmp_path: Path) -> None:
    distribution(tmp_path, "onnxruntime", "1.20.0")  # first on the path, so this is the one that counts
    exit_code, checks = doctor(tmp_path)
    check = checks["onnxruntime-files"]
    assert (
        exit_code == 1 and f"what Python imports is onnxruntime {onnxruntime.__version__}" in check["message"]
    )
    assert check["cure"].startswith("pip uninstall -y onnxruntime && pip install --force-reinstall")


def test_a_plugin_that_wants_a_newer_runtime_is_named_with_both_ways_out(tmp_path: Path) -> None:
    distribution(tmp_path, "onnxruntime-ep-webgpu", "9.0.0", "Requires-Dist: onnxruntime>=99.1")
    plugin(tmp_path, "onnxruntime_ep_webgpu", "WebGpuExecutionProvider", str(tmp_path / "none.so"))
    _, checks = doctor(tmp_path)
    check = checks["requirements-onnxruntime-ep-webgpu"]
    assert check["status"] == "warning"
    assert f"needs onnxruntime>=99.1, but {onnxruntime.__version__} is installed" in check["message"]
    assert "pip install 'onnxruntime>=99.1'" in check["cure"]
    assert "pip uninstall -y onnxruntime-ep-webgpu" in check["cure"]


def test_a_plugin_older_than_quantkit_asks_for_is_named(tmp_path: Path) -> None:
    distribution(tmp_path, "onnxruntime-qnn", "1.20.0")
    plugin(tmp_path, "onnxruntime_qnn", "QNNExecutionProvider", str(tmp_path / "none.so"))
    _, checks = doctor(tmp_path)
    found = [check for check in checks.values() if "onnxruntime-qnn>=2.7" in check["message"]]
    if not found:
        pytest.skip("quantkit runs from its source here, so nothing says which versions it needs")
    assert "1.20.0 is installed" in found[0]["message"]
    assert "pip install 'onnxruntime-qnn>=2.7'" in found[0]["cure"]


@pytest.mark.skipif(sys.platform != "linux", reason="shared libraries of Linux")
def test_a_library_that_does_not_load_says_which_and_what_to_do(tmp_path: Path) -> None:
    distribution(tmp_path, "onnxruntime-ep-webgpu", "0.4.0")
    (tmp_path / "broken.so").write_bytes(b"no library at all")
    plugin(tmp_path, "onnxruntime_ep_webgpu", "WebGpuExecutionProvider", str(tmp_path / "broken.so"))
    exit_code, checks = doctor(tmp_path)
    check = checks["provider-webgpu"]
    assert check["status"] == "warning" and "onnxruntime-ep-webgpu 0.4.0 is here, but" in check["message"]
    assert "broken.so" in check["message"] and "\n" not in check["message"]
    assert "pip uninstall -y onnxruntime-ep-webgpu" in check["cure"]
    assert exit_code == 0 or any(each["status"] == "problem" for each in checks.values())
