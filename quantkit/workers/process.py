"""The process of one local worker: `python -m quantkit.workers.process`, started by `quantkit.workers.local`.

It reads pickled tasks on stdin and writes pickled results to stdout, one at a time, and ends with the process
that started it. A new interpreter is started instead of a fork, because torch and BLAS do not survive one
with threads, and instead of `multiprocessing`'s, which imports the caller's script again.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
from typing import Any

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def main() -> None:
    end_with_parent()
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes to stderr
    tasks = sys.stdin.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends its workers
    while True:
        try:
            function, arguments = pickle.load(tasks)
        except EOFError:
            return
        pickle.dump(outcome(function, arguments), results, protocol=pickle.HIGHEST_PROTOCOL)
        results.flush()


def outcome(function: Any, arguments: Any) -> tuple[bool, Any]:
    """(whether the task raised nothing, its result or its error)."""
    try:
        return True, function(*arguments)
    except Exception as error:
        error.add_note(f"in a worker:\n{traceback.format_exc()}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return False, error


def end_with_parent() -> None:
    """Let Linux end this process with the one that started it, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


if __name__ == "__main__":
    main()
