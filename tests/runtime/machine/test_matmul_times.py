"""Timing products: probes compute what they claim, every time is there, and a second call reads the first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from quantkit.export.probes import PROBED, format_name, product_bytes, products_of, write_product_probe
from quantkit.model.inspect import inspect
from quantkit.plan.formats import SCHEMES
from quantkit.plan.min_dim import FLOAT, Product
from quantkit.plan.select import choose
from quantkit.quantization.grid import decode, from_bytes
from quantkit.quantization.layout import contents_of, formats_of
from quantkit.runtime.cpu_session import open_on_cpu
from quantkit.runtime.machine import matmul_times as shape_times
from quantkit.runtime.machine.facts import cache_bytes
from quantkit.runtime.machine.matmul_times import (
    Settings,
    measure_products,
    num_copies,
)

pytestmark = pytest.mark.once
QUICK = Settings(threads=1, turns=2, turn_seconds=0.001)


def product(in_features=96, out_features=48, **extra):
    given = {"format_name": "int8_block32", "prompt_rows": 5, **extra}
    return Product(layers=("a",), in_features=in_features, out_features=out_features, **given)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tensors_of(path):
    model = onnx.load(path)  # with the weights beside it
    return {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}


def weights_of(tensors, label, name, columns):
    """With the outlier columns, which are the first ones in probes."""
    weight_OI = _integers_of(tensors, label, name, columns)
    outliers_IO = tensors.get(f"{label}.outlier_weight_IO", np.zeros((0, len(weight_OI))))
    weight_OI[:, : len(outliers_IO)] = outliers_IO.T
    return weight_OI


def _integers_of(tensors, label, name, columns):
    """What the codes of one copy stand for, [out, in]."""
    if name == FLOAT:
        return tensors[f"{label}.weight_IO"].T.astype(np.float64)
    grid = PROBED[name][0].grid
    scales = tensors[f"{label}.scales"].astype(np.float32)
    if grid.block is None:
        return (tensors[f"{label}.codes_IO"] * scales[None, :]).T.astype(np.float64)
    codes = from_bytes(tensors[f"{label}.codes"], grid.bits, grid.block)
    zeros = None
    if not grid.is_symmetric:
        zeros = from_bytes(tensors[f"{label}.zeros"], grid.bits, scales.shape[1])
    return decode(codes, scales, columns, zeros).astype(np.float64)


@pytest.mark.parametrize("name", [FLOAT, *PROBED])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_copy_is_the_product_of_its_own_weights(name, has_bias, tmp_path):
    probe = product(256, 48, has_bias=has_bias, format_name=name)
    path = write_product_probe(tmp_path, probe, name, copies=3)
    tensors = tensors_of(path)
    session = open_on_cpu(str(path), onnxruntime.SessionOptions())
    x = np.random.default_rng(0).standard_normal((1, 4, 256)).astype(np.float32)
    if "static" in name:  # its range is as random as its weights: look inside of it
        top = np.iinfo(tensors["copy_0.input_zero"].dtype).max
        low = min(
            float(-tensors[f"copy_{i}.input_zero"] * tensors[f"copy_{i}.input_scale"]) for i in range(3)
        )
        high = min(
            float((top - int(tensors[f"copy_{i}.input_zero"])) * tensors[f"copy_{i}.input_scale"])
            for i in range(3)
        )
        x = np.clip(x, low / 10, high)
    made = session.run(None, {f"x_{i}": x for i in range(3)})
    for number, y in enumerate(made):
        wanted = x.astype(np.float64) @ weights_of(tensors, f"copy_{number}", name, 256).T
        if has_bias:
            wanted += tensors[f"copy_{number}.bias"]
        difference = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
        assert difference < (1e-5 if name == FLOAT else 0.03)
        assert np.abs(y - wanted).max() < (1e-4 if name == FLOAT else 0.1) * np.abs(wanted).max()


@pytest.mark.parametrize("name", [FLOAT, "int8_block128", "int8_tensor", "int4_block32_zeros"])
def test_no_two_copies_are_alike(name, tmp_path):
    """onnxruntime keeps equal weights once: they would come from the cache however many copies there are."""
    copies = 12
    write_product_probe(tmp_path, product(256, 512, has_bias=True, format_name=name), name, copies=copies)
    tensors = tensors_of(tmp_path / "product.onnx")
    large = [array.tobytes() for array in tensors.values() if array.size >= 512]
    assert len(large) >= 2 * copies
    assert len(set(large)) == len(large)


def test_an_untouched_head_reads_its_table(tmp_path):
    path = write_product_probe(tmp_path, product(reads_table=True), FLOAT, copies=1)
    tensors = tensors_of(path)
    assert tensors["copy_0.table.weight"].shape == (48, 96)
    x = np.ones((1, 2, 96), np.float32)
    (y,) = open_on_cpu(str(path), onnxruntime.SessionOptions()).run(None, {"x_0": x})
    np.testing.assert_allclose(y, x.astype(np.float64) @ tensors["copy_0.table.weight"].T, rtol=1e-5)


@pytest.mark.parametrize("name", [FLOAT, *PROBED])
def test_bytes_are_those_of_the_file(name, tmp_path):
    probe = product(has_bias=True)
    write_product_probe(tmp_path, probe, name, copies=1)
    written = (tmp_path / "weights.bin").stat().st_size
    assert 0 <= written - product_bytes(probe, name) < 64 * 6  # each tensor starts on a cache line


def test_names_tell_apart_what_is_computed_differently():
    for label, (form, role) in PROBED.items():
        assert format_name(form, role) == label
    assert {"int8_tensor", "int8_token", "int4_block32_zeros", "int8_static8"} <= set(PROBED)


def test_products_are_those_of_the_exported_graph():
    model_map = inspect("gpt2")
    scheme = SCHEMES["int8_mixed"]
    formats = formats_of(model_map, scheme)
    packs = contents_of(model_map, choose(model_map, min_dim=1 << 62), formats).packs
    products = products_of(packs, formats, prompt_rows=128)
    assert len(products) == 49
    assert sum(len(each.layers) for each in products) == 73
    described = {
        (each.in_features, each.out_features): (each.format_name, each.prompt_rows) for each in products
    }
    assert described == {
        (768, 2304): ("int8_tensor", 128),
        (768, 768): ("int8_token", 128),
        (768, 3072): ("int8_tensor", 128),
        (3072, 768): ("int8_token", 128),
        (768, 50257): ("int8_block128", 1),
    }
    assert [each.reads_table for each in products] == [False] * 48 + [True]


def test_every_time_is_measured_once_and_then_read(cache):
    products = [product(), product(64, 200, format_name="int8_tensor", prompt_rows=1), product()]
    done = []

    def build(*arguments):
        done.append(arguments[1:])
        return write_product_probe(*arguments)

    options = {"build": build, "num_bytes": product_bytes, "settings": QUICK}
    told = []
    times = measure_products(products, **options, progress=told.append)
    assert told == [1, 1], "one for each shape"
    assert {(each.in_features, each.format_name, each.rows) for each in times} == {
        (96, FLOAT, 1), (96, FLOAT, 5), (96, "int8_block32", 1), (96, "int8_block32", 5),
        (64, FLOAT, 1), (64, "int8_tensor", 1),
    }  # fmt: skip
    assert all(each.median_us > 0 and each.spread_us >= 0 and each.runs >= 4 for each in times)
    num_built = len(done)
    assert measure_products(products, **options) == times
    assert len(done) == num_built, "nothing is measured twice"
    more = measure_products(products, **options, formats=["int8_block16"])
    assert {each.format_name for each in more} == {FLOAT, "int8_block16", "int8_block32", "int8_tensor"}
    assert len(done) > num_built


def test_a_damaged_or_foreign_cache_is_measured_again(cache):
    options = {"build": write_product_probe, "num_bytes": product_bytes, "settings": QUICK}
    measure_products([product()], **options)
    (path,) = cache.glob("shapes-*.json")
    whole = json.loads(path.read_text())
    label = next(iter(whole["measured"]))
    broken = [
        "{", "[]", json.dumps({**whole, "key": {}}),
        json.dumps({**whole, "measured": {label: {**whole["measured"][label], "median_us": float("nan")}}}),
        json.dumps({**whole, "measured": {label: {"median_us": 1}}}),
    ]  # fmt: skip
    for text in broken:
        path.write_text(text)
        assert shape_times.read_times(whole["key"]) == {}
    assert len(measure_products([product()], **options)) == 4
    assert set(shape_times.read_times(whole["key"])) == set(whole["measured"])


def test_a_shape_that_memory_cannot_hold_is_left_out(cache):
    huge = product(1 << 30, 1 << 30)
    assert measure_products([huge], build=pytest.fail, num_bytes=product_bytes, settings=QUICK) == ()


def test_copies_go_round_the_model_or_well_beyond_the_cache():
    ring = num_copies(2 << 20, 1 << 40)
    assert ring * (2 << 20) > 2 * (cache_bytes() or 0) or ring * (2 << 20) >= 64 << 20
    assert num_copies(2 << 20, 20 << 20) == 10, "a model that fits into the cache is read from there"
    assert num_copies(1000, 3000) == 8, "a run's start is shared"
    assert num_copies(2 << 20, 20 << 20, rows=32) == 5, "many rows are computed longer than read"
