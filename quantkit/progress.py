"""Progress on stderr: a bar with the remaining time for every stage of more than a second.

Without a terminal, a stage is one line, written at its end. The seconds of all stages are kept for the
report. Stdout is left to the output of the command.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

QUIET_SECONDS = 1.0  # a shorter stage has no bar
OTHER_COLUMNS = 74  # at most, beside the bar: stage, amount, rate and time
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
Advance = Callable[[int], None]


def amount(count: float) -> str:
    """A count with three significant figures: 124M."""
    for size, letter in UNITS:
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"


class _AmountColumn(ProgressColumn):
    """Completed and total amount in the stage's unit; empty without a total."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(f"{amount(task.completed)} of {amount(task.total)} {task.fields['unit']}")


class _RateColumn(ProgressColumn):
    """Amount a second; empty without a total."""

    def render(self, task: Task) -> Text:
        return Text(f"{amount(float(f'{task.speed:.3g}'))}/s" if task.total and task.speed else "")


class _TimeColumn(ProgressColumn):
    """Time left, or time spent where no rate is known."""

    def render(self, task: Task) -> Text:
        seconds = task.time_remaining if task.total else None
        known = task.elapsed if seconds is None else seconds
        text = str(timedelta(seconds=max(0, int(known or 0))))
        return Text(text if seconds is None else f"{text} left")


class Progress:
    """The stages of one command."""

    def __init__(
        self, *, quiet: bool = False, file: IO[str] | None = None, after_seconds: float = QUIET_SECONDS
    ) -> None:
        self.seconds: dict[str, float] = {}  # by stage; a repeated stage adds up
        self._after_seconds = after_seconds
        self._console = Console(file=file, stderr=file is None, highlight=False)
        is_terminal = self._console.file.isatty()  # with FORCE_COLOR, rich takes a pipe for a terminal
        self._draws = not quiet and is_terminal and self._console.is_interactive
        self._writes = not quiet and not self._draws
        self._running: str | None = None

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "") -> Iterator[Advance]:
        """One stage. The yielded function takes the amount completed since its last call. No nesting."""
        assert self._running is None, f"'{name}' began inside '{self._running}'"
        self._running = name
        lock = threading.Lock()
        start = time.perf_counter()
        done = 0
        is_done = False
        with self._bar(name, total, unit) as show:

            def advance(count: int) -> None:
                nonlocal done
                with lock:  # threads report concurrently
                    done += count
                    show(done)

            try:
                yield advance
                is_done = True
            finally:
                self._running = None
                seconds = time.perf_counter() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
                if self._writes and is_done:
                    counted = f", {amount(done)} {unit}" if done and unit else ""
                    self._console.print(Text(f"{name}: {seconds:.1f} s{counted}"), soft_wrap=True)

    def say(self, line: str) -> None:
        """A line at once, between two stages."""
        if self._draws or self._writes:
            self._console.print(Text(line), soft_wrap=True)

    @contextmanager
    def _bar(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        """A bar, drawn after a delay by a timer, so that a stage without reports has one too."""
        if not self._draws:
            yield lambda done: None
            return
        bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=min(40, max(6, self._console.width - OTHER_COLUMNS))),
            _AmountColumn(),
            _RateColumn(),
            _TimeColumn(),
            console=self._console,
            redirect_stdout=False,  # output of the command stays on stdout while a bar is drawn
        )
        task = bars.add_task(name, total=total, unit=unit)
        timer = threading.Timer(self._after_seconds, bars.start)
        timer.daemon = True
        timer.start()
        try:
            yield lambda done: bars.update(task, completed=done)
        finally:
            timer.cancel()
            timer.join()  # it may be drawing
            bars.stop()
