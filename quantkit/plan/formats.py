"""The ways to make a projection integer: what its weights are rounded to, and how its input is at run time.

A scheme is a weight grid and the operator that multiplies with it. Blocks along the input dimension give
weights *and* activations a scale each, so one outlier spoils 32 or 128 values and not a whole row; the
integer products of a block are summed exactly, as in Dettmers et al. 2022 (https://arxiv.org/abs/2208.07339)
and llama.cpp's Q8_0. Per-channel weights with one activation scale per tensor are the fastest for long
prompts and lose accuracy on models with outlier channels; they are offered and never the default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.errors import InputError
from quantkit.model.model_map import READ_NO_NORM, Role

BITS_IN_HALVES = 16
LARGEST_IN_HALVES = 127 * 256 + 127


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """An integer grid: `bits` wide, one scale for each block of inputs, or for each output row.

    A symmetric grid has its zero in the middle; one that is not has a zero point for each scale. A code of 16
    bits is kept as two of 8, high x 256 + low, since no operator multiplies with wider weights.
    """

    bits: int = 8
    block: int | None = None  # None: one scale for each output channel
    is_symmetric: bool = True

    @property
    def in_halves(self) -> bool:
        """Whether a code is stored as two of 8 bits."""
        return self.bits == BITS_IN_HALVES

    @property
    def largest(self) -> int:
        """The largest code; of 16 bits the largest whose both halves have a sign of their own."""
        if self.in_halves:
            return LARGEST_IN_HALVES
        return (1 << (self.bits - 1)) - 1

    @property
    def lowest(self) -> int:
        """The lowest code. Of 256 one can be spared for symmetry's sake; of 16 it would cost too much."""
        return -self.largest if self.is_symmetric and self.bits >= 8 else -self.largest - 1

    def num_blocks(self, in_features: int) -> int:
        """Scales that one output row has."""
        return 1 if self.block is None else -(-in_features // self.block)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of codes, float32 scales and zero points of a matrix, padded to whole blocks."""
        blocks = self.num_blocks(columns)
        width = columns if self.block is None else blocks * self.block
        zeros = 0 if self.is_symmetric else -(-blocks * self.bits // 8)
        return rows * (width * self.bits // 8 + blocks * 4 + zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """What the numbers of one projection are: its weights on a grid, and which inputs share a scale."""

    grid: Grid
    # "block", "token", "tensor", "mixed" of the last two; from calibration "static8", "static16", or
    # "graph8", "graph16" where each value of the graph has a range of its own; "float" where the runtime
    # rounds, or nobody does
    activations: str

    @property
    def input_bits(self) -> int | None:
        """Width of an input whose range calibration fixed; None where it is found at run time."""
        return int(self.activations.removeprefix("static")) if self.is_static else None

    @property
    def is_static(self) -> bool:
        """Whether calibration says what range the input has."""
        return self.activations.startswith("static")

    def scales_tokens(self, role: Role) -> bool:
        """Whether inputs have a scale for each token where this role reads them."""
        return self.activations == "token" or (self.activations == "mixed" and role in READ_NO_NORM)


def in_blocks(block: int, *, bits: int = 8, is_symmetric: bool = True) -> Format:
    """Weights and inputs with one scale for each `block` of them."""
    return Format(grid=Grid(bits=bits, block=block, is_symmetric=is_symmetric), activations="block")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A row of the table."""

    body: Format
    head: Format  # of the lm_head and of tables: read row by row, and mostly for one position
    description: str


def _blocks(size: int, remark: str, *, head: int | None = None) -> Scheme:
    return Scheme(
        body=in_blocks(size),
        head=in_blocks(head or size),
        description=f"INT8 weights and activations, one scale for each {size} inputs; {remark}",
    )


def _channels(activations: str, description: str) -> Scheme:
    return Scheme(
        body=Format(grid=Grid(), activations=activations), head=in_blocks(128), description=description
    )


def _nibbles(size: int, *, is_symmetric: bool = True) -> Scheme:
    zeros = "" if is_symmetric else " and zero point"
    return Scheme(
        body=in_blocks(size, bits=4, is_symmetric=is_symmetric),
        head=in_blocks(128),
        description=f"INT4 weights, one scale{zeros} for each {size} inputs; INT8 elsewhere",
    )


SCHEMES: dict[str, Scheme] = {
    "int8_block16": _blocks(16, "the most accurate, the largest"),
    "int8_block32": _blocks(32, "the most accurate at a moderate size"),
    # Nothing behind a head rounds again, so larger blocks there let no row depend on its batch.
    "int8_block64": _blocks(64, "small, fast, and rows that do not depend on their batch", head=128),
    "int8_block128": _blocks(128, "the smallest and fastest of them"),
    "int8_channel": _channels(
        "tensor",
        "INT8 weights, one scale a row; one activation scale a tensor: fast prompts, inaccurate",
    ),
    "int8_mixed": _channels(
        "mixed", "INT8 weights, one scale a row; inputs that no norm precedes are scaled by token"
    ),
    "int8_token": _channels("token", "INT8 weights, one scale a row; every input is scaled by token"),
    "int8_static16": _channels(
        "static16", "INT8 weights, one scale a row; 16-bit activations in ranges from calibration: for NPUs"
    ),
    "int8_static8": _channels(
        "static8", "INT8 weights, one scale a row; 8-bit activations in ranges from calibration: loses most"
    ),
    "int4_block32": _nibbles(32),
    "int4_block64": _nibbles(64),
    "int4_block128": _nibbles(128),
    "int4_block32_zeros": _nibbles(32, is_symmetric=False),
    "int4_block64_zeros": _nibbles(64, is_symmetric=False),
    "int4_block128_zeros": _nibbles(128, is_symmetric=False),
}
FLOAT = "float"  # in place of a scheme: left as it was
AUTO = "auto"
# What measures best for each kind of export: decoders spend their time on single tokens, where block scales
# cost nothing, and up to 64 a row does not depend on its batch; encoders spend it on whole texts, where the
# operator for per-channel weights is twice as fast.
DEFAULT_SCHEMES: dict[str, str] = {
    "decoder": "int8_block64",
    "encoder": "int8_mixed",
    "traced": "int8_block128",
}


DEFAULT_STATIC_SCHEME = "int8_static16"  # where the target wants every value in a range from calibration


def on_graph(wanted: Format) -> Format:
    """The same where ranges belong to the values of a graph, and none is stored with the weights."""
    return replace(wanted, activations=wanted.activations.replace("static", "graph"))


def static_bits(name: str) -> int | None:
    """Width of a scheme's inputs where calibration fixes their ranges, else None."""
    return scheme(name).body.input_bits


def format_for(name: str, *, is_head: bool) -> Format:
    """The format that a scheme gives a projection named by itself.

    A head may share its numbers with an embedding, which reads single rows of a symmetric grid in blocks.
    """
    row = scheme(name)
    fits_a_head = row.body.grid.block is not None and row.body.grid.is_symmetric
    return row.head if is_head and not fits_a_head else row.body


def scheme(name: str) -> Scheme:
    """A row by its name."""
    try:
        return SCHEMES[name]
    except KeyError:
        raise InputError(f"'{name}'", where="scheme", allowed=", ".join(SCHEMES)) from None
