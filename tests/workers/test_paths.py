"""Folders that hosts of a cluster must see, asked for as a host is asked: without Ray."""

from __future__ import annotations

import shutil

import pytest

from quantkit.errors import InputError
from quantkit.workers.paths import marked, require_paths

pytestmark = pytest.mark.once


def test_the_driver_s_own_host_sees_its_folders_and_keeps_no_mark(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "old").mkdir()
    with marked([tmp_path / "old", tmp_path / "new" / "statistics"]) as marks:
        require_paths([tmp_path / "model"], marks, host="here")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "new", "old"]


def test_a_host_without_the_model_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"does not see .*absent") as refusal:
        require_paths([tmp_path / "absent"], (), host="node7")
    assert refusal.value.where == "host node7"
    assert "--statistics" in refusal.value.next_step


def test_another_disk_under_the_same_path_is_refused(tmp_path):
    folder = tmp_path / "statistics"
    with marked([folder]) as marks:
        shutil.rmtree(folder)
        folder.mkdir()  # as a host has it that does not share the driver's disk
        with pytest.raises(InputError, match=f"has not the driver's disk at {folder}"):
            require_paths((), marks, host="node7")


def test_a_disk_that_is_read_only_there_is_refused(tmp_path, monkeypatch):
    with marked([tmp_path]) as marks:
        monkeypatch.setattr("os.access", lambda *_: False)  # root may write where the mode says no
        with pytest.raises(InputError, match="cannot be written there"):
            require_paths((), marks, host="node7")
