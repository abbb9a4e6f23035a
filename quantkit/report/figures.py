"""Numbers as a person reads them."""

from __future__ import annotations

MB = 1e6


def figures(value: float) -> str:
    """Three figures, never with an exponent from 1 up: 1,740 or 17.4 or 0.174."""
    for least, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3g}"


def megabytes(count: float) -> str:
    """Bytes as MB of 1e6, with a tenth."""
    return f"{count / MB:,.1f}" if count >= 10 * MB else f"{count / MB:.2f}"
