"""One row of a specification: what a step of the forward pass does, moves and stores.

The makers below turn shapes into counts, the same way for every step, so that one place decides what a
FLOP, a stored byte and a moved byte are. docs/specification.md defines every column. Nothing here knows a
machine or the order of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.model.model_map import Block, Layer, ModelMap, Norm

MATRIX_PROCESSING = ("matmul", "scores", "attention x V")
GROUPS = ("embeddings", "attention", "ffn", "norms", "head", "other")
FULL_BITS = 32

# Operations for each output element, one for every arithmetic step; exp, tanh, erf and a division count one.
FLOPS_PER_ELEMENT = {
    "tokenization": 0,
    "gather": 0,
    "add": 1,  # for every operand after the first
    "multiply": 1,
    "scale": 1,
    "softcap": 3,  # divide, tanh, multiply
    "rotate": 3,  # two products and their sum
    "softmax": 7,  # scale, mask, maximum, subtract, exp, sum, divide
    "layer_norm": 7,  # mean, subtract, square, sum, normalise, gain, bias
    "rms_norm": 4,  # square, sum, normalise, gain
    "relu": 1,
    "gelu": 5,  # divide, erf, add, two products
    "gelu_tanh": 8,  # cube (2), scale, add, scale, tanh, add, product with the halved input
    "silu": 4,  # negate, exp, add, divide
    "other": 5,  # an activation that has no row here
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """How one device takes a row; bound and verdict are "-" where it does not run the row."""

    device: str
    kind: str
    time_us: float
    bound: str  # "compute", "memory" or "dispatch"
    verdict: str  # "good", "fair" or "poor", beside the fastest device asked about
    dtype: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One step. Counts and moved bytes are those of one forward pass, all its `calls` together."""

    index: int
    name: str
    processing: str
    group: str  # one of GROUPS
    stack: str | None
    block: str | None
    block_index: int | None
    calls: int  # how often the pass runs it; 0: a cache holds its result
    modules: tuple[str, ...]  # the layers, tables and norms of the map that it stands for
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    formula: str
    parameters: int  # those that no other row counts: 0 for a tied table
    bias_parameters: int  # the biases among them
    macs: int
    flops: int
    input_bytes: int
    weight_bytes: int  # stored, once
    weight_traffic_bytes: int  # read by the pass
    output_bytes: int
    moved_bytes: int  # input, weights read and output
    arithmetic_intensity: float  # FLOPs for each byte moved
    weight_bits: int | None  # of the widest matrix, None without one
    advice: str = ""
    fits: tuple[Fit, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one forward pass is asked to do."""

    model: ModelMap
    batch: int
    length: int
    past: int
    encoder_length: int
    activation_bytes: int
    bits: Mapping[str, int]  # by the name of a layer or a table; 32 where nothing is said

    @property
    def stacks(self) -> tuple[str | None, ...]:
        """The piles of blocks in the order in which they run."""
        stacks = {block.stack for block in self.model.blocks}
        return tuple(stack for stack in ("encoder", "decoder") if stack in stacks) or (None,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in a pass a row stands, and how many tokens it sees and has seen."""

    run: Pass
    tokens: int
    past: int
    is_cached: bool = False  # an earlier pass left the result in a cache
    stack: str | None = None
    block: Block | None = None


def matmul(at: Place, group: str, name: str, layers: Sequence[Layer], symbols: str = "B*L*in*out") -> Row:
    """Projections that read one input, as one row."""
    features_in, features_out = layers[0].in_features, sum(layer.out_features for layer in layers)
    biases = sum(layer.out_features for layer in layers if layer.has_bias)
    bits = {
        layer.name: at.run.bits.get(layer.name, at.run.bits.get(layer.tied_to or "", FULL_BITS))
        for layer in layers
    }
    sizes = {layer.name: stored_bytes(layer.num_weights, bits[layer.name]) for layer in layers}
    bias_bytes = stored_bytes(biases, FULL_BITS)
    return make_row(
        at,
        group,
        name,
        "matmul",
        (at.run.batch, at.tokens, features_out),
        formula=formula_text(symbols, at.run.batch, at.tokens, features_in, features_out),
        input_shape=(at.run.batch, at.tokens, features_in),
        calls=layers[0].calls,
        modules=tuple(layer.name for layer in layers),
        macs=at.run.batch * at.tokens * sum(layer.num_weights for layer in layers),
        parameters=sum(layer.num_new_parameters for layer in layers),
        biases=biases,
        weight_bytes=bias_bytes + sum(sizes[layer.name] for layer in layers if not layer.tied_to),
        weight_reads=bias_bytes + sum(sizes.values()),
        weight_bits=max(bits.values()),
    )


def norm_row(at: Place, norm: Norm, name: str = "", shape: tuple[int, ...] = ()) -> Row:
    """A normalisation of the last dimension."""
    shape = shape or (at.run.batch, at.tokens, norm.features)
    size = stored_bytes(norm.num_parameters, FULL_BITS)
    return make_row(
        at,
        "norms",
        name or f"norm {last_name(norm.name)}",
        "norm",
        shape,
        kind=norm.kind.value,
        calls=norm.calls,
        modules=(norm.name,),
        parameters=norm.num_parameters,
        weight_bytes=size,
        weight_reads=size,
    )


def stored_bytes(count: int, bits: int) -> int:
    """Plain bits, without the scales that a quantized format adds."""
    return -(-count * bits // 8)


def make_row(
    at: Place,
    group: str,
    name: str,
    processing: str,
    shape: tuple[int, ...],
    *,
    formula: str = "",
    kind: str = "",
    input_shape: tuple[int, ...] | None = None,
    input_elements: int | None = None,
    operands: int = 1,
    calls: int | None = None,
    modules: tuple[str, ...] = (),
    macs: int = 0,
    parameters: int = 0,
    biases: int = 0,
    weight_bytes: int = 0,
    weight_reads: int = 0,
    weight_bits: int | None = None,
) -> Row:
    """A row from what one call does; a step without MACs costs a constant for each element of its output."""
    input_shape = shape if input_shape is None else input_shape
    stored_calls = calls if calls is not None else at.block.calls if at.block else 1
    runs = 0 if at.is_cached else stored_calls
    each = 0 if macs else FLOPS_PER_ELEMENT[kind or processing] * max(1, operands - 1)
    formula = formula or formula_text(f"{each}*elements", each, *shape)
    read = (
        _size(input_shape) * operands if input_elements is None else input_elements
    ) * at.run.activation_bytes
    written = _size(shape) * at.run.activation_bytes
    flops, moved = 2 * macs + each * _size(shape), read + weight_reads + written
    return Row(
        index=0,
        name=name,
        processing=processing,
        group=group,
        stack=at.stack,
        block=at.block.name if at.block else None,
        block_index=at.block.index if at.block else None,
        calls=runs,
        modules=modules,
        input_shape=input_shape,
        output_shape=shape,
        formula=formula if stored_calls == 1 else f"{stored_calls} calls of {formula}",
        parameters=parameters,
        bias_parameters=biases,
        macs=macs * runs,
        flops=flops * runs,
        input_bytes=read * runs,
        weight_bytes=weight_bytes,
        weight_traffic_bytes=weight_reads * runs,
        output_bytes=written * runs,
        moved_bytes=moved * runs,
        arithmetic_intensity=flops / moved if moved else 0.0,
        weight_bits=weight_bits,
    )


def _size(shape: tuple[int, ...]) -> int:
    """Elements; a shape that says nothing holds none."""
    return math.prod(shape) if shape else 0


def last_name(name: str) -> str:
    """The module's own name, without its parents."""
    return name.rsplit(".", 1)[-1]


def formula_text(symbols: str, *numbers: int) -> str:
    """Symbols beside the numbers they stand for."""
    return f"{symbols} = {'*'.join(str(number) for number in numbers)}"
