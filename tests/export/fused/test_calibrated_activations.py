"""Products with inputs in a fixed range: in the real runtime, beside rounding in torch and float64 sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import one_layer
from onnx import TensorProto

from quantkit.export import operators
from quantkit.export.graph import Graph, save
from quantkit.model.model_map import Role
from quantkit.plan.formats import SCHEMES
from quantkit.plan.targets import TARGETS
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.layout import Pack
from quantkit.quantization.simulate import round_static
from quantkit.runtime.cpu_session import open_on_cpu
from quantkit.runtime.graph import INPUTS_AS_WRITTEN

pytestmark = pytest.mark.once
ROWS, IN, OUT = 7, 96, 40


def static_pack(bits, *, has_bias=True):
    layer = one_layer(OUT, IN, name="p", role=Role.FFN_UP, has_bias=has_bias)
    return Pack(name="p", layers=(layer,), format=SCHEMES[f"int8_static{bits}"].body)


def values_of(bits, low, high, seed=0, *, has_bias=True):
    """The stored tensors of a product whose input lies between low and high."""
    generator = np.random.default_rng(seed)
    steps = (1 << bits) - 1
    scale = np.float32((high - low) / steps)
    values = {
        "p.codes_IO": generator.integers(-127, 128, (IN, OUT)).astype(np.int8),
        "p.scales": generator.uniform(0.001, 0.01, OUT).astype(np.float32),
        "p.input_scale": np.array(scale, np.float32),
        "p.input_zero": np.array(round(min(max(-low / scale, 0), steps)), f"u{bits // 8}"),
    }
    bias = {"p.bias": generator.standard_normal(OUT).astype(np.float32)}
    return {**values, **(bias if has_bias else {})}


def write(folder, bits, values, *, natively=False):
    """The product as `model.onnx`."""
    pack = static_pack(bits, has_bias="p.bias" in values)
    checkpoint = write_checkpoint(folder / "weights.safetensors", pack.tensors(), values.items(), {})
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=False)
    x = graph.input("x", TensorProto.FLOAT, [1, "rows", IN])
    bias = graph.weight("p.bias") if pack.has_bias else ""
    if natively:
        y = operators._static(graph, pack, x, bias, natively=True)
    else:
        y = operators.matmul(graph, pack, x)
    graph.output(y, "y", TensorProto.FLOAT, [1, "rows", OUT])
    save(graph.finish(name="static", target=TARGETS["cpu"], metadata={}), folder / "model.onnx")
    return folder / "model.onnx"


def run(path, x, *, exact=True, **entries):
    """(what comes out, the graph as onnxruntime runs it)."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_name("as_run.onnx"))
    options.log_severity_level = 3
    options.add_session_config_entry(*INPUTS_AS_WRITTEN)
    for name, value in entries.items():
        options.add_session_config_entry(f"session.{name}", value)
    if exact:
        session = open_on_cpu(str(path), options)
    else:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return y, onnx.load(path.with_name("as_run.onnx"))


def wanted(x, bits, values):
    """The product of rounded inputs and decoded weights, in float64."""
    scale, zero = float(values["p.input_scale"]), int(values["p.input_zero"])
    rounded = round_static(torch.from_numpy(x), scale=scale, zero=zero, bits=bits).numpy().astype(np.float64)
    product = rounded @ (values["p.codes_IO"] * values["p.scales"].astype(np.float64))
    return product + values.get("p.bias", 0)


def assert_equal(made, expected):
    difference = np.abs(made - expected)
    assert difference.max() <= 3e-6 * np.abs(expected).max()
    assert np.linalg.norm(difference) <= 1e-6 * np.linalg.norm(expected)


