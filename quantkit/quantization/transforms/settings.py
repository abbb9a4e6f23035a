"""Settings of the transforms, of which each reads those that concern it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

ChannelStatistics = Mapping[str, NDArray[Any]]  # matrix -> one value for each channel of its input


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformSettings:
    seed: int = 0
    unties_head: bool = False  # a tied head may get weights of its own
    statistics: ChannelStatistics = field(default_factory=dict)  # peaks, or mean magnitudes
    alpha: float | Mapping[str, float | None] = 0.5  # of all spaces, or of each; None leaves one as it is


DEFAULT = TransformSettings()
