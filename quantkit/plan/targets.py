"""What an exported file promises to whoever runs it: one row for each target.

The promises are data, so that the written file can be held against them before anything runs it. A target may
also ask for a coarser grid: x86 processors without VNNI multiply bytes with VPMADDUBSW, which adds the
products of two neighbours in 16 bits and cuts off what does not fit. 2 x 255 x 127 = 64770 does not, while
2 x 255 x 64 = 32640 does: weights of 7 bits come out right in whatever order a kernel pairs them. Products
over blocks need no such cure: in onnxruntime 1.31 they are exact without VNNI too (tests/test_saturation.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.plan.formats import Format, on_graph

# Operators that onnxruntime knows and the standard does not; the empty domain is the standard one's.
FUSED = frozenset(
    {
        "::SimplifiedLayerNormalization",
        "com.microsoft::DynamicQuantizeMatMul",
        "com.microsoft::FastGelu",
        "com.microsoft::Gelu",
        "com.microsoft::GroupQueryAttention",
        "com.microsoft::MatMulIntegerToFloat",
        "com.microsoft::MatMulNBits",
        "com.microsoft::MultiHeadAttention",
        "com.microsoft::QuickGelu",
        "com.microsoft::RotaryEmbedding",
        "com.microsoft::SkipLayerNormalization",
        "com.microsoft::SkipSimplifiedLayerNormalization",
    }
)
# As ONNX names element types.
CPU_TYPES = frozenset(
    {"FLOAT", "DOUBLE", "BOOL", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"}
)
X86 = ("x86_64", "AMD64")
ARM = ("aarch64", "arm64", "ARM64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A profile of the file."""

    opset: int  # the newest of the standard operators
    ir_version: int
    domains: tuple[str, ...]  # operator sets besides the standard one
    description: str
    fused_operators: frozenset[str] = FUSED  # "domain::Name" of all that are not of the standard
    standard_operators: frozenset[str] | None = None  # of the standard these alone; None: all of its opset
    element_types: frozenset[str] = CPU_TYPES
    is_static: bool = False  # every size of every input and output is a number
    rounds_values: bool = True  # of a static graph; False: floats between operators, only weights integers
    is_half: bool = False  # float16 where the others have float32; outputs but the cache stay float32
    channel_bits: int = 8  # of weights with one scale a row, stored in bytes
    machines: tuple[str, ...] = ()  # as platform.machine() names them; empty: any


# What a static graph is put together from, and all that NPU compilers have an operation of their own for.
STATIC = frozenset(
    {
        "Add",
        "Concat",
        "DequantizeLinear",
        "Gather",
        "Gelu",
        "Gemm",
        "LayerNormalization",
        "MatMul",
        "Mul",
        "QuantizeLinear",
        "RMSNormalization",
        "Relu",
        "Reshape",
        "Sigmoid",
        "Softmax",
        "Split",
        "Tanh",
        "Transpose",
    }
)

CPU_VNNI = Target(
    opset=23,
    ir_version=11,
    domains=("com.microsoft",),
    description="onnxruntime 1.23 or newer on a CPU with VNNI: fused operators, float32 between them; "
    "opset 21, or 23 for encoders",
    machines=X86,
)
NPU = Target(
    opset=23,
    ir_version=11,
    domains=(),
    description="an NPU, or any runtime of standard operators: fixed sizes, every value an 8- or 16-bit "
    "integer (QDQ); opset 21, or 23 where the model has RMS norms",
    fused_operators=frozenset(),
    standard_operators=STATIC,
    element_types=frozenset({"FLOAT", "INT8", "UINT8", "INT16", "UINT16", "INT32", "INT64"}),
    is_static=True,
)
TARGETS: dict[str, Target] = {
    "cpu": CPU_VNNI,  # the same under its short name
    "cpu-vnni": CPU_VNNI,
    "cpu-avx2": replace(
        CPU_VNNI,
        description="the same on any x86 CPU: weights with one scale a row have 7 bits, blocks keep their 8",
        channel_bits=7,
    ),
    "cpu-arm": replace(
        CPU_VNNI,
        description="the same on a 64-bit Arm CPU: signed bytes on both sides of every product over blocks",
        machines=ARM,
    ),
    "gpu": replace(
        CPU_VNNI,
        opset=21,
        ir_version=10,
        description="onnxruntime on a GPU: fused operators with float16 between them, weights in blocks",
        fused_operators=FUSED
        - {"com.microsoft::DynamicQuantizeMatMul", "com.microsoft::MatMulIntegerToFloat"},
        element_types=CPU_TYPES - {"DOUBLE"} | {"FLOAT16"},
        is_half=True,
        machines=(),
    ),
    "npu": NPU,
    "openvino": replace(
        NPU,
        opset=21,
        ir_version=10,
        description="OpenVINO on a CPU, which rounds activations itself: fixed sizes, standard operators, "
        "INT8 weights with one scale a row",
        # Its reader of ONNX files, 2025.4, knows no RMSNormalization yet.
        standard_operators=STATIC - {"RMSNormalization"} | {"ReduceMean", "Sqrt", "Div"},
        element_types=frozenset({"FLOAT", "INT8", "INT32", "INT64"}),
        rounds_values=False,
    ),
}
DEFAULT_TARGET = "cpu"


def format_on(target: Target, wanted: Format) -> Format:
    """A projection's format as the target computes it rightly: one scale a row may take fewer bits."""
    if target.is_static:
        return on_graph(wanted) if target.rounds_values else replace(wanted, activations="float")
    grid = wanted.grid
    if grid.block is not None or grid.bits <= target.channel_bits:
        return wanted
    return replace(wanted, grid=replace(grid, bits=target.channel_bits))
