"""Static graphs in QDQ form: every value between two operators gets a grid from calibration.

A value is quantized behind the operator that makes it and dequantized in front of the operators that read
it, which NPU compilers take for integers throughout. Operators that only move numbers keep the input's grid.

The second factor of a product of two values is signed, with its zero in the middle: of an unsigned one
Qualcomm's NPUs make 8 bits. Keys and values are such factors, in the cache too.

Products with weights may have 8 bits on both sides while the rest has 16: these products are where the time
goes, and the sums of residuals and the scores of attention are where 8 bits hurt. An operator with one width
in front and another behind it does not compile for every NPU, so values are converted between two operators.
Keys and values leave and enter as codes, so that the host moves bytes without knowing their grid.

Scores of attention end at a floor, below which a place has no weight beside any peak of calibration. A hidden
score is moved to the lowest code of the masked scores, `SOFTMAX_REACH` below that floor: whatever the scores,
a hidden place never wins and its own score changes nothing.

Weights have one scale for each output channel, biases 32 bits on the grid of their products' sums. Static
ranges and 16-bit activations beside 8-bit weights: https://arxiv.org/abs/2106.08295.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError
from quantkit.export.static.operators import MASK

Ranges = Mapping[str, tuple[float, float, float]]  # lowest, highest, least peak of a row
TYPES = {(8, False): TensorProto.UINT8, (16, False): TensorProto.UINT16, (16, True): TensorProto.INT16}
SMALLEST_STEP = 1e-9  # of a value that is always zero
MOVES = ("Reshape", "Transpose", "Split", "Concat", "Gather")
PRODUCTS = ("Gemm", "MatMul")
NORMS = ("LayerNormalization", "RMSNormalization")
SOFTMAX_REACH = 16.0  # e^-16 beside a peak is less than a step of 16 bits
LARGEST_BIAS = float(1 << 30)
LARGEST_CODE = (1 << 31) - 1


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
        """The numpy type of a code."""
        return f"{'i' if self.is_signed else 'u'}{self.bits // 8}"

    def signed(self) -> ValueGrid:
        """The grid of the same reach with its zero in the middle."""
        if self.is_signed:
            return self
        largest = (1 << (self.bits - 1)) - 1
        reach = self.scale * max(self.zero, (1 << self.bits) - 1 - self.zero)
        return replace(self, scale=float(np.float32(reach / largest)), zero=0, is_signed=True)

    def with_bits(self, bits: int) -> ValueGrid:
        """The grid of the same range with another number of bits."""
        if bits == self.bits:
            return self
        low, steps = -self.zero * self.scale, (1 << self.bits) - 1
        return ValueGrid.over(low, low + steps * self.scale, bits)

    def codes(self, values: NDArray[np.float32]) -> NDArray[Any]:
        codes = np.rint(values.astype(np.float64) / self.scale) + self.zero
        return np.asarray(np.clip(codes, 0, (1 << self.bits) - 1), f"u{self.bits // 8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bits:
    """Widths of activations."""

    values: int = 16
    products: int = 16  # of what goes into and comes out of products with weights, the head's excepted


def quantize_static(
    model: onnx.ModelProto, ranges: Ranges, bits: Bits, *, kept_in: Path | None = None
) -> onnx.ModelProto:
    """The graph in QDQ form. `ranges` may come from another graph of the same model.

    `kept_in` is the folder of the tensors that lie outside of the graph.
    """
    return _Quantizer(model=model, ranges=ranges, bits=bits, kept_in=kept_in).run()


@dataclass(kw_only=True, slots=True)
class _Quantizer:
    model: onnx.ModelProto
    ranges: Ranges
    bits: Bits
    kept_in: Path | None
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=lambda: defaultdict(list))
    grids: dict[str, ValueGrid] = field(default_factory=dict)  # of values
    score_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)  # of attention
    hidden: float = 0.0  # added to a hidden score
    narrowed: set[str] = field(default_factory=set)  # products of another width than the rest
    weight_scales: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # by dequantized name
    dequantized: dict[str, str] = field(default_factory=dict)  # value -> the name that its readers read
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, onnx.TensorProto] = field(default_factory=dict)  # of the new graph

    def run(self) -> onnx.ModelProto:
        graph = self.model.graph
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            for name in node.input:
                self.readers[name].append(node)
        self.score_ranges = self.ranges_of_scores()
        widths = [max(high, 0.0) - low for low, high in self.score_ranges.values()]
        self.hidden = -2 * max(widths, default=0.0)  # beyond the lowest code, wherever a score lies
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
        typed_outputs = [self.output(info) for info in graph.output]
        initializers = list(self.initializers.values())
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        model.graph.CopyFrom(helper.make_graph(self.nodes, graph.name, inputs, typed_outputs, initializers))
        return model

    def input(self, info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
        if info.type.tensor_type.elem_type != TensorProto.FLOAT:
            return info
        # The grid of the new keys or values, which the other graph gives too.
        origin = self.origin(info.name.replace("past_key_values", "present"))
        grid = self.grids[info.name] = self.operand(self.over(origin))
        self.dequantize(info.name, info.name, grid)
        return _typed(info, grid)

    def origin(self, name: str) -> str:
        """The value that is merely moved to become this one."""
        node = next(node for node in self.model.graph.node if name in node.output)
        return self.origin(node.input[0]) if node.op_type in MOVES else name

    def output(self, info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
        return _typed(info, self.grids[info.name]) if info.name.startswith("present.") else info

    def operand(self, grid: ValueGrid) -> ValueGrid:
        """The grid of the second factor of a product of two values."""
        return grid.signed() if grid.bits > 8 else grid

    def keep(self, node: onnx.NodeProto) -> None:
        """A weight that the checkpoint holds on its grid."""
        self.nodes.append(node)
        self.initializers |= {name: self.constants[name] for name in node.input}
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
            elif narrow and place == 0:
                changed.input[place] = self.convert(name, "narrowed", self.narrow(name))
            elif node.op_type == "MatMul" and place == 1 and name in self.grids:
                changed.input[place] = self.convert(name, "signed", self.operand(self.grids[name]))
            else:
                changed.input[place] = self.read(name)
        for place, name in enumerate(node.output):
            changed.output[place] = f"{name}/float" if name in outputs else name
        self.nodes.append(changed)
        for name, output in zip(node.output, changed.output, strict=True):
            grid = self.grids[name] = self.grid_of(node, name)
            value = self.round(f"{name}/narrow", output, self.narrow(name)) if narrow else output
            if name.startswith("present."):
                self.cached(name, value, grid)
                continue
            codes, grid_names = f"{name}/codes", self.grid_constants(name, grid)
            self.nodes.append(
                helper.make_node("QuantizeLinear", [value, *grid_names], [codes], f"{name}/round")
            )
            self.dequantize(name, codes, grid, given=name if name in outputs else "")

    def cached(self, name: str, value: str, grid: ValueGrid) -> None:
        """New keys or values, which are outputs as the codes that products read."""
        self.grids[name] = self.operand(grid)
        if self.grids[name] != grid:
            self.round(f"{name}/unsigned", value, grid)
            value = self.dequantized[f"{name}/unsigned"]
        inputs = [value, *self.grid_constants(name, self.grids[name])]
        self.nodes.append(helper.make_node("QuantizeLinear", inputs, [name], f"{name}/round"))
        self.dequantize(name, name, self.grids[name])

    def gather(self, node: onnx.NodeProto) -> None:
        """Rows of a quantized table: looked up in its own width, then converted to that of all values."""
        name = node.output[0]
        scale = float(self.weight_scales[node.input[0]])
        back = self.maker(node.input[0])
        node.output[0], codes, narrow = f"{name}/float", f"{name}/stored", f"{name}/stored/given"
        self.nodes.append(node)
        grid_names = back.input[1:]
        self.nodes.append(helper.make_node("QuantizeLinear", [node.output[0], *grid_names], [codes], codes))
        self.nodes.append(helper.make_node("DequantizeLinear", [codes, *grid_names], [narrow], narrow))
        self.grids[name] = ValueGrid.over(-128 * scale, 127 * scale, self.bits.values)
        self.round(name, narrow, self.grids[name])

    def maker(self, value: str) -> onnx.NodeProto:
        return next(node for node in self.nodes if value in node.output)

    def read(self, name: str) -> str:
        return self.dequantized.get(name, name)  # ids and masks are read as they are

    def convert(self, name: str, how: str, grid: ValueGrid) -> str:
        """The value on another grid, converted once for all its readers."""
        if grid == self.grids[name]:
            return self.read(name)
        label = f"{name}/{how}"
        if label not in self.dequantized:
            self.round(label, self.read(name), grid)
        return self.dequantized[label]

    def round(self, label: str, value: str, grid: ValueGrid) -> str:
        inputs = [value, *self.grid_constants(label, grid)]
        self.nodes.append(helper.make_node("QuantizeLinear", inputs, [f"{label}/codes"], f"{label}/round"))
        self.dequantize(label, f"{label}/codes", grid)
        return self.dequantized[label]

    def dequantize(self, name: str, codes: str, grid: ValueGrid, given: str = "") -> None:
        self.dequantized[name] = given or f"{name}/given"
        names = self.grid_constants(name, grid)
        node = helper.make_node("DequantizeLinear", [codes, *names], [self.dequantized[name]], f"{name}/back")
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
        low, high, _ = self.ranges[name]
        low, high = self.score_ranges.get(name, (low, high))
        return ValueGrid.over(self.hidden if name.startswith(MASK) else low, high, self.bits.values)

    def ranges_of_scores(self) -> dict[str, tuple[float, float]]:
        """Lowest and highest of the scores and of their sums with the mask, hidden ones left out."""
        ranges = {}
        for node in self.model.graph.node:
            if _adds_mask(node):
                scores, masked = node.input[0], node.output[0]
                (lowest, _, _), (_, high, peak) = self.ranges[scores], self.ranges[masked]
                floor = min(max(lowest, peak - SOFTMAX_REACH), 0.0)
                ranges[scores], ranges[masked] = (floor, high), (floor - SOFTMAX_REACH, high)
        return ranges

    def narrow(self, name: str) -> ValueGrid:
        """The grid of a value inside of products."""
        return self.grids[name].with_bits(self.bits.products)

    # Constants

    def constant(self, node: onnx.NodeProto, place: int) -> str:
        name: str = node.input[place]
        tensor = self.constants[name]
        if tensor.data_type != TensorProto.FLOAT:  # shapes and widths
            self.initializers[name] = tensor
            return name
        values = numpy_helper.to_array(tensor)
        if node.op_type in PRODUCTS and place == 1:
            return self.weight(name, values, node)
        if node.op_type in PRODUCTS and place == 2:
            return self.bias(name, values, node)
        width = self.grids[node.input[0]].bits if node.op_type in NORMS else None
        grid = self.constant_grid(name, width)
        label = f"{name}/{grid.bits}"
        if label not in self.dequantized:
            self.put(f"{label}/codes", grid.codes(values))
            self.dequantize(label, f"{label}/codes", grid)
        return self.dequantized[label]

    def constant_grid(self, name: str, width: int | None = None) -> ValueGrid:
        values = numpy_helper.to_array(self.constants[name])
        low = self.hidden if name.startswith(MASK) else float(values.min())
        return ValueGrid.over(low, float(values.max()), width or self.bits.values)

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
        codes_IO = np.clip(np.rint(weight_IO / scales), -127, 127).astype(np.int8)
        self.weight_scales[given] = scales
        return self.by_channel(name, codes_IO, scales, axis=1)

    def input_scale(self, node: onnx.NodeProto) -> float:
        name = node.input[0]
        return (self.narrow(name) if node.name in self.narrowed else self.grids[name]).scale

    def bias(self, name: str, values: NDArray[np.float32], node: onnx.NodeProto) -> str:
        weight = node.input[1] if node.input[1] in self.weight_scales else f"{node.input[1]}/given"
        scales = self.weight_scales[weight] * np.float32(self.input_scale(node))
        if (np.abs(values.astype(np.float64)) > scales.astype(np.float64) * LARGEST_CODE).any():
            scales = self.coarser(node, values) * np.float32(self.input_scale(node))
        codes = np.clip(np.rint(values.astype(np.float64) / scales), -LARGEST_CODE, LARGEST_CODE)
        # Named after the node: a layer that is called again reads its input on another grid.
        return self.by_channel(f"{node.name}/{name}", codes.astype(np.int32), scales, axis=0)

    def by_channel(self, name: str, codes: NDArray[Any], scales: NDArray[Any], *, axis: int) -> str:
        """Stored codes with a scale for each channel, dequantized."""
        names = [f"{name}/codes", f"{name}/scales", f"{name}/zeros"]
        self.put(names[0], codes)
        self.put(names[1], scales.astype(np.float32))
        self.put(names[2], np.zeros(scales.shape, codes.dtype))
        dequantized = f"{name}/given"
        self.nodes.append(
            helper.make_node("DequantizeLinear", names, [dequantized], f"{name}/back", axis=axis)
        )
        return dequantized

    def coarser(self, node: onnx.NodeProto, bias_O: NDArray[np.float32]) -> NDArray[np.float32]:
        """New scales of stored weights, so that biases have codes where outputs hardly depend on inputs."""
        weight = node.input[1]
        back = self.maker(weight)
        if len(self.readers[weight]) > 1 or back.op_type != "DequantizeLinear":
            raise InputError(
                "a bias is too large beside weights that several products share",
                where=node.name,
                next_step="--scheme int8_static8, or --exclude the layer",
            )
        old = self.weight_scales[weight]
        least = np.abs(bias_O.astype(np.float64)) / (self.input_scale(node) * LARGEST_BIAS)
        new = np.maximum(old, least).astype(np.float32)
        codes_IO = numpy_helper.to_array(self.initializers[back.input[0]], base_dir=str(self.kept_in or ""))
        codes_IO = np.rint(codes_IO * (old.astype(np.float64) / new)).astype(np.int8)
        self.put(back.input[0], codes_IO)
        self.put(back.input[1], new)
        self.weight_scales[weight] = new
        return new

    def grid_constants(self, name: str, grid: ValueGrid) -> list[str]:
        self.put(f"{name}/scale", np.array(grid.scale, np.float32))
        self.put(f"{name}/zero", np.array(grid.zero, grid.code_type))
        return [f"{name}/scale", f"{name}/zero"]

    def put(self, name: str, values: NDArray[Any]) -> None:
        self.initializers[name] = numpy_helper.from_array(
            np.ascontiguousarray(values).reshape(values.shape), name
        )


def _adds_mask(node: onnx.NodeProto) -> bool:
    """Whether the node adds a mask to scores, and not a mask to a mask."""
    return node.input[-1].startswith(MASK) and not node.name.startswith(MASK)


def _is_transposed(node: onnx.NodeProto) -> bool:
    """Whether the product reads [out, in], as only heads in halves do."""
    return any(attribute.name == "transB" and attribute.i for attribute in node.attribute)


def _typed(info: onnx.ValueInfoProto, grid: ValueGrid) -> onnx.ValueInfoProto:
    changed = onnx.ValueInfoProto()
    changed.CopyFrom(info)
    changed.type.tensor_type.elem_type = TYPES[grid.bits, grid.is_signed]
    return changed
