"""Numbers as a person reads them: three significant figures, megabytes, ratios, percentages and bars."""

from __future__ import annotations

MB = 1e6
BAR_CELLS = 20


def figures(value: float) -> str:
    """Three figures, never with an exponent from 1 up: 1,740 or 17.4 or 0.174."""
    for least, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3g}"


def megabytes(count: float) -> str:
    """Bytes as MB of 1e6: one decimal from 10 MB up, two below."""
    return f"{count / MB:,.1f}" if count >= 10 * MB else f"{count / MB:.2f}"


def duration(seconds: float) -> str:
    """Two figures are all that an estimate has: 0.4 s, 41 s or 6.5 min."""
    count, unit = (seconds, "s") if seconds < 60 else (seconds / 60, "min")
    return f"{count:.{0 if count >= 10 else 1}f} {unit}"


def with_error(value: float, standard_error: float) -> str:
    """A perplexity with its standard error."""
    return f"{value:,.2f} ± {standard_error:,.2f}"


def bar(share: float) -> str:
    """A bar of twenty cells; full only at exactly 1 and empty only at exactly 0."""
    filled = round(share * BAR_CELLS)
    if 0 < share < 1:
        filled = min(max(filled, 1), BAR_CELLS - 1)
    return "█" * filled + "░" * (BAR_CELLS - filled)


def percent(share: float) -> str:
    """A percentage that is never rounded up to 100% or down to 0%."""
    text = f"{share:.1%}"
    if share < 1 and text == "100.0%":
        return ">99.9%"
    return "<0.1%" if share > 0 and text == "0.0%" else text
