"""Scales against the papers' formulas written out by channel, and the search against every candidate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from doubles import subject

from quantkit.errors import InputError
from quantkit.quantization.transforms.alpha import search_alpha
from quantkit.quantization.transforms.draft import opened
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.smoothquant import (
    pooled_statistic,
    smooth,
    smoothable,
    smoothing_scales,
    weight_peaks,
)
from quantkit.quantization.transforms.spaces import spaces_of


def int8_tensor(x):
    """One scale for everything, as the coarsest activations have it."""
    scale = np.abs(x).max() / 127
    return np.round(x / scale) * scale


def int4_rows(weight_OI):
    scale = np.abs(weight_OI).max(axis=1, keepdims=True) / 7
    return np.round(weight_OI / scale) * scale


def int8_rows(weight_OI):
    scale = np.abs(weight_OI).max(axis=1, keepdims=True) / 127
    return np.round(weight_OI / scale) * scale


def plain(x):
    return x


@pytest.fixture
def llama(tmp_path):
    return subject("llama", 0, tmp_path)


@pytest.fixture
def gpt2(tmp_path):
    return subject("gpt2", 0, tmp_path)


def space_of(given, name):
    return next(space for space in spaces_of(given.map) if space.name == name)


@pytest.mark.once
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_the_formula(alpha):
    seen, weights = np.array([1.0, 10.0, 100.0, 3.0]), np.array([0.5, 0.1, 0.2, 4.0])
    wanted = [s**alpha / w ** (1 - alpha) for s, w in zip(seen, weights, strict=True)]
    mean = math.prod(wanted) ** 0.25
    made = smoothing_scales(seen, weights, alpha)
    np.testing.assert_allclose(made, np.array(wanted) / mean, rtol=1e-12)
    awq = smoothing_scales(seen, None, alpha)
    np.testing.assert_allclose(awq / awq[0], seen**alpha, rtol=1e-12)


@pytest.mark.once
def test_dead_channels_are_left_alone_and_scales_are_bounded():
    seen = np.array([0.0, 1.0, np.nan, 1e30, np.inf, 1e-30, 2.0])
    weights = np.array([1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    made = smoothing_scales(seen, weights, 0.9)
    assert (made[[0, 1, 2, 4]] == 1).all()
    assert np.isfinite(made).all()
    assert made.min() >= 1e-3 * (1 - 1e-12)
    assert made.max() <= 1e3 * (1 + 1e-12)
    assert (smoothing_scales(np.zeros(5), np.ones(5), 0.5) == 1).all()


def test_statistics_of_query_heads_are_pooled(llama):
    space = space_of(llama, "model.layers.0.value_heads")
    reader = "model.layers.0.self_attn.o_proj"
    values = np.random.default_rng(0).random(32)
    pooled = pooled_statistic(llama.map, space, {reader: values})
    for head in range(2):
        for channel in range(8):
            pair = [values[(2 * head + query) * 8 + channel] for query in range(2)]
            assert pooled[head * 8 + channel] == max(pair)
    assert pooled_statistic(llama.map, space, {}) is None
    peaks = weight_peaks(llama.map, opened(llama.map, llama.tensors), space)
    columns = np.abs(llama.tensors.read(f"{reader}.weight")).max(axis=0).reshape(2, 2, 8).max(axis=1)
    np.testing.assert_array_equal(peaks, columns.reshape(-1).astype(np.float64))


def test_weight_peaks_are_over_all_readers_however_they_are_stored(gpt2, llama):
    peaks = weight_peaks(gpt2.map, opened(gpt2.map, gpt2.tensors), space_of(gpt2, "transformer.h.0.ln_1"))
    stored_IO = gpt2.tensors.read("transformer.h.0.attn.c_attn.weight")
    np.testing.assert_array_equal(peaks, np.abs(stored_IO).max(axis=1).astype(np.float64))
    name = "model.layers.1.self_attn."
    peaks = weight_peaks(
        llama.map,
        opened(llama.map, llama.tensors),
        space_of(llama, "model.layers.1.input_layernorm"),
    )
    rows = np.concatenate([llama.tensors.read(f"{name}{part}_proj.weight") for part in "qkv"])
    np.testing.assert_array_equal(peaks, np.abs(rows).max(axis=0).astype(np.float64))


def test_a_gate_is_not_scaled(llama):
    block = "model.layers.0"
    statistics = {f"{block}.mlp.down_proj": np.arange(1.0, 49.0)}
    _, tensors = smooth(
        llama.map, llama.tensors, TransformSettings(statistics=statistics, alpha={f"{block}.ffn_hidden": 0.5})
    )
    for name, is_changed in (("gate", False), ("up", True), ("down", True)):
        full = f"{block}.mlp.{name}_proj.weight"
        assert np.array_equal(tensors.read(full), llama.tensors.read(full)) != is_changed
    peaks = np.abs(llama.tensors.read(f"{block}.mlp.down_proj.weight")).max(axis=0).astype(np.float64)
    scales = np.sqrt(np.arange(1.0, 49.0) / peaks)
    scales /= np.exp(np.log(scales).mean())
    np.testing.assert_allclose(
        tensors.read(f"{block}.mlp.up_proj.weight"),
        llama.tensors.read(f"{block}.mlp.up_proj.weight") / scales[:, None],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        tensors.read(f"{block}.mlp.down_proj.weight"),
        llama.tensors.read(f"{block}.mlp.down_proj.weight") * scales,
        rtol=1e-6,
    )


def test_spaces_without_a_strength_stay(llama):
    statistics = {layer.matrix: np.arange(1.0, layer.in_features + 1) for layer in llama.map.layers}
    names = smoothable(llama.map)
    assert len(names) == 4 + 1 + 2 + 2
    alpha = {names[0]: 0.5, names[1]: None}
    _, tensors = smooth(llama.map, llama.tensors, TransformSettings(statistics=statistics, alpha=alpha))
    assert not np.array_equal(tensors.read(f"{names[0]}.weight"), llama.tensors.read(f"{names[0]}.weight"))
    for name in names[1:3]:
        if llama.tensors.has(f"{name}.weight"):
            assert np.array_equal(tensors.read(f"{name}.weight"), llama.tensors.read(f"{name}.weight"))
    model_map, tensors = smooth(llama.map, llama.tensors, TransformSettings(statistics=statistics, alpha={}))
    assert model_map == llama.map


def test_what_was_not_seen_or_is_not_known_is_said(gpt2):
    with pytest.raises(InputError, match="no space of it can be smoothed"):
        smooth(gpt2.map, gpt2.tensors, TransformSettings(statistics={}))
    statistics = {layer.matrix: np.ones(layer.in_features) for layer in gpt2.map.layers}
    with pytest.raises(InputError, match="GELU"):
        smooth(
            gpt2.map,
            gpt2.tensors,
            TransformSettings(statistics=statistics, alpha={"transformer.h.0.ffn_hidden": 0.5}),
        )
    with pytest.raises(InputError, match="no space 'nothing'"):
        smooth(gpt2.map, gpt2.tensors, TransformSettings(statistics=statistics, alpha={"nothing": 0.5}))


@pytest.mark.parametrize("rule", ["smoothquant", "awq"])
@pytest.mark.parametrize("name", ["model.layers.0.input_layernorm", "model.layers.0.value_heads"])
def test_the_search_tries_every_strength(llama, rule, name):
    space = space_of(llama, name)
    readers = [layer for layer in llama.map.layers if layer.name in space.readers]
    random = np.random.default_rng(0)
    x_TI = random.normal(size=(40, readers[0].in_features)) * np.exp(
        2 * random.normal(size=readers[0].in_features)
    )
    statistic = np.abs(x_TI).max(axis=0) if rule == "smoothquant" else np.abs(x_TI).mean(axis=0)
    statistics = {readers[0].matrix: statistic}
    choice = search_alpha(
        llama.map, llama.tensors, space, sample_TI=x_TI, statistics=statistics,
        round_inputs=int8_tensor, round_weights=int8_rows, rule=rule, grid=(0.0, 0.4, 0.8),
    )  # fmt: skip
    weight_OI = np.concatenate([llama.tensors.read(f"{r.matrix}.weight") for r in readers]).astype(np.float64)
    peaks = np.abs(weight_OI).max(axis=0)
    group = space.num_heads // space.num_kv_heads if space.kind == "value_heads" else 1
    pool = (lambda v: v.reshape(2, group, 8).max(axis=1).reshape(-1)) if group > 1 else plain
    spread = (lambda v: np.repeat(v.reshape(2, 8), group, axis=0).reshape(-1)) if group > 1 else plain
    errors = {}
    for alpha in (None, 0.0, 0.4, 0.8):
        scales = np.ones(len(statistic))
        if alpha is not None:
            raw = pool(statistic) ** alpha
            raw = raw / pool(peaks) ** (1 - alpha) if rule == "smoothquant" else raw
            scales = spread(raw / np.exp(np.log(raw).mean()))
        made = int8_tensor(x_TI / scales) @ int8_rows(weight_OI * scales).T
        errors[alpha] = ((made - x_TI @ weight_OI.T) ** 2).sum()
    # A value on the border of two codes may round either way in float32.
    assert choice.plain_error == pytest.approx(errors[None], rel=1e-3)
    assert choice.error == pytest.approx(errors[choice.alpha], rel=1e-3)
    assert choice.alpha == min(errors, key=errors.get)
    assert choice.error < 0.5 * choice.plain_error, "channels this uneven are rescued"
    assert choice.space == name


def test_a_sample_that_smoothing_cannot_help_is_left_alone(llama):
    """Even inputs that are not rounded, with weights whose rows already fill their grid."""
    space = space_of(llama, "model.layers.0.input_layernorm")
    x_TI = np.random.default_rng(0).normal(size=(64, 32))
    reader = "model.layers.0.self_attn.q_proj"
    choice = search_alpha(
        llama.map, llama.tensors, space, sample_TI=x_TI, statistics={reader: np.abs(x_TI).max(axis=0)},
        round_inputs=plain, round_weights=plain,
    )  # fmt: skip
    assert choice.plain_error == 0
    assert choice.alpha is None


def test_weights_alone_by_mean_magnitudes(gpt2):
    """What AWQ is for: INT4 rows keep the columns that large inputs meet."""
    space = space_of(gpt2, "transformer.h.0.ln_2")
    random = np.random.default_rng(0)
    x_TI = random.normal(size=(200, 32))
    x_TI[:, 3] *= 30
    choice = search_alpha(
        gpt2.map, gpt2.tensors, space, sample_TI=x_TI, rule="awq",
        statistics={"transformer.h.0.mlp.c_fc": np.abs(x_TI).mean(axis=0)},
        round_inputs=plain, round_weights=int4_rows,
    )  # fmt: skip
    assert choice.alpha is not None
    assert choice.error < 0.7 * choice.plain_error


def test_nothing_was_seen(llama):
    space = space_of(llama, "model.layers.0.input_layernorm")
    options = {"round_inputs": plain, "round_weights": plain}
    assert (
        search_alpha(llama.map, llama.tensors, space, sample_TI=np.ones((3, 32)), statistics={}, **options)
        is None
    )
