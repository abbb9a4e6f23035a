"""Matrix products and table lookups in every format, for fused and traced graphs.

Each function adds the fewest nodes that onnxruntime has a fused kernel for. Kernels read weights as the
checkpoint stores them. Operators:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export.graph import CONTRIB, Graph
from quantkit.model.model_map import Activation
from quantkit.plan.formats import Format
from quantkit.quantization.grid import middle
from quantkit.quantization.layout import Pack, TableEntry

INTEGER_ACTIVATIONS = 4  # accuracy level at which the operator quantizes its input to INT8 by blocks
MASKED = 1e4  # what is taken from a masked score: far enough for softmax, finite for every type
SMALLEST_PEAK = 1e-20  # a token of zeros stays zeros
LEAST = {"Relu": 0.0, "Gelu": -0.1701, "FastGelu": -0.1701}  # what an operator gives is this or more
ALPHAS = {Activation.SILU: 1.0, Activation.QUICK_GELU: 1.702}  # of QuickGelu
ACTIVATION_OPS: dict[Activation, tuple[str, str]] = {
    Activation.RELU: ("Relu", ""),
    Activation.RELU_SQUARED: ("Relu", ""),  # and its square
    Activation.GELU: ("Gelu", CONTRIB),
    Activation.GELU_TANH: ("FastGelu", CONTRIB),
    Activation.SILU: ("QuickGelu", CONTRIB),  # x * sigmoid(alpha x), with alpha 1
    Activation.QUICK_GELU: ("QuickGelu", CONTRIB),
}


def matmul(graph: Graph, pack: Pack, x: str) -> str:
    """x W^T + b for one pack, in its format."""
    bias = graph.weight(f"{pack.name}.bias") if pack.has_bias else ""
    if pack.input_factors:
        x = graph.op("Mul", x, graph.weight(f"{pack.name}.input_factors"), name=f"{pack.name}/smoothed")
    if pack.format is None:
        return _float_matmul(graph, pack, x, bias)
    graph.integer_nodes[pack.name] = [layer.name for layer in pack.layers]
    if pack.num_outliers:
        columns_I = graph.checkpoint.read(f"{pack.name}.outlier_columns")
        others, outliers = _split_input(graph, columns_I, pack.in_features, x)
        weight_IO = graph.widened(f"{pack.name}.outlier_weight_IO")
        product = graph.op("MatMul", outliers, weight_IO, name=f"{pack.name}/outliers")
        return graph.op("Add", _integer_matmul(graph, pack, pack.format, others, bias), product)
    return _integer_matmul(graph, pack, pack.format, x, bias)


def _split_input(graph: Graph, columns_I: NDArray[np.int64], width: int, x: str) -> tuple[str, str]:
    """(the input with zeros in the outlier columns, these columns alone), once for packs that share both."""
    name = f"{x}/outliers/{hashlib.sha256(columns_I.tobytes()).hexdigest()[:8]}"
    if not graph.labels[name]:
        mask_I = np.ones(width, np.float32)
        mask_I[columns_I] = 0
        columns = graph.constant(f"{name}/columns", columns_I)
        graph.op("Mul", x, graph.constant(f"{name}/mask", mask_I), name=f"{name}/others")
        graph.op("Gather", x, columns, name=name, axis=-1)
    return f"{name}/others/out0", f"{name}/out0"


def _integer_matmul(graph: Graph, pack: Pack, chosen: Format, x: str, bias: str) -> str:
    grid = chosen.grid
    if chosen.is_static:
        return _static(graph, pack, x, bias)
    if grid.block is None:
        by_token = chosen.scales_tokens(pack.layers[0].role)
        return _row_scaled(graph, pack, x, bias) if by_token else _per_channel(graph, pack, x, bias)
    return graph.op(
        "MatMulNBits",
        x,
        graph.weight(f"{pack.name}.codes"),
        graph.scales(pack.name),
        "" if grid.is_symmetric else graph.weight(f"{pack.name}.zeros"),
        "",
        bias,
        name=pack.name,
        domain=CONTRIB,
        K=pack.in_features,
        N=pack.out_features,
        bits=grid.bits,
        block_size=grid.block,
        accuracy_level=INTEGER_ACTIVATIONS,
    )


def constant_matmul(graph: Graph, pack: Pack, x: str) -> str:
    """x W^T + b for rows x that depend on weights alone.

    onnxruntime computes it as it opens a graph, from standard operators: it folds none of its own. Inputs are
    not rounded. Zero points have no such form here, and every run computes their product.
    """
    grid, name = pack.grid, pack.name
    if grid is None or not grid.is_symmetric:
        return matmul(graph, pack, x)
    if pack.input_factors:
        x = graph.op("Mul", x, graph.weight(f"{name}.input_factors"))
    if grid.block is None:
        codes_IO = graph.op("Cast", graph.weight(f"{name}.codes_IO"), to=TensorProto.FLOAT)
        weight_IO = graph.op("Mul", codes_IO, graph.weight(f"{name}.scales"))
    else:
        codes = graph.weight(f"{name}.codes")
        codes = _halves(graph, codes, 2) if grid.bits == 4 else codes
        values = _decoded(graph, name, codes, grid.bits)
        rows_OI = _first_columns(
            graph, graph.op("Reshape", values, graph.integers(0, -1)), pack.in_features, grid.block, axis=1
        )
        weight_IO = graph.op("Transpose", rows_OI, perm=[1, 0])
    if not pack.num_outliers:
        product = graph.op("MatMul", x, weight_IO)
    else:
        columns_I = graph.checkpoint.read(f"{name}.outlier_columns")
        # Codes of a shared table are whole: the other inputs alone meet them, as in `matmul`.
        others, outliers = _split_input(graph, columns_I, pack.in_features, x)
        product = graph.op("MatMul", others, weight_IO)
        outlier_product = graph.op("MatMul", outliers, graph.widened(f"{name}.outlier_weight_IO"))
        product = graph.op("Add", product, outlier_product)
    return graph.op("Add", product, graph.weight(f"{name}.bias")) if pack.has_bias else product


def _static(graph: Graph, pack: Pack, x: str, bias: str, *, natively: bool = False) -> str:
    """Standard operators only: the input quantized in a fixed range, both factors dequantized.

    A runtime for NPUs reads the four nodes as one integer product, and so does onnxruntime at 8 bits. It has
    no product for 16 and would turn the weights into floats anew in each run; so there 16 bits are multiplied
    as two bytes, which comes to the same sum. `natively` writes the plain form for runtimes that have one.
    """
    grid = [graph.weight(f"{pack.name}.input_scale"), graph.weight(f"{pack.name}.input_zero")]
    rounded = graph.op("QuantizeLinear", x, *grid, name=f"{pack.name}/round")
    given = graph.op("DequantizeLinear", rounded, *grid, name=f"{pack.name}/input")
    codes, scales = graph.weight(f"{pack.name}.codes_IO"), graph.weight(f"{pack.name}.scales")
    weight = graph.op("DequantizeLinear", codes, scales, name=f"{pack.name}/weight", axis=1)
    if natively or (pack.format and pack.format.input_bits == 8):
        product = graph.op("MatMul", given, weight, name=pack.name)
    else:
        high, low = _bytes_of(graph, pack, given)
        product = graph.op("MatMul", high, weight, name=pack.name)
        product = graph.op("Add", product, graph.op("MatMul", low, weight, name=f"{pack.name}/low"))
    return graph.op("Add", product, bias) if bias else product


def _bytes_of(graph: Graph, pack: Pack, given: str) -> tuple[str, str]:
    """Values of 16 bits as the sum of two of 8: a step of the first is 256 steps of the second.

    With codes 256 h + l and zero point 256 H + L they are 256 (h - H) steps and (l - L) steps. To the nearest
    multiple of 256 is rounded what was moved by L - 127.5 steps, so that l is a byte and never half way.
    """
    name = pack.name
    step = graph.checkpoint.read(f"{name}.input_scale")
    high_zero, low_zero = divmod(int(graph.checkpoint.read(f"{name}.input_zero")), 256)
    shift = graph.constant(f"{name}/shift", np.asarray((low_zero - 127.5) * step, np.float32))
    high_grid = [
        graph.constant(f"{name}/high_scale", np.asarray(256 * step, np.float32)),
        graph.constant(f"{name}/high_zero", np.array(high_zero, np.uint8)),
    ]
    low_grid = [
        graph.weight(f"{name}.input_scale"),
        graph.constant(f"{name}/low_zero", np.array(low_zero, np.uint8)),
    ]
    codes = graph.op("QuantizeLinear", graph.op("Add", given, shift), *high_grid)
    high = graph.op("DequantizeLinear", codes, *high_grid, name=f"{name}/high")
    codes = graph.op("QuantizeLinear", graph.op("Sub", given, high), *low_grid)
    return high, graph.op("DequantizeLinear", codes, *low_grid, name=f"{name}/rest")


def _per_channel(graph: Graph, pack: Pack, x: str, bias: str) -> str:
    """Weights with one scale a row; the operator gives the whole input one scale."""
    codes, scales = graph.weight(f"{pack.name}.codes_IO"), graph.weight(f"{pack.name}.scales")
    return graph.op("DynamicQuantizeMatMul", x, codes, scales, "", bias, name=pack.name, domain=CONTRIB)


def _row_scaled(graph: Graph, pack: Pack, x: str, bias: str) -> str:
    """Per-channel weights; every token is divided by its largest value first, so that one scale suits all.

    Where all values are known to lie above some small negative one, they are divided by no less than that,
    and the largest is found in one pass.
    """
    maker = graph.maker(x)
    least = LEAST.get(maker.op_type) if maker else None
    sizes = graph.op("Abs", x) if least is None else x
    smallest = np.array(max(-(least or 0.0), SMALLEST_PEAK), np.float32)
    peak = graph.op("ReduceMax", sizes, graph.integers(-1), keepdims=1)
    peak = graph.op("Max", peak, graph.constant(f"smallest_{smallest:g}", smallest))
    product = _per_channel(graph, pack, graph.op("Div", x, peak), "")
    product = graph.op("Mul", product, peak)
    return graph.op("Add", product, bias) if bias else product


def _float_matmul(graph: Graph, pack: Pack, x: str, bias: str) -> str:
    if pack.table:  # [out, in] as the embedding has it; Gemm reads that, for two dimensions
        rows = graph.op("Reshape", x, graph.integers(-1, pack.in_features))
        product = graph.op("Gemm", rows, graph.weight(f"{pack.table}.weight"), bias, name=pack.name, transB=1)
        shape = graph.op("Shape", x, start=0, end=2)
        shape = graph.op("Concat", shape, graph.integers(pack.out_features), axis=0)
        return graph.op("Reshape", product, shape)
    product = graph.op("MatMul", x, graph.weight(f"{pack.name}.weight_IO"), name=pack.name)
    return graph.op("Add", product, bias) if bias else product


def lookup(graph: Graph, entry: TableEntry, ids: str) -> str:
    """Rows of an embedding as float32, [batch, sequence, columns]."""
    name = entry.table.name
    if entry.grid is None:
        return graph.op("Gather", graph.weight(f"{entry.shares or name}.weight"), ids, name=name, axis=0)
    holder, bits = entry.shares or name, entry.grid.bits
    # No Reshape may touch the codes themselves: onnxruntime would fold it into a second copy of them.
    codes = graph.op("Gather", graph.weight(f"{holder}.codes"), ids, name=name, axis=0)
    if bits == 4:
        codes = _halves(graph, codes, 3)
    if not entry.grid.is_symmetric:
        raise InputError("its table has zero points", where=name, allowed="a symmetric grid for tables")
    rows = graph.op("Reshape", _decoded(graph, holder, codes, bits, ids), graph.integers(0, 0, -1))
    columns = entry.table.num_columns
    return _first_columns(graph, rows, columns, entry.grid.block or columns, axis=2)


def _decoded(graph: Graph, holder: str, codes: str, bits: int, ids: str = "") -> str:
    """Values of the codes [..., blocks, block] of a weight, or of some of its rows."""
    zero = graph.constant(f"middle_{bits}", np.array(middle(bits), np.float32))
    values = graph.op("Sub", graph.op("Cast", codes, to=TensorProto.FLOAT), zero)
    scales = graph.weight(f"{holder}.scales")
    scales = graph.op("Gather", scales, ids, axis=0) if ids else scales
    scales = graph.op("Cast", scales, to=TensorProto.FLOAT)
    return graph.op("Mul", values, graph.op("Unsqueeze", scales, graph.integers(-1)))


def _first_columns(graph: Graph, rows: str, columns: int, block: int, *, axis: int) -> str:
    """Rows without the columns that fill their last block."""
    if columns % block == 0:
        return rows
    return graph.op("Slice", rows, graph.integers(0), graph.integers(columns), graph.integers(axis))


def _halves(graph: Graph, both: str, rank: int) -> str:
    """Bytes [..., blocks, block / 2] as codes of 4 bits, the lower half first; `rank` axes stay."""
    low = graph.op("BitwiseAnd", both, graph.constant("u8_15", np.array(15, np.uint8)))
    high = graph.op("BitShift", both, graph.constant("u8_4", np.array(4, np.uint8)), direction="RIGHT")
    parts = [graph.op("Unsqueeze", part, graph.integers(-1)) for part in (low, high)]
    pairs = graph.op("Concat", *parts, axis=-1)
    return graph.op("Reshape", pairs, graph.integers(*([0] * rank), -1))
