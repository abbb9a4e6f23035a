"""Temporary folders of killed runs are removed, those of living ones and of others stay; disks are named."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile

import pytest

from quantkit.errors import InputError
from quantkit.runtime.machine.disk import TEMPORARY, temporary_folder, writing

pytestmark = [pytest.mark.once, pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")]
HOLDS = """
import sys
from quantkit.runtime.machine.disk import temporary_folder
with temporary_folder() as folder:
    (folder / "model").write_text("large")
    print(folder.name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    return process, process.stdout.readline().strip()


def test_folders_of_killed_runs_go_and_those_of_others_stay(temporary):
    (temporary / "thesis").mkdir()
    for name in ("quantkit-sources", "quantkit"):
        (temporary / name).mkdir()
    (temporary / f"{TEMPORARY}link").symlink_to(temporary / "thesis")
    (temporary / f"{TEMPORARY}file").write_text("mine")
    kept = {path.name for path in temporary.iterdir()}
    alive, name = holder(temporary)
    killed, left = holder(temporary)
    killed.kill()
    killed.wait()
    assert (temporary / left / "model").exists()
    with temporary_folder() as folder:
        assert {path.name for path in temporary.iterdir()} == kept | {name, folder.name}
    assert (temporary / name / "model").exists()
    alive.communicate("")
    assert {path.name for path in temporary.iterdir()} == kept


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("1000 requested and 0 written"),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_whichever_library_meets_it(error, tmp_path):
    with (
        pytest.raises(InputError, match="the disk is full") as caught,
        writing(tmp_path, next_step="free it"),
    ):
        raise error
    assert (caught.value.where, caught.value.next_step) == (str(tmp_path), "free it")


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O"), ValueError("ours"), OSError(errno.ENOSPC, "", "/x/y")]
)
def test_another_fault_and_another_place_pass(error, tmp_path):
    with pytest.raises(type(error)) as caught, writing(tmp_path, next_step="free it"):
        raise error
    assert caught.value is error
