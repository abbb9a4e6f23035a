"""The integer cache: what the attention operator stores and computes, beside a naive attention in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from exporting import NOTHING, build_tiny, error, export
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError
from quantkit.export.fused.int8_cache import (
    ATTENTION_OP,
    CACHE_FORMATS,
    HEAD_SINK,
    KEY_SCALE,
    VALUE_SCALE,
    CachePeaks,
    attention_nodes,
    cache_parts,
    quantize_cache,
    scales_of,
    widen,
)
from quantkit.export.graph import CONTRIB
from quantkit.runtime.decoder import positions_of

HEADS, KV_HEADS, WIDTH = 4, 2, 16
GENERATOR = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return GENERATOR.standard_normal(shape).astype(np.float32)


def attention_session(parts):
    """One attention node with the cache that `parts` describe."""
    names = ["q", "k", "v", "past_k", "past_v", "lengths", "total", "", "", "", "", *parts.inputs]
    while not names[-1]:
        names.pop()
    node = helper.make_node(
        ATTENTION_OP, names, ["y", "present_k", "present_v"], domain=CONTRIB,
        num_heads=HEADS, kv_num_heads=KV_HEADS, **parts.attributes,
    )  # fmt: skip
    cache = ["b", KV_HEADS, "p", WIDTH]
    value = helper.make_tensor_value_info
    inputs = [value("q", TensorProto.FLOAT, ["b", "s", HEADS * WIDTH])]
    inputs += [value(name, TensorProto.FLOAT, ["b", "s", KV_HEADS * WIDTH]) for name in "kv"]
    inputs += [value(name, parts.element_type, cache) for name in ("past_k", "past_v")]
    inputs += [value("lengths", TensorProto.INT32, ["b"]), value("total", TensorProto.INT32, [])]
    outputs = [value("y", TensorProto.FLOAT, None)]
    outputs += [value(name, parts.element_type, None) for name in ("present_k", "present_v")]
    constants = [numpy_helper.from_array(array, name) for name, array in parts.constants.items()]
    model = helper.make_model(
        helper.make_graph([node], "one attention", inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)],
        ir_version=10,
    )
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def feeds(batch, length, past_k, past_v):
    past = past_k.shape[2]
    return {
        "q": normal(batch, length, HEADS * WIDTH),
        "k": normal(batch, length, KV_HEADS * WIDTH),
        "v": normal(batch, length, KV_HEADS * WIDTH),
        "past_k": past_k,
        "past_v": past_v,
        "lengths": np.full(batch, past + length - 1, np.int32),
        "total": np.array(past + length, np.int32),
    }


def naive_attention(q, key, value, past):
    """In float64: keys and values [B, H, T, D] of all positions, queries of those after `past`."""
    batch, length, _ = q.shape
    q = q.reshape(batch, length, HEADS, WIDTH).transpose(0, 2, 1, 3).astype(np.float64)
    key, value = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (key, value))
    scores = q @ key.transpose(0, 1, 3, 2) / np.sqrt(WIDTH)
    sees = np.tril(np.ones((length, past + length)), past) > 0
    weights = np.where(sees, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ value).transpose(0, 2, 1, 3).reshape(batch, length, -1)


def heads_of(x):
    return x.reshape(*x.shape[:2], KV_HEADS, WIDTH).transpose(0, 2, 1, 3)


@pytest.mark.once
@pytest.mark.parametrize("sharing", ["channel", "tensor"])
@pytest.mark.parametrize(("batch", "length", "past"), [(1, 7, 0), (2, 7, 0), (1, 1, 9), (2, 1, 9), (1, 3, 9)])
def test_the_operator_rounds_as_it_stores_and_attends_to_what_it_stored(sharing, batch, length, past):
    peaks = CachePeaks(
        key_HD=np.abs(normal(KV_HEADS, WIDTH)) + 2,
        value_HD=np.abs(normal(KV_HEADS, WIDTH)) + 2,
        num_positions=1,
    )
    parts = cache_parts("attention", "int8", peaks, sharing=sharing)
    scales = [each.astype(np.float64) for each in parts.constants.values()]
    pasts = [GENERATOR.integers(-127, 128, (batch, KV_HEADS, past, WIDTH)).astype(np.int8) for _ in range(2)]
    given = feeds(batch, length, *pasts)
    y, *presents = attention_session(parts).run(None, given)
    values = []
    for name, scale, old, stored in zip("kv", scales, pasts, presents, strict=True):
        new = np.clip(np.rint(heads_of(given[name]) / scale), -128, 127)
        np.testing.assert_array_equal(stored, np.concatenate([old, new], axis=2))
        values.append(stored * scale)
    wanted = naive_attention(given["q"], *values, past)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.once
def test_a_float_cache_needs_nothing():
    parts = cache_parts("attention", "float32")
    given = feeds(1, 5, *(np.zeros((1, KV_HEADS, 0, WIDTH), np.float32) for _ in range(2)))
    y, key, value = attention_session(parts).run(None, given)
    np.testing.assert_array_equal(key, heads_of(given["k"]))
    np.testing.assert_allclose(
        y, naive_attention(given["q"], key.astype(np.float64), value, 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.once
@pytest.mark.parametrize("sharing", ["channel", "tensor"])
@settings(deadline=None, max_examples=40)
@given(values=hnp.arrays(np.float32, (2, 5), elements=st.floats(0, 2.0**100, width=32)))
def test_what_was_seen_is_within_half_a_step_and_never_cut_off(sharing, values):
    scales = scales_of(values, sharing)
    scales = np.broadcast_to(scales if sharing == "tensor" else scales[0, :, 0], values.shape)
    assert (scales > 0).all()
    codes = np.rint(values.astype(np.float64) / scales)
    assert codes.max() <= 127
    assert (np.abs(codes * scales - values) <= scales.astype(np.float64) * 0.5 * (1 + 1e-6)).all()


@pytest.mark.once
def test_a_channel_that_was_always_zero_gets_the_widest_range():
    scales = scales_of(np.array([[0, 2, 254]], np.float32))
    np.testing.assert_allclose(scales, np.array([2, 2 / 127, 2]).reshape(1, 1, 1, 3), rtol=1e-6)


@pytest.mark.once
@settings(deadline=None, max_examples=30)
@given(angle=st.floats(0, 7), part=st.integers(0, 3))
def test_no_angle_of_rotation_leaves_the_range_of_a_rotated_pair(angle, part):
    """Partial rotation: the first 8 of 16 channels turn, channel i with channel i + 4."""
    key = normal(1, 1, 6, WIDTH)
    peaks = widen(None, key, key, where="block 0", rotary_dim=8)
    turned = key.astype(np.float64)
    low, high = key[..., part].astype(np.float64), key[..., part + 4].astype(np.float64)
    turned[..., part] = low * np.cos(angle) - high * np.sin(angle)
    turned[..., part + 4] = high * np.cos(angle) + low * np.sin(angle)
    assert (np.abs(turned) <= peaks.key_HD[:, None, :] * (1 + 1e-6)).all()
    np.testing.assert_array_equal(peaks.key_HD[0, 8:], np.abs(key[0, 0, :, 8:]).max(axis=0))
    np.testing.assert_array_equal(peaks.value_HD, np.abs(key[0]).max(axis=1))


@pytest.mark.once
def test_peaks_of_several_texts_are_those_of_all():
    texts = [normal(2, KV_HEADS, length, WIDTH) for length in (3, 8)]
    seen = None
    for text in texts:
        seen = widen(seen, text, 2 * text, where="block 0")
    whole = np.concatenate(texts, axis=2)
    np.testing.assert_array_equal(seen.key_HD, np.abs(whole).max(axis=(0, 2)))
    np.testing.assert_array_equal(seen.value_HD, 2 * seen.key_HD)
    assert seen.num_positions == 2 * 11


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "words"),
    [(lambda key: key[:, :, :0], "no position"), (lambda key: key * np.float32(np.nan), "not finite")],
)
def test_a_cache_that_teaches_nothing_is_named(change, words):
    key = change(normal(1, KV_HEADS, 4, WIDTH))
    with pytest.raises(InputError, match=words) as caught:
        widen(None, key, key, where="transformer.h.3")
    assert "transformer.h.3" in str(caught.value)


@pytest.mark.once
def test_formats_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="float32, int8"):
        cache_parts("attention", "int3")
    with pytest.raises(InputError, match="not calibrated"):
        cache_parts("attention", "int8")
    assert set(CACHE_FORMATS) == {"float32", "int8"}


TINY = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 61, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        },
    ),
}  # fmt: skip
IDS = np.random.default_rng(1).integers(0, 61, (2, 40))


@pytest.fixture(scope="module", params=TINY)
def float_model(request, tmp_path_factory):
    """(the exported float decoder, how many of its key channels turn)."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    build_tiny(*TINY[request.param]).save_pretrained(source)
    export(source, out, min_dim=NOTHING)
    return onnx.load(out / "model.onnx"), {"gpt2": None, "llama": 16}[request.param]


