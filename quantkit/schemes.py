"""The ways to make a projection integer: what its weights are rounded to, and how its input is at run time.

A scheme is a weight grid and the operator that multiplies with it. Blocks along the input dimension give
weights *and* activations a scale each, so one outlier spoils 32 or 128 values and not a whole row; the
integer products of a block are summed exactly, as in Dettmers et al. 2022 (https://arxiv.org/abs/2208.07339)
and llama.cpp's Q8_0. Per-channel weights with one activation scale per tensor are the fastest for long
prompts and lose accuracy on models with outlier channels; they are offered and never the default.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A symmetric integer grid: `bits` wide, one scale for each block of inputs, or for each output row."""

    bits: int = 8
    block: int | None = None  # None: one scale for each output channel

    @property
    def largest(self) -> int:
        """The largest code; its negative is the smallest, so that the grid is symmetric."""
        return (1 << (self.bits - 1)) - 1

    def num_blocks(self, in_features: int) -> int:
        """Scales that one output row has."""
        return 1 if self.block is None else -(-in_features // self.block)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of codes and float32 scales of a matrix, padded to whole blocks."""
        blocks = self.num_blocks(columns)
        width = columns if self.block is None else blocks * self.block
        return rows * (width * self.bits // 8 + blocks * 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A row of the table."""

    grid: Grid
    head: Grid  # of the lm_head and the table it shares: read row by row, and mostly for one position
    activations: str  # "block", "token" or "tensor": values of the input that share a scale at run time
    description: str


def _blocks(size: int, remark: str) -> Scheme:
    return Scheme(
        grid=Grid(block=size),
        head=Grid(block=size),
        activations="block",
        description=f"INT8 weights and activations, one scale for each {size} inputs; {remark}",
    )


SCHEMES: dict[str, Scheme] = {
    "int8_block16": _blocks(16, "the most accurate, the largest"),
    "int8_block32": _blocks(32, "the most accurate at a moderate size"),
    "int8_block64": _blocks(64, "between the two neighbours"),
    "int8_block128": _blocks(128, "small and fast"),
    "int8_channel": Scheme(
        grid=Grid(),
        head=Grid(block=128),
        activations="tensor",
        description="INT8 weights, one scale a row; one activation scale a tensor: fast prompts, inaccurate",
    ),
    "int8_token": Scheme(
        grid=Grid(),
        head=Grid(block=128),
        activations="token",
        description="INT8 weights, one scale a row; inputs that no norm precedes are scaled by token",
    ),
}
AUTO = "auto"
# What measures best for each kind of export: decoders spend their time on single tokens, where block scales
# cost nothing; encoders on whole texts, where the operator for per-channel weights is twice as fast.
DEFAULT_SCHEMES: dict[str, str] = {
    "decoder": "int8_block128",
    "encoder": "int8_token",
    "traced": "int8_block128",
}


def scheme(name: str) -> Scheme:
    """A row by its name."""
    try:
        return SCHEMES[name]
    except KeyError:
        raise InputError(f"'{name}'", where="scheme", allowed=", ".join(SCHEMES)) from None
