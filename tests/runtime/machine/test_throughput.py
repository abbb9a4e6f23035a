"""The measurement of the running machine: its probe models compute what they claim, its figures are sane."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from quantkit.export.probes import ProbeModels, build_probe_models
from quantkit.model.model_map import to_json
from quantkit.runtime.machine import throughput
from quantkit.runtime.machine.cache import cache_folder, cache_path, machine_key
from quantkit.runtime.machine.throughput import Throughput, measure_throughput

KEY: dict[str, str | int] = {"cpu": "Test CPU", "logical_cores": 2, "onnxruntime": "1.0", "quantkit": "0"}


@pytest.fixture(scope="module")
def models() -> ProbeModels:
    return build_probe_models()


@pytest.fixture(scope="module")
def measured(models: ProbeModels) -> Throughput:
    return measure_throughput(**keywords(models), seconds=0.2)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keywords(models: ProbeModels) -> dict[str, Any]:
    return {field.name: getattr(models, field.name) for field in dataclasses.fields(models)}


def weight_of(model: bytes, name: str = "weight") -> np.ndarray:
    initializers = onnx.load_model_from_string(model).graph.initializer
    return numpy_helper.to_array(next(row for row in initializers if row.name == name))


def run(model: bytes, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    assert isinstance(y, np.ndarray)
    return y


def test_float_probe_is_a_float_product(models: ProbeModels) -> None:
    weight = weight_of(models.float_matmul)
    x = np.random.default_rng(1).standard_normal((128, weight.shape[0])).astype(np.float32)
    expected = x.astype(np.float64) @ weight.astype(np.float64)
    error = np.abs(run(models.float_matmul, x) - expected)
    assert error.max() < 1e-3  # sums of 768 products of unit variance: about 28 in size
    assert np.linalg.norm(error) / np.linalg.norm(expected) < 1e-6


def test_integer_probe_is_the_exact_product(models: ProbeModels) -> None:
    weight = weight_of(models.integer_matmul)
    x = np.random.default_rng(2).integers(0, 128, (128, weight.shape[0]), dtype=np.uint8)
    expected = x.astype(np.float64) @ weight.astype(np.float64)  # exact below 2**53, and fast
    np.testing.assert_array_equal(run(models.integer_matmul, x), expected)


def test_block_probe_is_the_product_up_to_eight_bit_activations(models: ProbeModels) -> None:
    stored, scale = weight_of(models.block_matmul), weight_of(models.block_matmul, "scale")
    weight_OI = ((stored.astype(np.float64) - 128) * scale[:, :, None]).reshape(stored.shape[0], -1)
    assert np.array_equal(np.rint(weight_OI.T * 127), weight_of(models.integer_matmul))  # the same weights
    x = np.random.default_rng(3).standard_normal((128, weight_OI.shape[1])).astype(np.float32)
    expected = x.astype(np.float64) @ weight_OI.T
    error = run(models.block_matmul, x) - expected
    # INT8 steps of a block are max|x| / 127, about 3 / 127: errors of 0.0068 on inputs of size 1
    assert np.linalg.norm(error) / np.linalg.norm(expected) < 0.01
    assert np.abs(error).max() < 0.02 * np.abs(expected).max()


def test_chain_keeps_every_node(models: ProbeModels, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(tmp_path / "as_run.onnx")
    session = onnxruntime.InferenceSession(models.chain, options, providers=["CPUExecutionProvider"])
    as_run = onnx.load(tmp_path / "as_run.onnx")
    assert len(as_run.graph.node) == models.num_chain_nodes == 200
    (y,) = session.run(None, {"x": np.zeros(16, dtype=np.float32)})
    np.testing.assert_allclose(y, 100.0, rtol=0, atol=0)  # 100 additions of one, none skipped


@pytest.mark.parametrize("name", ["float_matmul", "integer_matmul", "block_matmul", "chain"])
def test_probe_models_are_valid_onnx(models: ProbeModels, name: str) -> None:
    onnx.checker.check_model(onnx.load_model_from_string(getattr(models, name)))


def test_operations_are_counted_from_the_weight(models: ProbeModels) -> None:
    weight = weight_of(models.float_matmul)
    shape = onnx.load_model_from_string(models.float_matmul).graph.input[0].type.tensor_type.shape
    assert models.num_operations == 2 * shape.dim[0].dim_value * weight.size


def test_figures_are_positive_finite_and_follow_from_their_timings(
    measured: Throughput, models: ProbeModels
) -> None:
    values = to_json(measured)
    timings = values.pop("timings")
    assert all(math.isfinite(value) and value > 0 for value in values.values())
    for timing in timings.values():
        assert timing["num_samples"] >= 3
        assert 0 < timing["fastest_ms"] <= timing["median_ms"] <= timing["slowest_ms"]
    float_ms = timings["float_matmul"]["median_ms"]
    assert measured.fp32_tera_ops == pytest.approx(models.num_operations / float_ms * 1e-9)
    assert measured.int8_tera_ops == max(measured.integer_matmul_tera_ops, measured.block_matmul_tera_ops)
    assert measured.buffer_bytes >= 256 << 20 or measured.buffer_bytes > 0.2 * _available_bytes()
    assert measured.bandwidth_gb_per_s == pytest.approx(
        measured.buffer_bytes / timings["read"]["median_ms"] * 1e-6
    )
    assert measured.dispatch_us == pytest.approx(timings["chain"]["median_ms"] * 1e3 / 200)


def _available_bytes() -> int:
    return throughput.read_memory().available_bytes


@pytest.mark.parametrize("num_threads", [1, 3, 64])
def test_buffer_is_large_divisible_and_leaves_room(num_threads: int) -> None:
    size = throughput._buffer_bytes(num_threads, 100 << 30)
    assert size % (8 * num_threads) == 0
    assert size > max(256 << 20, num_threads * (32 << 20)) - 8 * num_threads
    assert throughput._buffer_bytes(num_threads, 64 << 20) <= 16 << 20


def test_disturbance_shows_in_the_spread(measured: Throughput) -> None:
    calm = throughput.Timing(num_samples=9, median_ms=1.1, fastest_ms=1.0, slowest_ms=9.0)
    torn = throughput.Timing(num_samples=9, median_ms=1.6, fastest_ms=1.0, slowest_ms=9.0)
    assert not dataclasses.replace(measured, timings={"read": calm}).is_disturbed
    assert dataclasses.replace(measured, timings={"read": calm, "chain": torn}).is_disturbed


def test_cache_returns_what_was_written(cache: Path, measured: Throughput) -> None:
    assert throughput.read_cache(KEY) is None
    assert throughput.write_cache(KEY, measured)
    assert throughput.read_cache(KEY) == measured
    assert [path.name for path in cache.iterdir()] == [cache_path("machine", KEY).name]  # no temporary left
    assert throughput.read_cache(KEY | {"cpu": "Another CPU"}) is None
    assert throughput.write_cache(KEY, dataclasses.replace(measured, num_threads=7))  # replaced, not appended
    again = throughput.read_cache(KEY)
    assert again is not None and again.num_threads == 7


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"num_threads"', '"threads"'),
        lambda text: text.replace("Test CPU", "Other CPU"),
        lambda text: json.dumps(json.loads(text) | {"measured": {}}),
        lambda text: _with_figure(text, float("nan")),
        lambda text: _with_figure(text, -1.0),
        lambda text: _with_figure(text, "fast"),
    ],
)
def test_damaged_cache_is_measured_again(cache: Path, measured: Throughput, damage: Any) -> None:
    throughput.write_cache(KEY, measured)
    path = cache_path("machine", KEY)
    path.write_text(damage(path.read_text()))
    assert throughput.read_cache(KEY) is None


def _with_figure(text: str, value: object) -> str:
    content = json.loads(text)
    content["measured"]["bandwidth_gb_per_s"] = value
    return json.dumps(content)


def test_unwritable_cache_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Throughput
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "file" / "below"))
    assert throughput.write_cache(KEY, measured) is False
    assert throughput.read_cache(KEY) is None


def test_cache_folder_follows_the_environment() -> None:
    folder = cache_folder
    assert folder({"QUANTKIT_CACHE": "/q", "XDG_CACHE_HOME": "/x"}) == Path("/q")
    assert folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/quantkit")
    assert folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "quantkit"
    assert folder({}) == Path.home() / ".cache" / "quantkit"


def test_key_of_this_machine_names_the_runtime() -> None:
    key = machine_key()
    assert onnxruntime.__version__ in str(key["onnxruntime"])
    assert key["cpu"] and int(key["logical_cores"]) >= int(key["num_threads"]) >= 1


def test_the_bandwidth_of_the_moment_is_a_plausible_figure():
    assert 0.5 < throughput.read_bandwidth_gb_per_s(1, seconds=0.05) < 2000
