"""Sweeps on Ray: two workers of this machine, one of them killed in the middle of a cell."""

from __future__ import annotations

import json
import threading
import time

import psutil
import pytest
from exporting import build_tiny

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.sweeps.run import sweep

pytest.importorskip("ray", reason="pip install 'quantkit-onnx[ray]'")
pytestmark = [pytest.mark.once, pytest.mark.slow]
OFF = {"accuracy": False, "latency": False, "memory": False}


def kill_a_worker(killed):
    """Kill the first process that supervises a cell."""
    while not killed:
        time.sleep(0.1)
        for process in psutil.Process().children(recursive=True):
            try:
                if "quantkit.sweeps.cell" in process.cmdline():
                    killed.append(process.pid)
                    process.parent().kill()
                    return
            except psutil.Error:
                continue


def test_a_killed_worker_costs_no_row(tmp_path):
    row = FAMILIES["gpt2"]
    build_tiny(row.tiny_class, row.tiny).save_pretrained(tmp_path / "tiny")
    recipes = {
        scheme: {"scheme": scheme, "select": {"min_dim": 1}, "transforms": [], "measure": OFF}
        for scheme in ("int8_block32", "int8_channel", "int8_token")
    }
    killed = []
    threading.Thread(target=kill_a_worker, args=(killed,), daemon=True).start()
    content = {"models": {"tiny": str(tmp_path / "tiny")}, "recipes": recipes}
    result = sweep(content, output=tmp_path / "out", engine="ray", workers=2)
    assert len(killed) == 1
    assert [row.state for row in result.rows] == ["done"] * 3
    assert sorted(row.attempts for row in result.rows) == [1, 1, 2]
    assert {row.host for row in result.rows} == {result.rows[0].host}
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["engine"] == "ray"


def test_an_absent_cluster_is_refused_in_one_line(tmp_path):
    with pytest.raises(InputError, match="no cluster answers"):
        sweep(
            {"models": {"a": "demo"}, "recipes": {"r": {}}},
            output=tmp_path / "out",
            engine="ray",
            address="127.0.0.1:1",
        )
    assert not (tmp_path / "out").exists()
