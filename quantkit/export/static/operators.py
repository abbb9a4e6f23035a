"""The static dialect: standard operators of fixed shapes, as NPU compilers want them.

Each step is a form that NPU compilers take for one operation of theirs: a product of two dimensions with its
bias, heads side by side in four, an activation with an operator of its own. Batch is 1, and a value between
blocks is [tokens, features]. Every node has a name, so that ranges that calibration finds in one graph of a
model hold in its other graphs.

A mask is added to the scores of attention: 0 for visible places, HIDDEN for hidden ones. Its values are named
`mask/...`, and `quantize_static` replaces HIDDEN by a number that fits the ranges of the scores.

NPUs multiply with one scale for each output channel. Weights that a checkpoint holds on that grid stay code
by code; other grids and float weights become floats here, and `quantize_static` rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quantkit.export.graph import Graph
from quantkit.export.rotary import Rotation, cosines_and_sines, partners, rotation_of
from quantkit.export.walk import Stream, norm_at
from quantkit.model.model_map import (
    Activation,
    Attention,
    Block,
    ModelMap,
    Norm,
    NormKind,
    NormPlace,
    PositionKind,
)
from quantkit.model.position_bias import bucket_of
from quantkit.quantization.layout import HALVES, Checkpoint, Contents, Pack, TableEntry

Floats = NDArray[np.float32]
EMBEDDING = "embedding"
MASK = "mask/"
HIDDEN = -3e4  # twice, for padding that comes later too, it is still a number of 16 bits
ACTIVATIONS: dict[Activation, tuple[str, dict[str, Any]]] = {
    Activation.RELU: ("Relu", {}),
    Activation.RELU_SQUARED: ("Relu", {}),
    Activation.GELU: ("Gelu", {}),
    Activation.GELU_TANH: ("Gelu", {"approximate": "tanh"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShape:
    """The fixed sizes of a graph."""

    tokens: int  # read at once
    past: int = 0  # places of the cache in front of them
    gives_all_logits: bool = True  # False: logits of the one token that the input `logit_position` names

    @property
    def total(self) -> int:
        """Places that a token can attend to."""
        return self.past + self.tokens


@dataclass(kw_only=True, slots=True)
class StaticOperators:
    """What decoders and encoders share, attention included."""

    graph: Graph
    model_map: ModelMap
    contents: Contents
    shape: StaticShape
    spells_norms: bool = False  # RMS norms in operators that are older than RMSNormalization
    shown: str = ""  # [1, 1, 1, total]: 0 for the places that the mask shows, HIDDEN for others
    positions: str = ""  # input with the tokens' positions; empty where they are 0, 1, 2, ...
    rotations: dict[Rotation, list[str]] = field(default_factory=dict)  # cosines and signed sines

    def read_mask(self) -> None:
        graph, total = self.graph, self.shape.total
        mask = graph.input("attention_mask", TensorProto.INT32, [1, total])
        if self.shape.past:
            self.positions = graph.input("position_ids", TensorProto.INT32, [1, self.shape.tokens])
        values = self.constant(f"{MASK}hidden_shown", [HIDDEN, 0])
        values = graph.op("Gather", values, mask, name=f"{MASK}values", axis=0)
        self.shown = self.reshape(f"{MASK}row", values, 1, 1, 1, total)

    def label(self, name: str) -> str:
        return name

    def ffn_label(self, block: Block) -> str:
        return f"{block.name}/ffn"

    def reshape(self, name: str, x: str, *sizes: int) -> str:
        return self.graph.op("Reshape", x, self.graph.integers(*sizes), name=name)

    def constant(self, name: str, values: Any) -> str:
        """A constant of floats, which gets a grid like any other value."""
        return self.graph.constant(name, np.asarray(values, np.float32))

    def project(self, pack: Pack, x: str) -> str:
        """x W^T + b for rows x [tokens, in]."""
        graph, name = self.graph, pack.name
        graph.integer_nodes[name] = [layer.name for layer in pack.layers]  # once it is quantized
        if pack.input_factors:
            x = graph.op("Mul", x, graph.weight(f"{name}.input_factors"), name=f"{name}/smoothed")
        if pack.grid is not None and pack.grid.in_halves:
            return self.project_in_halves(pack, x)
        weight = weight_IO(graph, pack, self.contents)
        if pack.has_bias:
            return graph.op("Gemm", x, weight, graph.weight(f"{name}.bias"), name=name)
        return graph.op("MatMul", x, weight, name=name)

    def project_in_halves(self, pack: Pack, x: str) -> str:
        """Weights of 16 bits: no operator has them, and two products of 8 bits add up to theirs."""
        graph, name = self.graph, pack.name
        parts = [
            graph.op("Gemm", x, half, name=label, transB=1)
            for label, half in zip((name, f"{name}/low"), halves_OI(graph, name), strict=True)
        ]
        total = graph.op("Add", *parts, name=f"{name}/whole")
        if not pack.has_bias:
            return total
        return graph.op("Add", total, graph.weight(f"{name}.bias"), name=f"{name}/biased")

    def norm(self, norm: Norm, x: str) -> str:
        inputs = [x, self.graph.weight(f"{norm.name}.weight")]
        if norm.name in self.contents.norm_biases:
            inputs.append(self.graph.weight(f"{norm.name}.bias"))
        elif norm.kind is NormKind.LAYER_NORM:  # Qualcomm's provider takes none without a bias
            inputs.append(self.constant(f"{norm.name}/no_bias", np.zeros(norm.features, np.float32)))
        if norm.kind is NormKind.RMS_NORM and self.spells_norms:
            return self.spelled_norm(norm, *inputs)
        kind = "LayerNormalization" if norm.kind is NormKind.LAYER_NORM else "RMSNormalization"
        return self.graph.op(kind, *inputs, name=norm.name, axis=-1, epsilon=norm.epsilon)

    def spelled_norm(self, norm: Norm, x: str, gain: str) -> str:
        graph, name = self.graph, norm.name
        squares = graph.op("Mul", x, x, name=f"{name}/squares")
        mean = graph.op("ReduceMean", squares, graph.integers(-1), name=f"{name}/mean", keepdims=1)
        epsilon = self.constant(f"{name}/epsilon", norm.epsilon)
        root = graph.op("Sqrt", graph.op("Add", mean, epsilon, name=f"{name}/safe"))
        return graph.op("Mul", graph.op("Div", x, root, name=f"{name}/unit"), gain, name=name)

    def add(self, stream: Stream, branch: str, name: str) -> Stream:
        return Stream(self.graph.op("Add", stream.value, branch, name=name))

    def norm_stream(self, norm: Norm, stream: Stream, *, keeps_sum: bool = True) -> tuple[str, Stream]:
        return self.norm(norm, stream.value), stream

    def activation(self, kind: Activation, x: str, name: str) -> str:
        if kind is Activation.SILU:
            gate = self.graph.op("Sigmoid", x, name=f"{name}/sigmoid")
            return self.graph.op("Mul", x, gate, name=f"{name}/silu")
        op_type, attributes = ACTIVATIONS[kind]
        y = self.graph.op(op_type, x, name=f"{name}/activation", **attributes)
        return self.graph.op("Mul", y, y, name=f"{name}/square") if kind is Activation.RELU_SQUARED else y

    def scale(self, x: str, factor: float, name: str) -> str:
        return self.graph.op("Mul", x, self.constant(f"{name}/factor", factor), name=name)

    def keep_latents(self, block: Block, hidden: str) -> None:
        pass  # the recipe of a static target refuses --keep-latent

    def drops_rows_within(self, block: Block) -> bool:
        return False

    def rows_with_logits(self, x: str) -> str:
        """The token that `logit_position` names, or all."""
        if self.shape.gives_all_logits or self.shape.tokens == 1:
            return x
        place = self.graph.input("logit_position", TensorProto.INT32, [1])
        return self.graph.op("Gather", x, place, name="last", axis=0)

    def softcap(self, x: str, cap: float, name: str) -> str:
        inverse, limit = self.constant(f"{name}/inverse", 1 / cap), self.constant(f"{name}/cap", cap)
        small = self.graph.op("Mul", x, inverse, name=f"{name}/small")
        bent = self.graph.op("Tanh", small, name=f"{name}/bent")
        return self.graph.op("Mul", bent, limit, name=f"{name}/large")

    # Attention

    def query_key_value(self, attention: Attention, pack: Pack, x: str) -> list[str]:
        kv_width = attention.num_kv_heads * attention.head_dim
        widths = self.graph.integers(attention.num_heads * attention.head_dim, kv_width, kv_width)
        packed = self.project(pack, x)
        return self.graph.ops("Split", packed, widths, name=f"{pack.name}/parts", wanted=(True,) * 3, axis=-1)

    def attention(self, block: Block, parts: Sequence[str]) -> str:
        graph, tokens, name = self.graph, self.shape.tokens, f"{block.name}/attention"
        facts = block.attentions[0]
        kv_heads, group, size = facts.num_kv_heads, facts.num_heads // facts.num_kv_heads, facts.head_dim
        for_query, for_key = (
            norm_at(self.contents, block, place) for place in (NormPlace.QUERY, NormPlace.KEY)
        )
        is_of_heads = for_query is not None and for_query.features == size
        whole = [norm if norm and not is_of_heads else None for norm in (for_query, for_key)]
        query, key = (self.norm(norm, x) if norm else x for norm, x in zip(whole, parts, strict=False))
        query = self.heads(f"{name}/query", query, facts.num_heads, size)
        key = self.heads(f"{name}/key", key, kv_heads, size)
        value = self.heads(f"{name}/value", parts[2], kv_heads, size)
        query = self.norm(for_query, query) if for_query and is_of_heads else query
        key = self.norm(for_key, key) if for_key and is_of_heads else key
        if facts.position is PositionKind.ROPE:
            query, key = self.rotate(f"{name}/query", facts, query), self.rotate(f"{name}/key", facts, key)
        scale = self.constant(f"{name}/scale", facts.scale if facts.scale is not None else size**-0.5)
        query = graph.op("Mul", query, scale, name=f"{name}/query/scaled")
        if group > 1:  # the queries that share a key stand below each other
            query = self.reshape(f"{name}/query/groups", query, 1, kv_heads, group * tokens, size)
        if facts.is_causal:
            key, value = self.joined(block, "key", key), self.joined(block, "value", value)
        turned = graph.op("Transpose", key, name=f"{name}/keys/turned", perm=[0, 1, 3, 2])
        scores = graph.op("MatMul", query, turned, name=f"{name}/scores")
        if facts.softcap:
            scores = self.softcap(scores, facts.softcap, f"{name}/softcap")
        if self.model_map.position_biases:
            scores = graph.op("Add", scores, self.position_bias(), name=f"{name}/biased")
        mask = self.causal_mask(group) if facts.is_causal and tokens > 1 else self.shown
        if facts.window and not facts.is_causal and facts.window < tokens:
            mask = self.window_mask(facts.window)
        masked = graph.op("Add", scores, mask, name=f"{name}/masked")
        weights = graph.op("Softmax", masked, name=f"{name}/softmax", axis=-1)
        attended = graph.op("MatMul", weights, value, name=f"{name}/given")
        if group > 1:
            attended = self.reshape(f"{name}/given/heads", attended, 1, facts.num_heads, tokens, size)
        attended = graph.op("Transpose", attended, name=f"{name}/given/turned", perm=[0, 2, 1, 3])
        return self.reshape(f"{name}/given/rows", attended, tokens, facts.num_heads * size)

    def heads(self, name: str, x: str, count: int, size: int) -> str:
        """Rows [tokens, count x size] as [1, count, tokens, size]."""
        apart = self.reshape(f"{name}/apart", x, 1, self.shape.tokens, count, size)
        return self.graph.op("Transpose", apart, name=f"{name}/heads", perm=[0, 2, 1, 3])

    def rotate(self, name: str, attention: Attention, x: str) -> str:
        """x cos + (x with its halves swapped) sin, the sign of the swap being in the table of sines."""
        graph, total = self.graph, self.shape.total
        assert attention.rotary_dim is not None
        sizes = (1, 1, self.shape.tokens, attention.head_dim)
        half, rest = attention.rotary_dim // 2, attention.head_dim - attention.rotary_dim
        key = rotation_of(attention)
        if key not in self.rotations:
            cos, sin = cosines_and_sines(attention, total)
            still = np.zeros((total, rest), np.float32)
            label = f"rope_{len(self.rotations)}"
            tables = {"cos": [cos, cos, still + 1], "sin": [-sin, sin, still]}
            if attention.rope_interleaved:
                apart = np.stack([-sin, sin], axis=2).reshape(total, -1)
                tables = {"cos": [np.repeat(cos, 2, axis=1), still + 1], "sin": [apart, still]}
            self.rotations[key] = [
                self.at_positions(f"{label}/{kind}", np.concatenate(parts, axis=1), *sizes)
                for kind, parts in tables.items()
            ]
        cosines, sines = self.rotations[key]
        widths = [half, half, rest] if rest else [half, half]
        if attention.rope_interleaved:
            order = (*partners(2 * half, is_interleaved=True), *range(2 * half, attention.head_dim))
            swapped = graph.op("Gather", x, graph.integers(*order), name=f"{name}/swapped", axis=-1)
        else:
            parts = graph.ops(
                "Split", x, graph.integers(*widths),
                name=f"{name}/halves", wanted=(True,) * len(widths), axis=-1,
            )  # fmt: skip
            swapped = graph.op("Concat", parts[1], parts[0], *parts[2:], name=f"{name}/swapped", axis=-1)
        straight = graph.op("Mul", x, cosines, name=f"{name}/straight")
        across = graph.op("Mul", swapped, sines, name=f"{name}/across")
        return graph.op("Add", straight, across, name=f"{name}/rotated")

    def joined(self, block: Block, kind: str, new: str) -> str:
        """Keys or values of all places; the new ones are an output of the graph."""
        graph, shape, facts = self.graph, self.shape, block.attentions[0]
        present, past = f"present.{block.index}.{kind}", f"past_key_values.{block.index}.{kind}"
        size = (facts.num_kv_heads, facts.head_dim)
        graph.output(new, present, TensorProto.FLOAT, [1, size[0], shape.tokens, size[1]])
        if not shape.past:
            return present
        graph.input(past, TensorProto.FLOAT, [1, size[0], shape.past, size[1]])
        return graph.op("Concat", past, present, name=f"{past}/joined", axis=2)

    def causal_mask(self, group: int) -> str:
        """Added to scores, [1, 1, group x tokens, total]: hides padding and later tokens."""
        shape, name = self.shape, f"{MASK}{group}"
        if name not in self.graph.labels:
            later = np.arange(shape.total)[None, :] > np.arange(shape.tokens)[:, None] + shape.past
            rows = np.tile(np.where(later, np.float32(HIDDEN), np.float32(0)), (group, 1))
            later_rows = self.constant(f"{MASK}later/{group}", rows[None, None])
            self.graph.op("Add", self.shown, later_rows, name=name)
        return f"{name}/out0"

    def window_mask(self, window: int) -> str:
        """Added to scores, [1, 1, tokens, tokens]: hides padding and tokens too far on both sides."""
        name = f"{MASK}window/{window}"
        if name not in self.graph.labels:
            far = np.abs(self.distances()) >= window
            rows = np.where(far, np.float32(HIDDEN), np.float32(0))
            self.graph.op("Add", self.shown, self.constant(f"{name}/far", rows[None, None]), name=name)
        return f"{name}/out0"

    def distances(self) -> NDArray[np.int64]:
        """From each token to each other, [tokens, tokens]."""
        places = np.arange(self.shape.tokens)
        return np.asarray(places[None, :] - places[:, None])

    def position_bias(self) -> str:
        """Added to scores, [1, heads, tokens, tokens]; a constant."""
        (bias,) = self.model_map.position_biases
        entry = next(entry for entry in self.contents.tables if entry.table.name == bias.table)
        reach, table = bias.max_distance, table_values(self.graph.checkpoint, entry)
        places = np.clip(self.distances(), -reach, reach) + reach
        values = table[bucket_of(bias)[places]].transpose(2, 0, 1)
        return self.constant("position_bias", np.ascontiguousarray(values[None]))

    # Tables

    def rows(self, name: str, table: Floats, ids: str, *sizes: int) -> str:
        """Rows of a table, reshaped."""
        found = self.graph.op("Gather", self.constant(f"{name}/table", table), ids, name=name, axis=0)
        return self.reshape(f"{name}/rows", found, *sizes)

    def at_positions(self, name: str, table: Floats, *sizes: int) -> str:
        """The rows of a table at the tokens' positions: a constant where positions are constant."""
        if self.positions:
            return self.rows(name, table, self.positions, *sizes)
        return self.constant(f"{name}/constant", table[: self.shape.tokens].reshape(sizes))

    def position_rows(self, entry: TableEntry) -> str:
        """Rows of the learned positions."""
        learned = table_values(self.graph.checkpoint, entry)[self.model_map.position_offset :]
        return self.at_positions(
            "positions", learned[: self.shape.total], self.shape.tokens, learned.shape[1]
        )

    def token_rows(self, entry: TableEntry, ids: str, scale: float | None = None) -> str:
        """Rows of the token embedding times a factor; rows of the head where the head's halves hold them."""
        graph, factor = self.graph, scale or 1.0
        sizes = (self.shape.tokens, entry.table.num_columns)
        if entry.grid is None or not entry.grid.in_halves:
            table = table_values(graph.checkpoint, entry) * np.float32(factor)
            return self.rows(EMBEDDING, table, ids, *sizes)
        assert entry.shares is not None
        halves = [
            graph.op("Gather", half, ids, name=f"{EMBEDDING}/{which}", axis=0)
            for which, half in zip(HALVES, half_rows(graph, entry.shares, EMBEDDING), strict=True)
        ]
        steps_V1 = graph.checkpoint.read(f"{entry.shares}.scales")[:, None] * np.float32(256 * factor)
        steps = self.constant(f"{EMBEDDING}/steps", steps_V1)
        steps = graph.op("Gather", steps, ids, name=f"{EMBEDDING}/step", axis=0)
        codes = graph.op("Add", *halves, name=f"{EMBEDDING}/codes")
        return self.reshape(f"{EMBEDDING}/rows", graph.op("Mul", codes, steps, name=EMBEDDING), *sizes)


