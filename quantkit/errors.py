"""The one error that a user may see: one line that says what, where, the allowed values and the next step.

Everything a user can get wrong raises `InputError`; the command line prints it and exits with code 2.
A mistake of our own stays an ordinary exception with a traceback.
"""

from __future__ import annotations


class InputError(ValueError):
    """The user's input was wrong; `str(error)` is the single line to print."""

    def __init__(self, what: str, *, where: str = "", allowed: str = "", next_step: str = "") -> None:
        """Join the parts that are given into one line."""
        parts = [f"{where}: {what}" if where else what]
        if allowed:
            parts.append(f"allowed: {allowed}")
        if next_step:
            parts.append(f"next: {next_step}")
        super().__init__("; ".join(" ".join(part.split()) for part in parts))
