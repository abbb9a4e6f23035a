"""Weights as float32 rows: bit for bit what numpy, ml_dtypes and torch make of the same bytes."""

from __future__ import annotations

import json
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quantkit.errors import InputError
from quantkit.model.weights.headers import match, read_headers
from quantkit.model.weights.tensors import CheckpointTensors, RandomTensors

pytestmark = pytest.mark.once
TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


def edge_values(dtype):
    """Random values beside zeros of both signs, the largest and the smallest of the type."""
    info = torch.finfo(dtype)
    largest = min(info.max, torch.finfo(torch.float32).max)
    special = [0.0, -0.0, largest, -largest, info.tiny, info.smallest_normal / 2, 1.0, -1.0]
    random = torch.randn(7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([torch.tensor([special], dtype=torch.float64), random]).to(dtype)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint32)


def opened(folder, names=None, aliases=None):
    """A folder's tensors, under the names of a model where these are given."""
    stored = read_headers(folder)
    expected = {name: torch.empty(0) for name in names or stored}
    return CheckpointTensors(
        stored=match(stored, expected, prefixes=("transformer.", "model.")) if names else stored,
        aliases=aliases or {},
    )


def written(folder, tensors, name="model.safetensors"):
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    return opened(folder)


def refused(source, name, *rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would be a second line
        with pytest.raises(InputError) as caught:
            source.read(name, *rows)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("stored", TORCH)
def test_every_stored_type_means_what_other_libraries_say(stored, tmp_path):
    values = edge_values(TORCH[stored])
    # An odd tensor first, so that the one that is read does not start at a round offset.
    source = written(tmp_path, {"a": torch.zeros(3, dtype=torch.uint8), "w": values})
    made = source.read("w")
    assert made.dtype == np.float32
    assert (bits(made) == bits(values.float().numpy())).all()
    raw = np.frombuffer(values.view(torch.uint8).numpy().tobytes(), NUMPY[stored]).reshape(8, 8)
    assert (bits(made) == bits(raw.astype(np.float32))).all()


@pytest.mark.parametrize("stored", TORCH)
def test_a_range_of_rows_is_the_slice_of_the_whole(stored, tmp_path):
    source = written(tmp_path, {"w": edge_values(TORCH[stored]), "b": torch.arange(5.0)})
    whole = source.read("w")
    for start in range(8):
        for count in (1, 3, 8, None):
            expected = whole[start : None if count is None else start + count]
            assert (bits(source.read("w", start, count)) == bits(expected)).all()
    assert source.read("b", 2, 2).tolist() == [2.0, 3.0]
    assert source.shape("w") == (8, 8)


def test_tensors_of_any_rank(tmp_path):
    cube = torch.arange(24.0).reshape(4, 3, 2)
    source = written(tmp_path, {"cube": cube, "scalar": torch.tensor(2.5)})
    assert (source.read("cube", 1, 2) == cube[1:3].numpy()).all()
    assert source.read("scalar").tolist() == [2.5]


def test_shards_are_one_checkpoint(tmp_path):
    parts = {
        "one.safetensors": {"a.w": torch.randn(4, 5)},
        "two.safetensors": {"b.w": torch.randn(6, 2).half()},
    }
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = opened(tmp_path)
    for tensors in parts.values():
        for name, tensor in tensors.items():
            assert (source.read(name) == tensor.float().numpy()).all()
    assert source.source_bytes() == 4 * 5 * 4 + 6 * 2 * 2


@pytest.mark.parametrize(
    ("bad", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (-float("inf"), "infinite")]
)
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16", "F64"])
def test_what_is_no_number_is_refused_by_name(bad, word, stored, tmp_path):
    values = torch.ones(40, 8, dtype=TORCH[stored])
    values[30, 3] = bad
    source = written(tmp_path, {"h.0.w": values, "fine": torch.ones(2)})
    for rows in ((), (30, 1), (25, 10), (30,)):
        message = refused(source, "h.0.w", *rows)
        assert "'h.0.w'" in message
        assert word in message
        assert "model.safetensors" in message
        assert " 1 values" in message
    assert (source.read("h.0.w", 0, 30) == 1).all(), "the rows before it are sound"
    assert (source.read("h.0.w", 31) == 1).all()
    assert (source.read("fine") == 1).all()


def test_large_numbers_are_numbers(tmp_path):
    """Their squares do not fit into a float32, and opposite infinities of a sum would be NaN."""
    values = torch.full((50, 50), 3e38)
    values[::2] *= -1
    assert (written(tmp_path, {"w": values}).read("w") == values.numpy()).all()


def test_a_number_beyond_float32_is_refused(tmp_path):
    source = written(tmp_path, {"w": torch.tensor([[1.0, 1e300]], dtype=torch.float64)})
    assert "infinite (F64)" in refused(source, "w")


def test_a_missing_tensor_is_named_with_the_folder(tmp_path):
    source = written(tmp_path, {"h.0.w": torch.ones(2)})
    assert not source.has("h.1.w")
    message = refused(source, "h.1.w")
    assert "'h.1.w'" in message
    assert str(tmp_path) in message


def test_integers_are_no_weights(tmp_path):
    source = written(tmp_path, {"w": torch.ones(2, 2, dtype=torch.int8)})
    message = refused(source, "w")
    assert "I8" in message
    assert "BF16" in message


@pytest.mark.parametrize("stored", ["transformer.h.0.w", "h.0.w"])
@pytest.mark.parametrize("asked", ["transformer.h.0.w", "h.0.w"])
def test_names_with_and_without_the_model_prefix(stored, asked, tmp_path):
    written(tmp_path, {stored: torch.full((2, 2), 7.0), "transformer.h.1.w": torch.zeros(2, 2)})
    assert (opened(tmp_path, [asked]).read(asked) == 7).all()


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "language_model.", "module._orig_mod."])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_inside_of_a_wrapper(wrapper, prefix, tmp_path):
    written(tmp_path, {f"{wrapper}{prefix}h.w": torch.ones(2), "vision.model.h.w": torch.zeros(2)})
    assert opened(tmp_path, ["model.h.w"]).read("model.h.w").tolist() == [1.0, 1.0]