def known_ranges(
    checkpoint: Checkpoint, contents: Contents, factor: float = 1.0
) -> dict[str, tuple[float, float, float]]:
    """Ranges of values that a table bounds, however few of its tokens calibration has met."""
    ranges: dict[str, tuple[float, float, float]] = {}
    for entry in contents.tables:
        if entry.grid is not None and entry.grid.in_halves:
            table = table_values(checkpoint, entry)
            low, high = float(table.min()) * factor, float(table.max()) * factor
            ranges[f"{EMBEDDING}/out0"] = (low, high, low)
    return ranges


def weight_IO(graph: Graph, pack: Pack, contents: Contents) -> str:
    """The weight of one pack: its codes behind a DequantizeLinear, or floats."""
    name, grid = pack.name, pack.grid
    if grid is not None and grid.block is None:
        scales = graph.weight(f"{name}.scales")
        zeros = graph.constant(f"{name}.zeros", np.zeros(pack.out_features, np.int8))
        # The codes are most of a model, and nothing here has to look at them: they stay where they are.
        codes = replace(graph, keeps_weights_outside=True).weight(f"{name}.codes_IO")
        return graph.op("DequantizeLinear", codes, scales, zeros, name=f"{name}/weight", axis=1)
    if grid is None and pack.table is None:
        return graph.weight(f"{name}.weight_IO")
    if grid is None:
        entry = next(entry for entry in contents.tables if entry.table.name == pack.table)
        values = table_values(graph.checkpoint, entry)
    else:
        values = graph.checkpoint.weight_OI(name, grid, pack.in_features)
    return graph.constant(f"{name}.weight_IO", np.ascontiguousarray(values.T))


