"""Export targets: operators, types, opset and shapes that a file for each target may use.

Targets are data, so the written file is checked against them before it runs. A target may also need a coarser
grid: x86 processors without VNNI multiply bytes with VPMADDUBSW, which adds two neighbouring products in 16
bits and saturates. 2 x 255 x 127 = 64770 saturates, 2 x 255 x 64 = 32640 does not, so 7-bit weights are exact
for every pairing of a kernel. Block products are exact without VNNI as well in onnxruntime 1.31
(tests/quantization/test_saturation.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantkit.plan.formats import Format

# Operators of onnxruntime beyond the ONNX standard; the empty domain is the standard one's.
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
# Element types by their ONNX names.
CPU_TYPES = frozenset(
    {"FLOAT", "DOUBLE", "BOOL", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"}
)
CHANNEL_BITS_OF_EXACT_SUMS = 7  # of weights, without VNNI
X86 = ("x86_64", "AMD64")
ARM = ("aarch64", "arm64", "ARM64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a file for one target may contain."""

    opset: int  # newest opset of the standard operators
    ir_version: int
    domains: tuple[str, ...]  # operator sets besides the standard one
    description: str
    fused_operators: frozenset[str] = FUSED  # allowed operators beyond the standard, "domain::Name"
    standard_operators: frozenset[str] | None = None  # allowed standard operators; None: all of the opset
    element_types: frozenset[str] = CPU_TYPES
    is_static: bool = False  # all shapes are fixed
    rounds_values: bool = True  # static graphs: quantized activations; False: only weights are quantized
    is_half: bool = False  # float16 in place of float32; outputs other than the cache stay float32
    channel_bits: int = 8  # of weights with per-channel scales
    machines: tuple[str, ...] = ()  # as platform.machine() names them; empty: any


# Operators of static graphs; NPU compilers support each of them.
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
    description="an NPU, or any runtime of standard operators: fixed shapes, every value an 8- or 16-bit "
    "integer (QDQ); opset 21, or 23 where the model has RMS norms",
    fused_operators=frozenset(),
    standard_operators=STATIC,
    element_types=frozenset({"FLOAT", "INT8", "UINT8", "INT16", "UINT16", "INT32", "INT64"}),
    is_static=True,
)
TARGETS: dict[str, Target] = {
    "cpu": CPU_VNNI,
    "cpu-vnni": CPU_VNNI,
    "cpu-avx2": replace(
        CPU_VNNI,
        description="cpu-vnni for any x86 CPU: per-channel weights have 7 bits, weights in blocks have 8",
        channel_bits=CHANNEL_BITS_OF_EXACT_SUMS,
    ),
    "cpu-arm": replace(
        CPU_VNNI,
        description="cpu-vnni for a 64-bit Arm CPU: block products of two signed operands",
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
        description="OpenVINO on a CPU, which quantizes activations itself: fixed shapes, standard "
        "operators, INT8 weights with per-channel scales",
        # The ONNX importer of OpenVINO 2025.4 has no RMSNormalization.
        standard_operators=STATIC - {"RMSNormalization"} | {"ReduceMean", "Sqrt", "Div"},
        element_types=frozenset({"FLOAT", "INT8", "INT32", "INT64"}),
        rounds_values=False,
    ),
}
DEFAULT_TARGET = "cpu"


def multiplies(target: Target, chosen: Format) -> bool:
    """Whether the target has an operator for products in this format."""
    has_channels = "com.microsoft::DynamicQuantizeMatMul" in target.fused_operators
    return target.is_static or chosen.is_static or chosen.grid.block is not None or has_channels


def may_saturate(target: Target, chosen: Format) -> bool:
    """Whether sums of the product are cut off on an x86 processor without VNNI, unless asked not to be."""
    is_integer = chosen.grid.block is None and chosen.activations != "float"
    return target.machines == X86 and is_integer and chosen.grid.bits > CHANNEL_BITS_OF_EXACT_SUMS


def format_on(target: Target, chosen: Format) -> Format:
    """A projection's format on a target: ranges per graph value, or fewer bits per channel."""
    if target.is_static:
        activations = chosen.activations.replace("static", "graph") if target.rounds_values else "float"
        return replace(chosen, activations=activations)
    grid = chosen.grid
    if grid.block is not None or grid.bits <= target.channel_bits:
        return chosen
    return replace(chosen, grid=replace(grid, bits=target.channel_bits))
