"""Heads of 16 bits, kept as two halves of 8 that the embedding reads too: whole pipeline, from both sides."""

from __future__ import annotations

import functools
import json

import numpy as np
import onnx
import pytest
import torch
from commands import quantkit
from exporting import build_tiny, error
from fake_quantize import pack_values
from hypothesis import given
from hypothesis import strategies as st
from stored import open_checkpoint

from quantkit.model.families import FAMILIES
from quantkit.plan.formats import BITS_IN_HALVES, LARGEST_IN_HALVES, Grid
from quantkit.quantization.grid import decode, encode, from_halves, halves_of, range_of
from quantkit.runtime.providers.table import PROVIDERS, plugin_devices
from quantkit.runtime.static_decoder import StaticRow, join, open_static_session, run_prompt

pytestmark = pytest.mark.once

GRID = Grid(bits=BITS_IN_HALVES)
VOCABULARY, PROMPT, CACHE = 320, 12, 24
QUICK = "calibration: {windows: 8, length: 24}\nmeasure: {accuracy: false, latency: false, memory: false}\n"
# tied; tied and scaled; with a table and a head of their own
DECODERS = ["gpt2", "gemma", "gpt_neox"]
HAS_QNN = bool(plugin_devices(PROVIDERS["qnn"]))


@given(codes=st.lists(st.integers(-LARGEST_IN_HALVES, LARGEST_IN_HALVES), min_size=1, max_size=20))
def test_two_halves_are_the_code(codes):
    high, low = halves_of(np.array(codes, np.int16))
    assert high.dtype == low.dtype == np.int8
    assert [256 * int(a) + int(b) for a, b in zip(high, low, strict=True)] == codes
    assert from_halves(high, low).tolist() == codes


def test_a_weight_is_within_half_a_step():
    weight_OI = np.random.default_rng(0).normal(size=(9, 33)).astype(np.float32)
    weight_OI[4] = 0
    scales, zeros = range_of(weight_OI, GRID)
    codes = encode(weight_OI, scales, GRID)
    assert zeros is None
    assert codes.dtype == np.int16
    assert np.abs(codes.astype(int)).max() == LARGEST_IN_HALVES
    off = np.abs(decode(codes, scales, 33).astype(np.float64) - weight_OI)
    assert (off <= 0.51 * scales).all()
    assert GRID.num_bytes(9, 33) == 9 * (33 * 2 + 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(artifact, its model in torch) by family."""

    @functools.cache
    def ask(name: str):
        folder = tmp_path_factory.mktemp(name)
        row = FAMILIES[name]
        model = build_tiny(row.tiny_class, {**row.tiny, "vocab_size": VOCABULARY})
        model.save_pretrained(folder / "model")
        (folder / "quick.yaml").write_text(QUICK)
        np.save(folder / "ids.npy", np.random.default_rng(1).integers(1, VOCABULARY, 8 * 24 + 1))
        texts = ("--recipe", str(folder / "quick.yaml"), "--calibration-text", str(folder / "ids.npy"))
        lengths = ("--prompt-length", str(PROMPT), "--cache-length", str(CACHE))
        ways = ("--min-dim", "1", "--target", "npu", "--keep-checkpoint", "--transform", "none")
        ran = quantkit("quantize", str(folder / "model"), *ways, *texts, *lengths, "-o", str(folder / "out"))
        assert ran.returncode == 0, ran.stderr
        return folder / "out", model

    return ask


@pytest.mark.parametrize("name", DECODERS)
def test_the_checkpoint_holds_the_original_to_half_a_step(name, made):
    folder, model = made(name)
    checkpoint = open_checkpoint(folder / "weights.safetensors")
    (head,) = (each for each in checkpoint.description["packs"] if each["grid"]["bits"] == BITS_IN_HALVES)
    wanted = model.get_output_embeddings().weight.detach().double().numpy()
    found = pack_values(checkpoint, head).astype(np.float64)
    steps = np.abs(wanted).max(axis=1, keepdims=True) / LARGEST_IN_HALVES
    assert (np.abs(found - wanted) <= 0.51 * steps).all()
    (table,) = (
        each for each in checkpoint.description["tables"] if each["name"].endswith(("wte", "tokens", "in"))
    )
    is_tied = model.config.tie_word_embeddings
    assert table["shares"] == (head["name"] if is_tied else None)


@pytest.mark.parametrize("name", DECODERS)
def test_one_copy_serves_the_embedding_and_the_head(name, made):
    folder, model = made(name)
    places = {}
    for graph in ("prompt", "decode"):
        for tensor in onnx.load(folder / f"{graph}.onnx", load_external_data=False).graph.initializer:
            entries = {each.key: each.value for each in tensor.external_data}
            if list(tensor.dims) == list(model.get_output_embeddings().weight.shape):
                assert tensor.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT16)
                places.setdefault(tensor.name.rsplit("/", 1)[-1].rsplit(".", 1)[-1], set()).add(
                    entries["offset"]
                )
    is_tied = model.config.tie_word_embeddings
    assert set(places) == {"high", "low"} | (set() if is_tied else {"codes"})
    assert all(len(each) == 1 for each in places.values()), "two graphs, and in each two readers"


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_the_models(name, made):
    folder, model = made(name)
    ids = np.random.default_rng(2).integers(1, VOCABULARY, 20)
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(ids[None])).logits[0].numpy()
    logits = decoded(folder, ids, "cpu")
    found = error(logits, wanted[7:])
    assert 1e-6 < found.relative < 0.03
    assert found.absolute < 0.03 * np.abs(wanted).max()
    report = json.loads((folder / "report.json").read_text())
    (head,) = (each for each in report["layer_losses"] if each["format"].startswith("int16"))
    assert 0 < head["weight_error"] < 1e-4


@pytest.mark.qnn
@pytest.mark.skipif(not HAS_QNN, reason=f"no QNN plugin: {PROVIDERS['qnn'].install}")
@pytest.mark.parametrize("name", DECODERS)
def test_an_npu_computes_what_the_cpu_computes(name, made):
    ids = np.random.default_rng(3).integers(1, VOCABULARY, 20)
    npu, cpu = (decoded(made(name)[0], ids, provider) for provider in ("qnn", "cpu"))
    assert error(npu, cpu).relative < 0.02


def decoded(folder, ids, provider):
    decoder = join(
        *(open_static_session(folder / f"{kind}.onnx", provider=provider) for kind in ("prompt", "decode"))
    )
    row = StaticRow(decoder=decoder, prompt=ids[:8])
    logits = row.read()
    return np.concatenate([logits, *(row.step(int(token)) for token in ids[8:])])


def test_a_prompt_that_fills_its_graph(made):
    folder, model = made("gpt2")
    ids = np.random.default_rng(4).integers(1, VOCABULARY, PROMPT)
    session = open_static_session(folder / "prompt.onnx")
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(ids[None])).logits[0, -1].numpy()
    assert error(run_prompt(session, ids)[0].reshape(-1), wanted).relative < 0.03
