"""Rows of a specification: operations, stored bytes and moved bytes of one step of the forward pass.

`make_row` turns shapes into counts for every kind of step, so FLOPs and bytes have one definition.
docs/specification.md defines every column. Machines and the order of the steps are in the other files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantkit.model.model_map import Block, Layer, ModelMap, Norm

MATRIX_PROCESSING = ("matmul", "scores", "attention x V")
GROUPS = ("embeddings", "attention", "ffn", "norms", "head", "other")
FULL_BITS = 32

# FLOPs per output element. exp, tanh, erf and a division count one each.
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
    "relu_squared": 2,
    "gelu": 5,  # divide, erf, add, two products
    "gelu_tanh": 8,  # cube (2), scale, add, scale, tanh, add, product with the halved input
    "silu": 4,  # negate, exp, add, divide
    "quick_gelu": 5,  # and the product by 1.702
    "other": 5,  # an activation without a row in this table
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Roofline time of a row on one device; bound and verdict are "-" where the row does not run there."""

    device: str
    kind: str
    time_us: float
    bound: str  # "compute", "memory" or "dispatch"
    verdict: str  # "good", "fair" or "poor", relative to the fastest device
    dtype: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One step of a forward pass. Operations and moved bytes are sums over all `calls`."""

    index: int
    name: str
    processing: str
    group: str  # one of GROUPS
    stack: str | None
    block: str | None
    block_index: int | None
    calls: int  # runs per pass; 0: the result is in a cache
    modules: tuple[str, ...]  # names of its projections, tables and norms
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    formula: str
    parameters: int  # not counted by another row: 0 for a tied table
    active_parameters: int  # of these, those that one token uses: a part of the experts
    bias_parameters: int  # part of `parameters`
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
    """Sizes of one forward pass."""

    model: ModelMap
    batch: int
    length: int
    past: int
    encoder_length: int
    activation_bytes: int
    bits: Mapping[str, int]  # weight bits of projections and tables by name; 32 by default

    @property
    def stacks(self) -> tuple[str | None, ...]:
        """Stacks of blocks in the order in which they run."""
        stacks = {block.stack for block in self.model.blocks}
        return tuple(stack for stack in ("encoder", "decoder") if stack in stacks) or (None,)

    @property
    def is_causal(self) -> bool:
        """Whether any self attention is causal, so that keys and values are cached."""
        attentions = (attention for block in self.model.blocks for attention in block.attentions)
        return any(attention.is_causal and not attention.is_cross for attention in attentions)

    def bits_of(self, *names: str) -> int:
        """Weight bits of the first of these names that has an entry."""
        return next((self.bits[name] for name in names if name in self.bits), FULL_BITS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Stack and block of a row, and the token counts it is computed with."""

    run: Pass
    tokens: int
    past: int
    is_cached: bool = False  # the result is in a cache since an earlier pass
    stack: str | None = None
    block: Block | None = None

    def shape(self, features: int) -> tuple[int, int, int]:
        """Activations of all tokens."""
        return self.run.batch, self.tokens, features


def matmul(scope: Scope, group: str, name: str, layers: Sequence[Layer], symbols: str = "B*L*in*out") -> Row:
    """One row for all projections of one input."""
    features_in, features_out = layers[0].in_features, sum(layer.out_features for layer in layers)
    biases = sum(layer.out_features for layer in layers if layer.has_bias)
    bias_bytes = stored_bytes(biases, FULL_BITS)
    bits = [scope.run.bits_of(layer.name, layer.tied_to or "") for layer in layers]
    sizes = [stored_bytes(layer.num_weights, width) for layer, width in zip(layers, bits, strict=True)]
    stored = sum(size for layer, size in zip(layers, sizes, strict=True) if not layer.tied_to)
    return make_row(
        scope,
        group,
        name,
        "matmul",
        scope.shape(features_out),
        formula=formula_text(symbols, scope.run.batch, scope.tokens, features_in, features_out),
        input_shape=scope.shape(features_in),
        calls=layers[0].calls,
        modules=tuple(layer.name for layer in layers),
        macs=scope.run.batch * scope.tokens * sum(layer.num_weights for layer in layers),
        parameters=sum(layer.num_new_parameters for layer in layers),
        biases=biases,
        weight_bytes=bias_bytes + stored,
        weight_reads=bias_bytes + sum(sizes),
        weight_bits=max(bits),
    )


