"""Errors of the user's input: one line with the fault, its place, the allowed values and the next step.

Every fault that a user can cause raises `InputError`. The command line prints it and exits with code 2. A
mistake of the package stays an ordinary exception with a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

MAX_CHARACTERS = 1000  # of a part; longer ones are cut in the middle


class InputError(ValueError):
    """A fault in the user's input. Its four parts are attributes; `str(error)` is the line for the terminal.

    `what` is the fault, `where` the flag, key, file or argument that holds it, `allowed` the values that are
    accepted there, and `next_step` a remedy. The last three are empty strings where they do not apply.
    """

    exit_code: ClassVar[int] = 2
    what: str
    where: str
    allowed: str
    next_step: str

    def __init__(self, what: str, *, where: str = "", allowed: str = "", next_step: str = "") -> None:
        self.what, self.where, self.allowed, self.next_step = what, where, allowed, next_step
        parts = [f"{where}: {what}" if where else what]
        if allowed:
            parts.append(f"allowed: {allowed}")
        if next_step:
            parts.append(f"next: {next_step}")
        super().__init__("; ".join(_one_line(part) for part in parts))


def _one_line(text: str) -> str:
    """The text without line ends and control characters; a file may have brought it along."""
    line = " ".join(text.split())
    if len(line) > MAX_CHARACTERS:
        line = f"{line[: MAX_CHARACTERS // 2]} ... {line[-MAX_CHARACTERS // 4 :]}"
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def not_one_of(value: str, names: Iterable[str], *, where: str, what: str = "") -> InputError:
    """A name that is not in a list, with the nearest one that is."""
    names = list(names)
    return InputError(
        what or f"'{value}'",
        where=where,
        allowed=", ".join(names),
        next_step=did_you_mean(value, names),
    )


def did_you_mean(value: str, names: Iterable[str]) -> str:
    """A question with the name nearest to a mistyped one; empty where none is near."""
    nearest = difflib.get_close_matches(value, list(names), n=1)
    return f"did you mean '{nearest[0]}'?" if nearest else ""


class MissingProviderError(InputError):
    """An execution provider that this machine does not run."""

    exit_code = 1
