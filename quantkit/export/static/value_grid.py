"""The grid of a value between two operators of a static graph: one scale, and codes of 8 or 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

Ranges = Mapping[str, tuple[float, float, float]]  # lowest, highest, least peak of a row
TYPES = {(8, False): TensorProto.UINT8, (16, False): TensorProto.UINT16, (16, True): TensorProto.INT16}
SMALLEST_STEP = 1e-9  # of a value that is zero throughout


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueGrid:
    """A grid of one scale with a zero point; codes are unsigned, or signed around a zero of 0."""

    scale: float
    zero: int
    bits: int
    is_signed: bool = False

    @classmethod
    def over(cls, low: float, high: float, bits: int) -> ValueGrid:
        """The grid whose codes just reach from low to high; zero is always among its values."""
        low, high, steps = min(low, 0.0), max(high, 0.0), (1 << bits) - 1
        scale = float(np.float32(max((high - low) / steps, SMALLEST_STEP)))
        return cls(scale=scale, zero=int(np.clip(round(-low / scale), 0, steps)), bits=bits)

    @property
    def code_type(self) -> str:
        """As numpy calls it."""
        return f"{'i' if self.is_signed else 'u'}{self.bits // 8}"

    def signed(self) -> ValueGrid:
        """The same values around a zero in the middle."""
        if self.is_signed:
            return self
        largest = (1 << (self.bits - 1)) - 1
        reach = self.scale * max(self.zero, (1 << self.bits) - 1 - self.zero)
        return replace(self, scale=float(np.float32(reach / largest)), zero=0, is_signed=True)

    def with_bits(self, bits: int) -> ValueGrid:
        """The same range in another width."""
        if bits == self.bits:
            return self
        low, steps = -self.zero * self.scale, (1 << self.bits) - 1
        return ValueGrid.over(low, low + steps * self.scale, bits)

    def codes(self, values: NDArray[np.float32]) -> NDArray[Any]:
        """The nearest codes."""
        codes = np.rint(values.astype(np.float64) / self.scale) + self.zero
        return np.asarray(np.clip(codes, 0, (1 << self.bits) - 1), f"u{self.bits // 8}")
