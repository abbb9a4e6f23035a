"""The command line: one verb a stage, no logic. Heavy imports happen inside the verb that needs them.

Exit codes: 0 done, 1 a bar was missed or a check found a problem, 2 the input was wrong (one line on stderr).
"""

from __future__ import annotations

import sys

# In the order in which --help lists the verbs.
from quantkit.cli import inspecting  # isort: skip
from quantkit.cli import quantizing  # isort: skip
from quantkit.cli import running  # isort: skip
from quantkit.cli import judging  # isort: skip
from quantkit.cli import shipping  # isort: skip
from quantkit.cli import protecting  # isort: skip
from quantkit.cli.app import app
from quantkit.errors import InputError

__all__ = ["app", "inspecting", "judging", "main", "protecting", "quantizing", "running", "shipping"]
WRONG_INPUT = 2


def main() -> None:
    """Run, and turn every wrong input into one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except InputError as error:
        _refuse(str(error))
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a mistake of our own keeps its traceback
            raise
        message = " ".join(error.format_message().split())
        _refuse(f"{message}; next: 'quantkit --help' or 'quantkit VERB --help' lists what is allowed")
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(line: str) -> None:
    print(f"quantkit: {line}", file=sys.stderr)
    sys.exit(WRONG_INPUT)
