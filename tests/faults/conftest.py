"""The closing line of the faults: cases, tracebacks and hangs over all parsers."""

from __future__ import annotations

from typing import Any

COUNTS = ("cases", "tracebacks", "hangs")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    totals = dict.fromkeys(COUNTS, 0)
    for report in reports:
        for name, value in report.user_properties:
            if name in totals:
                totals[name] += value
    if totals["cases"]:
        terminalreporter.write_line("faults: " + ", ".join(f"{totals[name]:,} {name}" for name in COUNTS))