def open_model(model):
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def run_model(session, ids, past=None, mask=None):
    """(logits of all given positions, caches by name of the input that they go to)."""
    pasts = [each for each in session.get_inputs() if each.name.startswith("past")]
    kind = np.int8 if "int8" in pasts[0].type else np.float32
    empty = {each.name: np.zeros((len(ids), each.shape[1], 0, each.shape[3]), kind) for each in pasts}
    past = past or empty
    before = next(iter(past.values())).shape[2]
    mask = np.ones((len(ids), before + ids.shape[1]), np.int64) if mask is None else mask
    given = {"input_ids": ids, "position_ids": positions_of(mask, ids.shape[1])}
    given["attention_mask"] = mask * ids.shape[1]  # logits of all
    names = [each.name for each in session.get_outputs()]
    made = dict(zip(names, session.run(names, {**given, **past}), strict=True))
    logits = made.pop("logits")
    return logits, {name.replace("present", "past_key_values"): value for name, value in made.items()}


def peaks_of(caches, rotary_dim):
    pairs = zip(*[iter(caches.values())] * 2, strict=True)
    return [widen(None, *pair, where=f"block {i}", rotary_dim=rotary_dim) for i, pair in enumerate(pairs)]


def test_a_decoder_with_an_integer_cache_answers_as_before(float_model):
    model, rotary_dim = float_model
    wanted, caches = run_model(open_model(model), IDS)
    quantized = quantize_cache(model, peaks_of(caches, rotary_dim))
    session = open_model(quantized)
    logits, stored = run_model(session, IDS)
    made = error(logits, wanted)
    assert 1e-6 < made.relative < 0.02, "the rounding shows, and is small"
    assert made.absolute < 0.02 * np.abs(wanted).max()
    for (name, floats), codes in zip(caches.items(), stored.values(), strict=True):
        assert codes.dtype == np.int8
        assert 4 * codes.nbytes == floats.nbytes, name
        assert np.abs(codes.astype(int)).max() <= 128
    # token by token the same numbers are stored and read as at once
    first, past = run_model(session, IDS[:1, :20])
    pieces = [first]
    for position in range(20, 26):
        logits_1, past = run_model(session, IDS[:1, position : position + 1], past)
        pieces.append(logits_1)
    assert error(np.concatenate(pieces, axis=1), logits[:1, :26]).relative < 0.02


