"""Turns at the cores: one cell has all of them, or several share them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quantkit.runtime.machine.disk import LOCKS
from quantkit.sweeps.turns import open_turns

pytestmark = [pytest.mark.once, pytest.mark.skipif(LOCKS is None, reason="no locks of files here")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))


def test_a_timed_cell_waits_until_the_others_have_stopped():
    with open_turns() as timed, open_turns() as first, open_turns() as second:
        assert first.share() and second.share()
        assert not timed.take()
        assert first.is_wanted() and second.is_wanted()
        first.give_up()
        assert not timed.take(), "the second one computes still"
        second.give_up()
        assert timed.take()
        assert not first.share()
        timed.give_up()
        assert not first.is_wanted()
        assert first.share() and second.share()


def test_two_timed_cells_take_turns():
    with open_turns() as first, open_turns() as second:
        assert first.take()
        assert not second.take()
        first.give_up()
        assert second.take()


def test_a_killed_process_holds_no_turn():
    code = (
        "from quantkit.sweeps.turns import open_turns\n"
        "with open_turns() as turns:\n"
        "    print(turns.take(), flush=True)\n"
        "    input()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process, open_turns() as turns:
        assert process.stdout.readline() == "True\n"
        assert not turns.share()
        process.kill()
        process.wait()
        assert turns.share()