def halves_OI(graph: Graph, name: str) -> list[str]:
    """High and low halves of a projection's codes, [out, in] each, dequantized so that they add up."""
    scales = graph.checkpoint.read(f"{name}.scales")
    return [
        _half(graph, name, half, label=f"{name}.{half}", scales=np.asarray(scales * np.float32(worth)))
        for half, worth in zip(HALVES, (256, 1), strict=True)
    ]


def half_rows(graph: Graph, name: str, label: str) -> list[str]:
    """High and low halves as tables of codes, in units of 256, for an embedding.

    They have names of their own: Qualcomm's compiler computes nonsense where one tensor has two grids.
    """
    return [
        _half(graph, name, half, label=f"{label}/{half}", scales=np.array(worth, np.float32))
        for half, worth in zip(HALVES, (1, 1 / 256), strict=True)
    ]


def _half(graph: Graph, name: str, half: str, *, label: str, scales: Floats) -> str:
    codes = replace(graph, keeps_weights_outside=True).weight(f"{name}.{half}", label=label)
    inputs = [codes, graph.constant(f"{label}/scales", scales)]
    inputs.append(graph.constant(f"{label}/zeros", np.zeros(scales.shape, np.int8)))
    return graph.op("DequantizeLinear", *inputs, name=f"{label}/weight", axis=0)  # where scales have one


def table_values(checkpoint: Checkpoint, entry: TableEntry) -> Floats:
    """All rows of an embedding."""
    holder = entry.shares or entry.table.name
    if entry.grid is None:
        return np.asarray(checkpoint.read(f"{holder}.weight"), np.float32)
    return checkpoint.weight_OI(holder, entry.grid, entry.table.num_columns)
