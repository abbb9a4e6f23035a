"""Quantization schemes: weight grid and activation format.

Blocks along the input dimension give weights and activations a scale per block, so an outlier costs accuracy
in 32 or 128 values and not in a whole row. Integer products of a block are summed exactly, as in Dettmers et
al. 2022 (https://arxiv.org/abs/2208.07339) and llama.cpp's Q8_0. Per-channel weights with per-tensor
activation scales are the fastest for long prompts and inaccurate on models with outlier channels. Their
remedy in the same paper: the few input columns with the largest activations are multiplied in float beside
the integer product of all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quantkit.errors import not_one_of
from quantkit.model.model_map import READ_NO_NORM, Role

BITS_IN_HALVES = 16
BLOCKS = (256, 128, 64, 32, 16)  # sizes of MatMulNBits
MOST_PADDING = 0.02  # of a row of lm_head or of an embedding
LARGEST_IN_HALVES = 127 * 256 + 127
OUTLIERS, LEAST_COLUMNS_AN_OUTLIER = 32, 32  # columns in float: so many, and at most one of 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """An integer grid of `bits`, with one scale per block of inputs or per output channel.

    An asymmetric grid has a zero point per scale. A 16-bit code is stored as two 8-bit codes, high x 256 +
    low, because no operator multiplies wider weights.
    """

    bits: int = 8
    block: int | None = None  # None: one scale per output channel
    is_symmetric: bool = True

    @property
    def in_halves(self) -> bool:
        return self.bits == BITS_IN_HALVES

    @property
    def stored_bits(self) -> int:
        """Bits of a code in a file: those of 7 bits are bytes."""
        return next(size for size in (4, 8, 16) if self.bits <= size)

    @property
    def largest(self) -> int:
        """The largest code; at 16 bits the largest whose halves are both signed."""
        if self.in_halves:
            return LARGEST_IN_HALVES
        return (1 << (self.bits - 1)) - 1

    @property
    def lowest(self) -> int:
        """The lowest code. A symmetric grid leaves out -128 at 8 bits; at 4 bits all 16 codes are used."""
        return -self.largest if self.is_symmetric and self.bits >= 8 else -self.largest - 1

    def num_blocks(self, in_features: int) -> int:
        """Scales of one output row."""
        return 1 if self.block is None else -(-in_features // self.block)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of codes, scales and zero points of a matrix, padded to whole blocks."""
        blocks = self.num_blocks(columns)
        width = columns if self.block is None else blocks * self.block
        zeros = 0 if self.is_symmetric else -(-blocks * self.stored_bits // 8)
        scales = 4 if self.block is None else 2 * blocks
        return rows * (width * self.stored_bits // 8 + scales + zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Format of one projection: weight grid, and the inputs that share an activation scale."""

    grid: Grid
    # Dynamic: "block", "token", "tensor", or "mixed" (token or tensor by role). Ranges from calibration:
    # "static8", "static16" per projection, "graph8", "graph16" per value of the graph. "float": not rounded.
    activations: str
    outliers: int = 0  # input columns that are multiplied in float, at most; see `num_outliers`

    @property
    def described(self) -> str:
        block = f"block {self.grid.block}" if self.grid.block else "channel"
        outliers = f", up to {self.outliers} outlier columns in float" if self.outliers else ""
        return f"int{self.grid.bits} {block}, inputs by {self.activations}{outliers}"

    def num_outliers(self, in_features: int) -> int:
        """Columns of an input of this width that are multiplied in float."""
        return min(self.outliers, in_features // LEAST_COLUMNS_AN_OUTLIER)

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of codes, scales and zero points, and of the outlier columns beside them."""
        outliers = self.num_outliers(columns)
        return self.grid.num_bytes(rows, columns) + outliers * (2 * rows + 8)

    @property
    def input_bits(self) -> int | None:
        """Bits of an input with a static range; None for dynamic ranges."""
        return int(self.activations.removeprefix("static")) if self.is_static else None

    @property
    def is_static(self) -> bool:
        """Whether calibration fixes the range of the input."""
        return self.activations.startswith("static")

    def scales_tokens(self, role: Role) -> bool:
        """Whether inputs of this role have a scale per token."""
        return self.activations == "token" or (self.activations == "mixed" and role in READ_NO_NORM)


def in_blocks(block: int, *, bits: int = 8, is_symmetric: bool = True) -> Format:
    """Weights and inputs with one scale per block."""
    return Format(grid=Grid(bits=bits, block=block, is_symmetric=is_symmetric), activations="block")


TABLES = in_blocks(128)  # of lm_head and embeddings, which are read row by row


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A row of the table of schemes."""

    body: Format
    head: Format = TABLES
    roles: Mapping[Role, Format] = field(default_factory=dict)  # in place of the body's format

    def format_of(self, role: Role) -> Format:
        return self.head if role is Role.LM_HEAD else self.roles.get(role, self.body)


def with_little_padding(grid: Grid, columns: int) -> Grid:
    """The grid with the largest blocks, up to its own, that pad a row of `columns` by at most 2%.

    Blocks of 16 are left out: their scales take an eighth of the codes' bytes.
    """
    sizes = [size for size in BLOCKS if 32 <= size <= (grid.block or 0)]
    fitting = (size for size in sizes if -columns % size <= MOST_PADDING * columns)
    return replace(grid, block=next(fitting, sizes[-1] if sizes else grid.block))


def fitted_to_head(chosen: Format, role: Role, columns: int) -> Format:
    """The format as it is, and for lm_head with blocks that pad its rows little."""
    if role is not Role.LM_HEAD:
        return chosen
    return replace(chosen, grid=with_little_padding(chosen.grid, columns))


def _channels(activations: str) -> Scheme:
    return Scheme(body=Format(grid=Grid(), activations=activations))


def _with_outliers(body: Format) -> Scheme:
    """Formats with outlier columns. lm_head has them in blocks of 32: a tied head takes no smoothing."""
    return Scheme(body=replace(body, outliers=OUTLIERS), head=replace(in_blocks(32), outliers=OUTLIERS))


def _int4(block: int, *, is_symmetric: bool = True) -> Scheme:
    return Scheme(body=in_blocks(block, bits=4, is_symmetric=is_symmetric))


SCHEMES: dict[str, Scheme] = {
    # INT8 weights and activations with a scale per block. Small blocks are accurate, large blocks are fast.
    "int8_block16": Scheme(body=in_blocks(16), head=in_blocks(16)),
    # A tied head takes no smoothing, so its input loses most of all: smaller blocks.
    "int8_block32": Scheme(body=in_blocks(32), head=in_blocks(16)),
    # Up to 64, rows do not depend on their batch. No operator after the head rounds, so 128 is safe there.
    "int8_block64": Scheme(body=in_blocks(64)),
    "int8_block128": Scheme(body=in_blocks(128)),
    # INT8 weights with a scale per channel, by activation scales.
    "int8_channel": _channels("tensor"),  # fast prompts, inaccurate
    "int8_mixed": _channels("mixed"),  # per token where no norm precedes
    "int8_token": _channels("token"),
    # The columns with the largest activations in float: for prompts as fast as those of int8_token.
    "int8_token_outliers": _with_outliers(Format(grid=Grid(), activations="token")),
    "int8_block64_outliers": _with_outliers(in_blocks(64)),
    "int8_block128_outliers": _with_outliers(in_blocks(128)),
    "int8_static16": _channels("static16"),  # 16-bit activations in ranges from calibration, for NPUs
    "int8_static8": _channels("static8"),  # 8-bit activations in ranges from calibration: least accurate
    # INT4 weights with a scale, or a scale and a zero point, per block; head and tables are INT8.
    # Values are few weights, and lose most: INT8 for them takes a third off the KL divergence.
    "int4": Scheme(body=in_blocks(32, bits=4), roles={Role.ATTENTION_VALUE: in_blocks(32)}),
    "int4_block32": _int4(32),
    "int4_block64": _int4(64),
    "int4_block128": _int4(128),
    "int4_block32_zeros": _int4(32, is_symmetric=False),
    "int4_block64_zeros": _int4(64, is_symmetric=False),
    "int4_block128_zeros": _int4(128, is_symmetric=False),
}
FLOAT = "float"  # in place of a scheme: not quantized
AUTO = "auto"
# The scheme with the best measurements for each kind of export. Decoders spend their time on single tokens,
# where block scales are nearly free; on released models blocks of 32 lose less than half of what blocks of 64
# lose. Encoders spend it on whole texts, where the operator for per-channel weights is twice as fast.
DEFAULT_SCHEMES: dict[str, str] = {
    "decoder": "int8_block32",
    "encoder": "int8_token",
    "encoder_decoder": "int8_block32",
    "traced": "int8_block128",
}


DEFAULT_STATIC_SCHEME = "int8_static16"  # for targets with static ranges


def static_bits(name: str) -> int | None:
    """Bits of a scheme's inputs with static ranges; None for dynamic ranges."""
    return scheme(name).body.input_bits


def format_for(name: str, role: Role) -> Format:
    """The format of a projection with a scheme of its own.

    A head may be tied to an embedding, which reads single rows of a symmetric grid in blocks.
    """
    row = scheme(name)
    suits_tables = row.body.grid.block is not None and row.body.grid.is_symmetric
    if role is Role.LM_HEAD:
        return row.body if suits_tables else row.head
    return row.format_of(role)


def scheme(name: str) -> Scheme:
    try:
        return SCHEMES[name]
    except KeyError:
        raise not_one_of(name, SCHEMES, where="scheme") from None
