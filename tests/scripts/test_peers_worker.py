"""Systems that stay open and take turns: a process that answers, one that fails, one that never opens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ANSWERS = """
import sys
sys.path.insert(0, {peers!r})
import timing
turns = []
def measure():
    turns.append(0)
    if len(turns) > 2:
        raise RuntimeError("no third turn")
    print("a library talks")
    return {{"ms": [float(len(turns))]}}
timing.take_turns(measure)
"""


@pytest.fixture
def worker_module(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from peers import worker  # noqa: PLC0415 - the scripts' own package

    monkeypatch.setattr(worker, "PAUSE_S", 0.0)
    return worker


@pytest.mark.once
def test_turns_until_it_fails(tmp_path, worker_module):
    code = ANSWERS.format(peers=str(SCRIPTS / "peers"))
    made = worker_module.Worker([sys.executable, "-c", code], tmp_path / "made.log")
    for wanted in (1.0, 2.0):
        samples, other_share = made.turn()
        assert samples == {"ms": [wanted]}
        assert other_share >= 0
    with pytest.raises(worker_module.PeerError, match="no third turn"):
        made.turn()
    made.close()
    assert made.process.returncode == 1


@pytest.mark.once
def test_an_end_of_input_ends_it(tmp_path, worker_module):
    code = ANSWERS.format(peers=str(SCRIPTS / "peers"))
    made = worker_module.Worker([sys.executable, "-c", code], tmp_path / "made.log")
    made.close()
    assert made.process.returncode == 0


@pytest.mark.once
def test_what_never_opens_says_why(tmp_path, worker_module):
    with pytest.raises(worker_module.PeerError, match="ModuleNotFoundError"):
        worker_module.Worker([sys.executable, "-c", "import no_such_module"], tmp_path / "made.log")
    with pytest.raises(worker_module.PeerError, match="No such file"):
        worker_module.Worker([str(tmp_path / "absent")], tmp_path / "made.log")
