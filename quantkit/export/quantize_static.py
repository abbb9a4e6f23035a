"""A static float graph into one of integers: every value between two operators has a grid from calibration.

A value is rounded behind the operator that makes it and given back in front of those that read it, which NPU
compilers take for integers throughout (QDQ). What only moves numbers keeps the grid of what it moves.

Products with weights may have 8 bits on both sides while the rest has 16: these products are where the time
goes, and the sums of residuals and the scores of attention are where 8 bits hurt. An operator with one width
in front and another behind it does not compile for every NPU, so values are converted between two operators.
Keys and values leave and enter as codes, so that the host moves bytes without knowing their grid.

Weights have one scale for each output channel, biases 32 bits on the grid of their products' sums. Static
ranges and 16-bit activations beside 8-bit weights: https://arxiv.org/abs/2106.08295.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError

MOVES = ("Reshape", "Transpose", "Split", "Concat", "Gather")
PRODUCTS = ("Gemm", "MatMul")
NORMS = ("LayerNormalization", "RMSNormalization")
TYPES = {8: TensorProto.UINT8, 16: TensorProto.UINT16}
SOFTMAX_REACH = 16.0  # e^-16 beside a peak is less than a step of 16 bits
LARGEST_BIAS = float(1 << 30)
LARGEST_CODE = (1 << 31) - 1
# What calibration sees of a value, or of the largest of each of its rows. A sum is no number where anything
# in it is none; the others overlook that.
REDUCTIONS = {
    "low": ("ReduceMin", ""),
    "high": ("ReduceMax", "/peaks"),
    "peak": ("ReduceMin", "/peaks"),
    "sum": ("ReduceSum", ""),
}
SMALLEST_STEP = 1e-9  # of a value that is zero throughout
Ranges = Mapping[str, tuple[float, float, float]]  # lowest, highest, least peak of a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Bits:
    """Widths of activations."""

    values: int = 16
    products: int = 16  # of what goes into and comes out of products with weights, the head's excepted


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueGrid:
    """A grid of one scale with a zero point; codes are unsigned."""

    scale: float
    zero: int
    bits: int

    @classmethod
    def over(cls, low: float, high: float, bits: int) -> ValueGrid:
        """The grid whose codes just reach from low to high; zero is always among its values."""
        low, high, steps = min(low, 0.0), max(high, 0.0), (1 << bits) - 1
        scale = float(np.float32(max((high - low) / steps, SMALLEST_STEP)))
        return cls(scale=scale, zero=int(np.clip(round(-low / scale), 0, steps)), bits=bits)

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


def showing_ranges(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """(the graph with what every computed value reaches as outputs, their names): what calibration runs.

    It gives four numbers a value, and not the value: all of those together are many times the weights.
    """
    opened, names = showing_values(model)
    axis = numpy_helper.from_array(np.array([-1]), "ranges/last_axis")
    opened.graph.initializer.append(axis)
    for name in names:
        peaks = f"{name}/peaks"
        opened.graph.node.append(helper.make_node("ReduceMax", [name, axis.name], [peaks], peaks, keepdims=0))
        for kind, (operator, source) in REDUCTIONS.items():
            made = f"{name}/{kind}"
            opened.graph.node.append(helper.make_node(operator, [name + source], [made], made, keepdims=0))
    del opened.graph.output[:]
    opened.graph.output.extend(
        helper.make_empty_tensor_value_info(f"{name}/{kind}") for name in names for kind in REDUCTIONS
    )
    return opened, names


def showing_values(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """(the graph with every computed value as an output, their names)."""
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    constants = {tensor.name for tensor in opened.graph.initializer}
    names = tuple(
        name for node in opened.graph.node if node.input[0] not in constants or node.op_type == "Gather"
        for name in node.output if name
    )  # fmt: skip
    del opened.graph.output[:]
    opened.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    return opened, names


def quantize_static(
    model: onnx.ModelProto, ranges: Ranges, bits: Bits, *, kept_in: Path | None = None
) -> onnx.ModelProto:
    """The graph in QDQ form. `ranges` may be those of another graph of the same model.

    `kept_in` is the folder of the tensors that lie outside of the graph.
    """
    work = _Quantizer(model=model, ranges=ranges, bits=bits, kept_in=kept_in)
    return work.run()


@dataclass(kw_only=True, slots=True)
class _Quantizer:
    model: onnx.ModelProto
    ranges: Ranges
    bits: Bits
    kept_in: Path | None
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=lambda: defaultdict(list))
    grids: dict[str, ValueGrid] = field(default_factory=dict)  # of values
    narrowed: set[str] = field(default_factory=set)  # products of another width than the rest
    weight_scales: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # by dequantized name
    given: dict[str, str] = field(default_factory=dict)  # value -> what its readers read
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    made: dict[str, onnx.TensorProto] = field(default_factory=dict)  # initializers of the new graph

    def run(self) -> onnx.ModelProto:
        graph = self.model.graph
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            for name in node.input:
                self.readers[name].append(node)
        if self.bits.products != self.bits.values:
            weights = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
            weights |= set(self.constants)
            products = [node for node in graph.node if node.op_type in PRODUCTS and node.input[1] in weights]
            heads = [node for node in products if _is_transposed(node)] or products[-1:]
            self.narrowed = {node.name for node in products} - {node.name for node in heads}
        inputs = [self.input(info) for info in graph.input]
        outputs = {info.name for info in graph.output}
        for node in graph.node:
            if node.op_type == "DequantizeLinear":
                self.keep(node)
            else:
                self.node(node, outputs)
        changed = helper.make_graph(
            self.nodes, graph.name, inputs, [self.output(i) for i in graph.output], list(self.made.values())
        )
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        model.graph.CopyFrom(changed)
        return model

    def input(self, info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
        if info.type.tensor_type.elem_type != TensorProto.FLOAT:
            return info
        # The same grid as that of the new keys or values, which leave the other graph too.
        made = self.origin(info.name.replace("past_key_values", "present"))
        grid = self.grids[info.name] = self.over(made)
        self.dequantize(info.name, info.name, grid)
        return _typed(info, TYPES[grid.bits])

    def origin(self, name: str) -> str:
        """The value that is merely moved to become this one."""
        node = next(node for node in self.model.graph.node if name in node.output)
        return self.origin(node.input[0]) if node.op_type in MOVES else name

    def output(self, info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
        return _typed(info, TYPES[self.grids[info.name].bits]) if info.name.startswith("present.") else info

    def keep(self, node: onnx.NodeProto) -> None:
        """A weight that is on its grid already."""
        self.nodes.append(node)
        self.made |= {name: self.constants[name] for name in node.input}
        self.weight_scales[node.output[0]] = numpy_helper.to_array(self.constants[node.input[1]])

    def node(self, node: onnx.NodeProto, outputs: set[str]) -> None:
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        narrow = node.name in self.narrowed
        if node.op_type == "Gather" and node.input[0] in self.weight_scales:
            self.gather(changed)
            return
        for place, name in enumerate(node.input):
            if name in self.constants:
                changed.input[place] = self.constant(node, place)
            else:
                changed.input[place] = self.convert(name) if narrow and place == 0 else self.read(name)
        for place, name in enumerate(node.output):
            changed.output[place] = f"{name}/float" if name in outputs else name
        self.nodes.append(changed)
        for name, made in zip(node.output, changed.output, strict=True):
            grid = self.grids[name] = self.grid_of(node, name)
            value = self.round(f"{name}/narrow", made, self.narrow(name)) if narrow else made
            codes = name if name.startswith("present.") else f"{name}/codes"
            grid_names = self.grid_constants(name, grid)
            self.nodes.append(
                helper.make_node("QuantizeLinear", [value, *grid_names], [codes], f"{name}/round")
            )
            leaves = name in outputs and not name.startswith("present.")
            self.dequantize(name, codes, grid, given=name if leaves else "")

    def gather(self, node: onnx.NodeProto) -> None:
        """Rows of a table that is on its grid already: found in its own width, then as wide as all others."""
        name = node.output[0]
        scale = float(self.weight_scales[node.input[0]])
        back = next(each for each in self.nodes if node.input[0] in each.output)
        node.output[0], codes, narrow = f"{name}/float", f"{name}/stored", f"{name}/stored/given"
        self.nodes.append(node)
        grid_names = back.input[1:]
        self.nodes.append(helper.make_node("QuantizeLinear", [node.output[0], *grid_names], [codes], codes))
        self.nodes.append(helper.make_node("DequantizeLinear", [codes, *grid_names], [narrow], narrow))
        self.grids[name] = ValueGrid.over(-128 * scale, 127 * scale, self.bits.values)
        self.round(name, narrow, self.grids[name])

    def read(self, name: str) -> str:
        return self.given.get(name, name)  # ids and masks are read as they are

    def convert(self, name: str) -> str:
        """The value in the width of products, made once for all that read it so."""
        label = f"{name}/narrowed"
        if label not in self.given:
            self.round(label, self.read(name), self.narrow(name))
        return self.given[label]

    def round(self, label: str, value: str, grid: ValueGrid) -> str:
        inputs = [value, *self.grid_constants(label, grid)]
        self.nodes.append(helper.make_node("QuantizeLinear", inputs, [f"{label}/codes"], f"{label}/round"))
        self.dequantize(label, f"{label}/codes", grid)
        return self.given[label]

    def dequantize(self, name: str, codes: str, grid: ValueGrid, given: str = "") -> None:
        self.given[name] = given or f"{name}/given"
        names = self.grid_constants(name, grid)
        node = helper.make_node("DequantizeLinear", [codes, *names], [self.given[name]], f"{name}/back")
        self.nodes.append(node)

    def grid_of(self, node: onnx.NodeProto, name: str) -> ValueGrid:
        """The grid of one output."""
        kind, width = node.op_type, self.bits.values
        if kind in MOVES:
            source = node.input[0]
            return self.grids[source] if source in self.grids else self.constant_grid(source)
        if kind == "Sigmoid":
            return ValueGrid(scale=2.0**-width, zero=0, bits=width)
        if kind == "Tanh":
            return ValueGrid(scale=2.0 ** (1 - width), zero=1 << (width - 1), bits=width)
        if kind == "Softmax":
            return ValueGrid.over(0, 1, width)
        return self.over(name)

    def over(self, name: str) -> ValueGrid:
        low, high, peak = self.ranges[name]
        if any(node.op_type == "Softmax" for node in self.readers[name]):
            low = max(low, peak - SOFTMAX_REACH)  # what lies below is cut off there, hidden scores too
        return ValueGrid.over(low, high, self.bits.values)

    def narrow(self, name: str) -> ValueGrid:
        """The grid of a value inside of products."""
        return self.grids[name].with_bits(self.bits.products)

    # Constants

    def constant(self, node: onnx.NodeProto, place: int) -> str:
        name: str = node.input[place]
        tensor = self.constants[name]
        if tensor.data_type != TensorProto.FLOAT:  # shapes and widths
            self.made[name] = tensor
            return name
        values = numpy_helper.to_array(tensor)
        if node.op_type in PRODUCTS and place == 1:
            return self.weight(name, values, node)
        if node.op_type in PRODUCTS and place == 2:
            return self.bias(name, values, node)
        width = None
        if node.op_type in NORMS:
            width = self.grids[node.input[0]].bits
        grid = self.constant_grid(name, width)
        return self.stored(f"{name}/{grid.bits}", grid.codes(values), grid)

    def constant_grid(self, name: str, width: int | None = None) -> ValueGrid:
        values = numpy_helper.to_array(self.constants[name])
        return ValueGrid.over(float(values.min()), float(values.max()), width or self.bits.values)

    def stored(self, name: str, codes: NDArray[Any], grid: ValueGrid) -> str:
        if name not in self.given:
            self.put(f"{name}/codes", codes)
            self.dequantize(name, f"{name}/codes", grid)
        return self.given[name]

    def weight(self, name: str, weight_IO: NDArray[np.float32], node: onnx.NodeProto) -> str:
        """Eight bits, one scale for each output; large enough for the bias to have a code."""
        given = f"{name}/given"
        if given in self.weight_scales:
            return given
        scales = np.abs(weight_IO).max(axis=0) / np.float32(127)
        if len(node.input) > 2:
            bias = np.abs(numpy_helper.to_array(self.constants[node.input[2]]))
            scales = np.maximum(scales, bias / np.float32(self.input_scale(node) * LARGEST_BIAS))
        scales = np.where(scales > 0, scales, np.float32(1)).astype(np.float32)
        names = [f"{name}/codes", f"{name}/scales", f"{name}/zeros"]
        self.put(names[0], np.clip(np.rint(weight_IO / scales), -127, 127).astype(np.int8))
        self.put(names[1], scales)
        self.put(names[2], np.zeros(scales.shape, np.int8))
        self.nodes.append(helper.make_node("DequantizeLinear", names, [given], f"{name}/back", axis=1))
        self.weight_scales[given] = scales
        return given

    def input_scale(self, node: onnx.NodeProto) -> float:
        name = node.input[0]
        return (self.narrow(name) if node.name in self.narrowed else self.grids[name]).scale

    def bias(self, name: str, values: NDArray[np.float32], node: onnx.NodeProto) -> str:
        weight = node.input[1] if node.input[1] in self.weight_scales else f"{node.input[1]}/given"
        scales = self.weight_scales[weight] * np.float32(self.input_scale(node))
        if (np.abs(values.astype(np.float64)) > scales.astype(np.float64) * LARGEST_CODE).any():
            scales = self.coarser(node, values) * np.float32(self.input_scale(node))
        codes = np.clip(np.rint(values.astype(np.float64) / scales), -LARGEST_CODE, LARGEST_CODE)
        name = f"{node.name}/{name}"  # a layer that is called again reads its input on another grid
        names = [f"{name}/codes", f"{name}/scales", f"{name}/zeros"]
        self.put(names[0], codes.astype(np.int32))
        self.put(names[1], scales.astype(np.float32))
        self.put(names[2], np.zeros(scales.shape, np.int32))
        given = f"{name}/given"
        self.nodes.append(helper.make_node("DequantizeLinear", names, [given], f"{name}/back", axis=0))
        return given

    def coarser(self, node: onnx.NodeProto, bias_O: NDArray[np.float32]) -> NDArray[np.float32]:
        """New scales of stored weights, so that biases have codes where outputs hardly depend on inputs."""
        weight = node.input[1]
        back = next(each for each in self.nodes if weight in each.output)
        if len(self.readers[weight]) > 1 or back.op_type != "DequantizeLinear":
            raise InputError(
                "a bias is too large beside weights that several products share",
                where=node.name,
                next_step="--scheme int8_static8, or --exclude the layer",
            )
        old = self.weight_scales[weight]
        least = np.abs(bias_O.astype(np.float64)) / (self.input_scale(node) * LARGEST_BIAS)
        new = np.maximum(old, least).astype(np.float32)
        codes_IO = numpy_helper.to_array(self.made[back.input[0]], base_dir=str(self.kept_in or ""))
        codes_IO = np.rint(codes_IO * (old.astype(np.float64) / new)).astype(np.int8)
        self.put(back.input[0], codes_IO)
        self.put(back.input[1], new)
        self.weight_scales[weight] = new
        return new

    def grid_constants(self, name: str, grid: ValueGrid) -> list[str]:
        self.put(f"{name}/scale", np.array(grid.scale, np.float32))
        self.put(f"{name}/zero", np.array(grid.zero, f"u{grid.bits // 8}"))
        return [f"{name}/scale", f"{name}/zero"]

    def put(self, name: str, values: NDArray[Any]) -> None:
        self.made[name] = numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)


def _is_transposed(node: onnx.NodeProto) -> bool:
    """Whether the product reads [out, in], as only those of heads in halves do."""
    return any(each.name == "transB" and each.i for each in node.attribute)


def _typed(info: onnx.ValueInfoProto, element_type: int) -> onnx.ValueInfoProto:
    changed = onnx.ValueInfoProto()
    changed.CopyFrom(info)
    changed.type.tensor_type.elem_type = element_type
    return changed