def test_rows_padded_on_the_left_answer_as_alone(float_model):
    model, rotary_dim = float_model
    _, caches = run_model(open_model(model), IDS)
    session = open_model(quantize_cache(model, peaks_of(caches, rotary_dim)))
    mask = np.ones((2, 12), np.int64)
    mask[1, :5] = 0
    together, _ = run_model(session, IDS[:, :12], mask=mask)
    alone, _ = run_model(session, IDS[1:, 5:12])
    assert error(together[1:, 5:], alone).relative < 0.02


def test_only_the_caches_change(float_model):
    model, rotary_dim = float_model
    _, caches = run_model(open_model(model), IDS)
    before = model.SerializeToString(deterministic=True)
    made = quantize_cache(model, peaks_of(caches, rotary_dim))
    assert model.SerializeToString(deterministic=True) == before, "the given model is left alone"
    for node in attention_nodes(made):
        assert node.input[HEAD_SINK] == ""
        assert [node.input[KEY_SCALE], node.input[VALUE_SCALE]] == [
            f"{node.name}/key_scale", f"{node.name}/value_scale"
        ]  # fmt: skip
    others = [
        [node.SerializeToString() for node in each.graph.node if node.op_type != ATTENTION_OP]
        for each in (model, made)
    ]
    assert others[0] == others[1]
    assert (
        quantize_cache(model, peaks_of(caches, None), cache_format="float32").graph.input == model.graph.input
    )
    with pytest.raises(InputError, match="2 attentions"):
        quantize_cache(model, peaks_of(caches, None)[:1])