RANGES = [(-4.5, 5.0), (0.0, 6.0), (-3.0, 0.0), (-0.17, 20.0), (-1e-3, 1e-3)]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("low", "high"), RANGES)
@pytest.mark.parametrize("bits", [8, 16])
def test_the_runtime_computes_what_fake_quantization_says(bits, low, high, has_bias, tmp_path):
    """Inputs reach a tenth beyond both ends of the range, where they are cut off."""
    values = values_of(bits, low, high, has_bias=has_bias)
    beyond = (high - low) / 10
    x = np.random.default_rng(1).uniform(low - beyond, high + beyond, (1, ROWS, IN)).astype(np.float32)
    y, _ = run(write(tmp_path, bits, values), x)
    assert_equal(y, wanted(x, bits, values))
    error = np.abs(y - (x @ (values["p.codes_IO"] * values["p.scales"]) + values.get("p.bias", 0))).max()
    assert error > 0, "the rounding shows"


@settings(deadline=None, max_examples=25)
@given(zero=st.integers(0, 65535), seed=st.integers(0, 1000))
def test_two_bytes_are_every_code_of_sixteen_bits(zero, seed, tmp_path_factory):
    """Whatever the zero point, the ends and the middles between two high bytes included."""
    values = values_of(16, -1.0, 1.0)
    values |= {"p.input_scale": np.array(2**-12, np.float32), "p.input_zero": np.array(zero, np.uint16)}
    # unit weights: each output is one input, so a single step that is lost would be seen
    codes = np.zeros((IN, OUT), np.int8)
    codes[np.arange(OUT), np.arange(OUT)] = 1
    values |= {"p.codes_IO": codes, "p.scales": np.ones(OUT, np.float32), "p.bias": np.zeros(OUT, np.float32)}
    steps = np.random.default_rng(seed).integers(0, 65536, (1, ROWS, IN))
    steps[0, 0, :8] = [0, 1, 127, 128, 255, 256, 65535, 65408]
    x = ((steps - zero) * 2.0**-12).astype(np.float32)
    y, _ = run(write(tmp_path_factory.mktemp("bytes"), 16, values), x)
    np.testing.assert_array_equal(y[0], x[0, :, :OUT])


def test_both_forms_of_sixteen_bits_agree(tmp_path):
    values = values_of(16, -4.5, 5.0)
    x = np.random.default_rng(1).uniform(-5, 5.5, (1, ROWS, IN)).astype(np.float32)
    made = []
    for natively in (False, True):
        folder = tmp_path / str(natively)
        folder.mkdir()
        made.append(run(write(folder, 16, values, natively=natively), x, exact=not natively)[0])
    assert_equal(made[0], made[1].astype(np.float64))


@pytest.mark.parametrize(("bits", "products"), [(8, 1), (16, 2)])
def test_every_product_is_an_integer_kernel_and_weights_stay_small(bits, products, tmp_path):
    values = values_of(bits, -4.5, 5.0)
    x = np.zeros((1, ROWS, IN), np.float32)
    _, as_run = run(write(tmp_path, bits, values), x, exact=False)
    kinds = [node.op_type for node in as_run.graph.node]
    assert kinds.count("MatMulIntegerToFloat") == products
    assert "MatMul" not in kinds
    large = [each for each in as_run.graph.initializer if np.prod(each.dims, dtype=int) >= IN * OUT]
    assert [each.data_type for each in large] == [TensorProto.INT8]


def test_the_plain_form_of_sixteen_bits_is_a_float_product_here(tmp_path):
    """The reason for two bytes: should a later onnxruntime multiply 16 bits, the plain form will do."""
    path = write(tmp_path, 16, values_of(16, -4.5, 5.0), natively=True)
    _, as_run = run(path, np.zeros((1, ROWS, IN), np.float32), exact=False)
    products = [node for node in as_run.graph.node if node.op_type.startswith("MatMul")]
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in products[0].attribute}
    assert [(node.op_type, attributes.get("accuracy_level")) for node in products] in (
        [("MatMul", None)],
        [("MatMulNBits", 1)],  # from onnxruntime 1.32 on; level 1 is float
    )


@pytest.mark.parametrize("bits", [8, 16])
def test_only_standard_operators_are_written(bits, tmp_path: Path):
    model = onnx.load(write(tmp_path, bits, values_of(bits, -1.0, 1.0)))
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
