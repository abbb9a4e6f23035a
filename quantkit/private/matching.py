"""Finding rows and columns again by their values: what an attacker does who has the public weights.

A permutation moves numbers and changes none. Where one side of a matrix is in a known order, each vector
along it is looked up among the public ones by its direction. Where neither is, its values are compared
sorted, since sorting forgets the order that nobody knows. Scales of channels, as smoothing puts them in, are
divided out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Order = NDArray[np.int64]
ROWS_AT_ONCE = 2048
NUM_QUANTILES = 1024  # of sorted values: more say no more


def unit_rows(rows_NF: Floats) -> Floats:
    """Every row at length one, so that only its direction counts."""
    lengths = np.linalg.norm(rows_NF, axis=1, keepdims=True)
    unit: Floats = (rows_NF / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return unit


def sorted_values(rows_NF: Floats) -> Floats:
    """Every row's magnitudes in order, at length one and without what all rows have in common."""
    ordered = np.sort(np.abs(rows_NF), axis=1)
    if ordered.shape[1] > NUM_QUANTILES:
        ordered = ordered[:, np.linspace(0, ordered.shape[1] - 1, NUM_QUANTILES).round().astype(int)]
    return unit_rows(ordered)


def nearest(seen_NF: Floats, known_MF: Floats) -> Order:
    """For each row that was seen, the known one nearest to it."""
    centre = known_MF.mean(axis=0)
    seen, known = (seen_NF - centre).astype(np.float64), (known_MF - centre).astype(np.float64)
    squares = (known * known).sum(axis=1)
    found = [
        (squares - 2 * seen[start : start + ROWS_AT_ONCE] @ known.T).argmin(axis=1)
        for start in range(0, len(seen), ROWS_AT_ONCE)
    ]
    return np.concatenate(found).astype(np.int64)


def nearest_in_heads(seen_NF: Floats, known_NF: Floats, head_dim: int) -> Order:
    """The same for values, which stay within their head."""
    found = [
        nearest(seen_NF[start : start + head_dim], known_NF[start : start + head_dim]) + start
        for start in range(0, len(seen_NF), head_dim)
    ]
    return np.concatenate(found)


def agreement(seen_NF: Floats, known_NF: Floats, order: Order) -> float:
    """The mean cosine between what was seen and the known rows in this order: near one where it is right."""
    return float((unit_rows(seen_NF) * unit_rows(known_NF[order])).sum(axis=1).mean())