def experts_row(
    scope: Scope,
    name: str,
    modules: tuple[str, ...],
    *,
    in_features: int,
    out_features: int,
    biases: int = 0,
) -> Row:
    """One row for the same matrix of all experts, of which some run for each token."""
    model, tokens = scope.run.model, scope.run.batch * scope.tokens
    stored = model.num_experts or 1
    active = model.num_active_experts or stored
    weights, bits = in_features * out_features, scope.run.bits_of(*modules)
    size = stored_bytes(stored * weights, bits) + stored_bytes(stored * biases, FULL_BITS)
    formula = formula_text(
        "B*L*active*in*out", scope.run.batch, scope.tokens, active, in_features, out_features
    )
    return make_row(
        scope,
        "ffn",
        f"experts {name}",
        "matmul",
        scope.shape(active * out_features),
        formula=f"{formula}, {active} of {stored} experts",
        input_shape=scope.shape(in_features),
        modules=modules,
        macs=tokens * active * weights,
        parameters=stored * (weights + biases),
        active_parameters=active * (weights + biases),
        biases=stored * biases,
        weight_bytes=size,
        weight_reads=size * min(stored, tokens * active) // stored,
        weight_bits=bits,
    )


def norm_row(scope: Scope, norm: Norm, name: str = "", shape: tuple[int, ...] = ()) -> Row:
    return make_row(
        scope,
        "norms",
        name or f"norm {last_name(norm.name)}",
        "norm",
        shape or scope.shape(norm.features),
        kind=norm.kind.value,
        calls=norm.calls,
        modules=(norm.name,),
        parameters=norm.num_parameters,
    )


def stored_bytes(count: int, bits: int) -> int:
    """Bytes of plain bits, without the scales of a quantized format."""
    return -(-count * bits // 8)


def make_row(
    scope: Scope,
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
    active_parameters: int | None = None,
    biases: int = 0,
    weight_bytes: int | None = None,
    weight_reads: int | None = None,
    weight_bits: int | None = None,
) -> Row:
    """A row from the sizes of one call.

    A step without MACs costs a constant per output element. Parameters are stored and read in full precision
    unless their bytes are given.
    """
    block = scope.block
    input_shape = shape if input_shape is None else input_shape
    stored_calls = calls if calls is not None else block.calls if block else 1
    runs = 0 if scope.is_cached else stored_calls
    per_element = 0 if macs else FLOPS_PER_ELEMENT[kind or processing] * max(1, operands - 1)
    formula = formula or formula_text(f"{per_element}*elements", per_element, *shape)
    num_inputs = _num_elements(input_shape) * operands if input_elements is None else input_elements
    num_outputs = _num_elements(shape)
    flops = 2 * macs + per_element * num_outputs
    read, written = (count * scope.run.activation_bytes for count in (num_inputs, num_outputs))
    stored = stored_bytes(parameters, FULL_BITS) if weight_bytes is None else weight_bytes
    weights_read = stored if weight_reads is None else weight_reads
    moved = read + weights_read + written
    return Row(
        index=0,
        name=name,
        processing=processing,
        group=group,
        stack=scope.stack,
        block=block.name if block else None,
        block_index=block.index if block else None,
        calls=runs,
        modules=modules,
        input_shape=input_shape,
        output_shape=shape,
        formula=formula if stored_calls == 1 else f"{stored_calls} calls of {formula}",
        parameters=parameters,
        active_parameters=parameters if active_parameters is None else active_parameters,
        bias_parameters=biases,
        macs=macs * runs,
        flops=flops * runs,
        input_bytes=read * runs,
        weight_bytes=stored,
        weight_traffic_bytes=weights_read * runs,
        output_bytes=written * runs,
        moved_bytes=moved * runs,
        arithmetic_intensity=flops / moved if moved else 0.0,
        weight_bits=weight_bits,
    )


def _num_elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape) if shape else 0


def last_name(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def formula_text(symbols: str, *numbers: int) -> str:
    return f"{symbols} = {'*'.join(str(number) for number in numbers)}"
