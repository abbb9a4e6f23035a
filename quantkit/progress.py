"""Progress on stderr: a bar with the time left for every stage that lasts longer than a second.

Where stderr is no terminal a stage is one line, written when it ends. The stages' seconds are kept, for the
report. Output of the command itself goes to stdout and is never touched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

QUIET_SECONDS = 1.0  # what is over sooner needs no bar
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
Advance = Callable[[int], None]


def amount(count: float) -> str:
    """A count with three figures: 124M."""
    for size, letter in UNITS:
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"


class _AmountColumn(ProgressColumn):
    """Done of all, in the stage's unit; nothing where the end is not known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        return Text(f"{amount(task.completed)} of {amount(task.total)} {task.fields['unit']}")


class Progress:
    """The stages of one command."""

    def __init__(
        self, *, quiet: bool = False, file: IO[str] | None = None, after_seconds: float = QUIET_SECONDS
    ) -> None:
        """`quiet` writes nothing at all; `file` stands in for stderr."""
        self.seconds: dict[str, float] = {}  # of each stage; a repeated one adds up
        self._after_seconds = after_seconds
        self._console = Console(file=file, stderr=file is None, highlight=False)
        is_terminal = self._console.file.isatty()  # FORCE_COLOR makes a pipe a terminal in rich's eyes
        self._draws = not quiet and is_terminal and self._console.is_interactive
        self._writes = not quiet and not self._draws
        self._running: str | None = None

    @contextmanager
    def stage(self, name: str, *, total: int | None = None, unit: str = "") -> Iterator[Advance]:
        """One stage; what it yields is told how much more was done. Stages do not nest."""
        assert self._running is None, f"'{name}' began inside '{self._running}'"
        self._running = name
        lock = threading.Lock()
        start = time.perf_counter()
        done = 0
        is_done = False
        with self._bar(name, total, unit) as show:

            def advance(count: int) -> None:
                nonlocal done
                with lock:  # two threads may report at once
                    done += count
                    show(done)

            try:
                yield advance
                is_done = True
            finally:
                self._running = None
                seconds = time.perf_counter() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
                if self._writes and is_done:  # an error says more than how long it took to come
                    counted = f", {amount(done)} {unit}" if done and unit else ""
                    self._console.print(Text(f"{name}: {seconds:.1f} s{counted}"), soft_wrap=True)

    @contextmanager
    def _bar(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        """A bar that a timer draws, so that a stage which reports nothing for a while has one too."""
        if not self._draws:
            yield lambda done: None
            return
        bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            _AmountColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            redirect_stdout=False,  # what the command prints belongs to stdout, also while a bar is up
        )
        task = bars.add_task(name, total=total, unit=unit)
        timer = threading.Timer(self._after_seconds, bars.start)
        timer.daemon = True
        timer.start()
        try:
            yield lambda done: bars.update(task, completed=done)
        finally:
            timer.cancel()
            timer.join()  # it may be drawing at this moment
            bars.stop()
