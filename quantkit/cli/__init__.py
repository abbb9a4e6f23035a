"""The command line: one file a verb, with its flags, the call, and what it prints.

Heavy imports happen inside the verb that needs them. Exit codes: 0 done, 1 a broken artifact, a missed bar, a
missing provider or another problem, 2 the input was wrong (one line on stderr), 130 and 143 stopped by Ctrl-C
and SIGTERM.
"""

from __future__ import annotations

import signal
import sys

# In the order in which --help lists the verbs.
from quantkit.cli import inspect  # isort: skip
from quantkit.cli import quantize  # isort: skip
from quantkit.cli import generate  # isort: skip
from quantkit.cli import encode  # isort: skip
from quantkit.cli import score  # isort: skip
from quantkit.cli import lm_eval  # isort: skip
from quantkit.cli import report  # isort: skip
from quantkit.cli import evaluate  # isort: skip
from quantkit.cli import bench  # isort: skip
from quantkit.cli import compare  # isort: skip
from quantkit.cli import sweep  # isort: skip
from quantkit.cli import package  # isort: skip
from quantkit.cli import verify  # isort: skip
from quantkit.cli import push  # isort: skip
from quantkit.cli import doctor  # isort: skip
from quantkit.cli import protect  # isort: skip
from quantkit.cli import serve_host  # isort: skip
from quantkit.cli.app import app
from quantkit.errors import InputError
from quantkit.runtime.machine.disk import FULL

__all__ = [
    "app", "bench", "compare", "doctor", "encode", "evaluate", "generate", "inspect", "lm_eval", "main",
    "package", "protect", "push", "quantize", "report", "score", "serve_host", "sweep", "verify",
]  # fmt: skip


def main() -> None:
    """Run, and turn every wrong input into one line and exit code 2."""
    stopped_by: list[int] = []

    def stop(number: int, _: object) -> None:
        """Cleans up as any exception does; a second signal ends at once."""
        signal.signal(number, signal.SIG_DFL)
        stopped_by.append(number)
        sys.exit(128 + number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        _refuse(str(error), error.exit_code)
    except SystemExit as ending:
        if stopped_by:
            notes = getattr(ending, "__notes__", ["nothing was written"])
            print(f"quantkit: stopped; {notes[0]}", file=sys.stderr)
        raise
    except BrokenPipeError:  # the reader, `head` for one, has closed the pipe
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            _refuse(f"the disk is full: {error.filename or 'no file is named'}; next: free some space")
        if not hasattr(error, "format_message"):  # a defect of quantkit keeps its traceback
            raise
        message = " ".join(error.format_message().split())
        _refuse(f"{message}; next: 'quantkit --help' or 'quantkit VERB --help' lists what is allowed")
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(line: str, exit_code: int = InputError.exit_code) -> None:
    print(f"quantkit: {line}", file=sys.stderr)
    sys.exit(exit_code)
