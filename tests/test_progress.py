"""Progress: a bar on a terminal after a while, a line elsewhere, nothing when quiet."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest

from quantkit.progress import Progress, amount

pytestmark = pytest.mark.once


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_pipe_gets_one_line_a_stage():
    file = io.StringIO()
    progress = Progress(file=file)
    with progress.stage("quantizing", total=2_000_000, unit="weights") as advance:
        assert file.getvalue() == ""
        advance(1_500_000)
        advance(500_000)
    with progress.stage("exporting"):
        pass
    assert file.getvalue() == "quantizing: 0.0 s, 2M weights\nexporting: 0.0 s\n"


def test_stderr_is_the_default_and_stdout_stays_clean(capsys):
    with Progress().stage("measuring"):
        print("a result")
    captured = capsys.readouterr()
    assert captured.out == "a result\n"
    assert captured.err.startswith("measuring: ")


def test_a_long_stage_has_a_bar_with_its_amount(terminal):
    with Progress(file=terminal, after_seconds=0.02).stage("measuring", total=4000, unit="tokens") as advance:
        advance(1000)
        time.sleep(0.3)
    shown = terminal.getvalue()
    assert "measuring" in shown
    assert "1k of 4k tokens" in shown


@pytest.mark.parametrize("columns", [80, 160])
def test_a_bar_tells_rate_and_time_left_on_one_line(terminal, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    bars = Progress(file=terminal, after_seconds=0.0)
    with bars.stage("inputs for histograms", total=10**9, unit="tokens") as advance:
        for _ in range(8):
            advance(10**6)
            time.sleep(0.1)
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()))
    (done, rate, left) = re.findall(
        r"(\d+M) of 1G tokens +([\d.]+M)/s +0:(\d\d:\d\d) left", "\n".join(lines)
    )[-1]
    shares = float(rate[:-1]), 60 * int(left[:2]) + int(left[3:])
    assert shares[0] == pytest.approx(10, rel=0.5)
    assert shares[1] == pytest.approx((1000 - int(done[:-1])) / shares[0], rel=0.5)
    assert max(map(len, lines)) <= columns


def test_a_long_stage_that_reports_nothing_has_a_bar_and_its_time(terminal):
    with Progress(file=terminal, after_seconds=0.02).stage("exporting"):
        time.sleep(0.2)
    assert re.search(r"exporting.*0:00:00", terminal.getvalue())


def test_what_is_printed_under_a_bar_stays_on_stdout(terminal, capsys):
    with Progress(file=terminal, after_seconds=0.0).stage("generating"):
        time.sleep(0.05)
        print("a token")
    assert capsys.readouterr().out == "a token\n"
    assert "a token" not in terminal.getvalue()


def test_a_pipe_stays_a_pipe_where_colour_is_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    with Progress(file=file, after_seconds=0.0).stage("exporting"):
        time.sleep(0.05)
    assert re.fullmatch(r"exporting: \d\.\d s\n", file.getvalue())


def test_a_short_stage_has_none(terminal):
    with Progress(file=terminal).stage("exporting", total=5) as advance:
        advance(5)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()])
def test_quiet_writes_nothing(file):
    with Progress(quiet=True, file=file, after_seconds=0.0).stage("exporting") as advance:
        advance(1)
        time.sleep(0.05)
    assert file.getvalue() == ""


def test_seconds_are_kept_and_add_up():
    progress = Progress(quiet=True)
    for _ in range(2):
        with progress.stage("exporting"):
            time.sleep(0.02)
    assert 0.04 <= progress.seconds["exporting"] < 1.0


def test_a_failure_passes_through_and_leaves_no_bar(terminal):
    file = io.StringIO()
    for output in (file, terminal):
        progress = Progress(file=output, after_seconds=0.0)
        with pytest.raises(ValueError, match="no"), progress.stage("exporting"):
            raise ValueError("no")
        with progress.stage("measuring"):  # the next stage is not inside the one that failed
            pass
    assert file.getvalue() == "measuring: 0.0 s\n", "the error itself says what happened"
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_threads_may_report_at_once():
    file = io.StringIO()
    with Progress(file=file).stage("quantizing", unit="weights") as advance:
        threads = [threading.Thread(target=lambda: [advance(1) for _ in range(5000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "20k weights" in file.getvalue()


def test_stages_do_not_nest():
    progress = Progress(quiet=True)
    with progress.stage("outer"), pytest.raises(AssertionError, match="'inner' began inside 'outer'"):
        progress.stage("inner").__enter__()


def test_amounts_have_three_figures():
    assert [amount(count) for count in (7, 1234, 124_439_808, 6.7e9)] == ["7", "1.23k", "124M", "6.7G"]