def test_the_exact_name_goes_before_one_without_its_prefix(tmp_path):
    written(tmp_path, {"w": torch.zeros(1), "model.w": torch.ones(1), "other.model.w": torch.full((1,), 2.0)})
    source = opened(tmp_path, ["w", "model.w", "other.model.w"])
    assert source.read("model.w").tolist() == [1.0]
    assert source.read("w").tolist() == [0.0]
    assert source.read("other.model.w").tolist() == [2.0]


def test_a_shared_tensor_is_found_under_any_of_its_names(tmp_path):
    save_file({"lm_head.weight": torch.full((3, 2), 5.0)}, tmp_path / "model.safetensors")
    source = opened(tmp_path, aliases={"wte.weight": ("encoder.wte.weight", "lm_head.weight")})
    assert source.has("wte.weight")
    assert (source.read("wte.weight", 1, 1) == 5).all()
    assert not opened(tmp_path).has("wte.weight")


SHAPES = {"w": (40, 24), "v": (40, 24), "cube": (5, 3, 4), "b.bias": (7,), "n.weight": (7,)}


def test_random_rows_are_the_same_whatever_is_asked_for_first():
    source = RandomTensors(shapes=SHAPES, seed=3)
    whole = source.read("w")
    assert whole.shape == (40, 24)
    assert whole.dtype == np.float32
    for start, count in ((0, 1), (7, 13), (39, 1), (5, None), (38, 10)):
        part = RandomTensors(shapes=SHAPES, seed=3).read("w", start, count)
        assert (part == whole[start : None if count is None else start + count]).all()
    assert source.read("cube", 2, 2).tolist() == source.read("cube")[2:4].tolist()


def test_random_tensors_differ_by_seed_name_and_row():
    first, second = (RandomTensors(shapes=SHAPES, seed=seed).read("w") for seed in (0, 1))
    other = RandomTensors(shapes=SHAPES, seed=0).read("v")
    for a, b in ((first, second), (first, other), (first[:-1], first[1:])):
        assert (a == b).mean() < 0.01
    assert len(np.unique(first)) > 0.99 * first.size


def test_random_weights_spread_as_initialised_ones_do():
    values = RandomTensors(shapes={"w": (500, 400)}).read("w")
    assert abs(values.mean()) < 3 * 0.02 / np.sqrt(values.size) * 2
    assert values.std() == pytest.approx(0.02, rel=0.01)
    assert np.abs(values).max() <= 0.02 * np.sqrt(3) * (1 + 1e-6)


def test_random_biases_and_gains_change_nothing():
    source = RandomTensors(shapes=SHAPES, gain_offset=1.0)
    assert (source.read("b.bias") == 0).all()
    assert (source.read("n.weight") == 0).all(), "the gain is 1 with its offset"
    assert (RandomTensors(shapes=SHAPES).read("n.weight", 2, 3) == np.ones(3)).all()
    assert source.has("w")
    assert not source.has("nowhere")
    assert source.source_bytes() == 4 * (2 * 40 * 24 + 60 + 14)
