"""Products whose inputs are scaled token by token: each row within its own steps, whatever others hold."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from layers import one_layer
from onnx import TensorProto

from quantkit.export import operators
from quantkit.export.fused.operators import FusedOperators
from quantkit.export.graph import Graph, save
from quantkit.model.model_map import Activation, Role
from quantkit.plan.formats import SCHEMES
from quantkit.plan.targets import TARGETS
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.layout import Pack
from quantkit.runtime.cpu_session import open_on_cpu

IN, OUT = 96, 40
EXACT = {
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.GELU: lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    Activation.GELU_TANH: lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Activation.SILU: lambda x: x * 0.5 * (1 + np.tanh(x / 2)),
    None: lambda x: x,
}


@pytest.fixture(params=EXACT, ids=str)
def product(request, tmp_path):
    """(the graph of a product behind an activation, the exact result, sums of weights, the activation)."""
    layer = one_layer(OUT, IN, name="p", role=Role.FFN_DOWN, has_bias=True)
    pack = Pack(name="p", layers=(layer,), format=SCHEMES["int8_mixed"].body)
    generator = np.random.default_rng(0)
    codes_IO = generator.integers(-127, 128, (IN, OUT)).astype(np.int8)
    scales, bias = generator.uniform(0.001, 0.01, (2, OUT)).astype(np.float32)
    values = {"p.codes_IO": codes_IO, "p.scales": scales, "p.bias": bias}
    checkpoint = write_checkpoint(tmp_path / "weights.safetensors", pack.tensors(), values.items(), {})
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=False)
    x = graph.input("x", TensorProto.FLOAT, [1, "rows", IN])
    kind = request.param
    fused = FusedOperators(graph=graph, model_map=None, contents=None)
    hidden = fused.activation(kind, x, "hidden") if kind else x
    graph.output(operators.matmul(graph, pack, hidden), "y", TensorProto.FLOAT, [1, "rows", OUT])
    save(graph.finish(name="product", target=TARGETS["cpu"], metadata={}), tmp_path / "model.onnx")
    weight_IO = codes_IO.astype(np.float64) * scales

    def exact(rows):
        hidden = EXACT[kind](rows.astype(np.float64))
        return hidden, hidden @ weight_IO + bias

    return tmp_path / "model.onnx", exact, np.abs(weight_IO).sum(axis=0), kind


def rows_of_all_sizes():
    """From thousandths to hundreds; only negative ones; zeros."""
    generator = np.random.default_rng(1)
    rows = generator.standard_normal((9, IN)) * np.geomspace(1e-3, 300, 9)[:, None]
    negative = -np.abs(generator.standard_normal((2, IN))) * np.array([[0.05], [2.0]])
    return np.concatenate([rows, negative, np.zeros((1, IN))]).astype(np.float32)


def test_every_row_is_within_its_own_steps(product):
    path, exact, sums_O, kind = product
    rows = rows_of_all_sizes()
    session = open_on_cpu(str(path), onnxruntime.SessionOptions())
    made = session.run(None, {"x": rows[None]})[0][0]
    hidden, wanted = exact(rows)
    # All rows share one range after each was divided by its largest value: at most from -1 to 1.
    least = 0.1701 if kind in (Activation.GELU, Activation.GELU_TANH) else 0.0
    peaks = np.maximum(np.abs(hidden).max(axis=1), least)
    steps = 2 * peaks / 255
    assert (np.abs(made - wanted) <= 0.51 * steps[:, None] * sums_O + 1e-5 * np.abs(wanted) + 1e-6).all()
    assert (made[-1] == wanted[-1].astype(np.float32)).all(), "zeros give the bias"


def test_the_largest_is_found_in_one_pass_where_the_least_is_known(product):
    path, _, _, kind = product
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert ("Abs" in kinds) == (kind in (None, Activation.SILU))
