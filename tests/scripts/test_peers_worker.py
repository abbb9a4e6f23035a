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
def peers(monkeypatch):
    """(the class of workers, the error of those that fail)."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from peers import worker, workplace

    monkeypatch.setattr(worker, "PAUSE_S", 0.0)
    return worker.Worker, workplace.PeerError


@pytest.mark.once
def test_turns_until_it_fails(tmp_path, peers):
    worker_of, failure = peers
    code = ANSWERS.format(peers=str(SCRIPTS / "peers"))
    made = worker_of([sys.executable, "-c", code], tmp_path / "made.log")
    for wanted in (1.0, 2.0):
        samples, other_share = made.turn()
        assert samples == {"ms": [wanted]}
        assert other_share >= 0
    with pytest.raises(failure, match="no third turn"):
        made.turn()
    made.close()
    assert made.process.returncode == 1


@pytest.mark.once
def test_an_end_of_input_ends_it(tmp_path, peers):
    worker_of, _ = peers
    code = ANSWERS.format(peers=str(SCRIPTS / "peers"))
    made = worker_of([sys.executable, "-c", code], tmp_path / "made.log")
    made.close()
    assert made.process.returncode == 0


@pytest.mark.once
def test_what_never_opens_says_why(tmp_path, peers):
    worker_of, failure = peers
    with pytest.raises(failure, match="ModuleNotFoundError"):
        worker_of([sys.executable, "-c", "import no_such_module"], tmp_path / "made.log")
    with pytest.raises(failure, match="No such file"):
        worker_of([str(tmp_path / "absent")], tmp_path / "made.log")
