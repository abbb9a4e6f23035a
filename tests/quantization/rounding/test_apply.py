"""A whole model quantized as it is read, against plain rounding of transformers' own weights.

Where each projection's rows lie is written out here by hand for every way to fuse them, and the file is read
with json and numpy alone, so that nothing of quantkit is its own witness.
"""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from exporting import NOTHING, build_tiny
from layers import one_layer
from stored import stored_scale

from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.model_map import Rows
from quantkit.model.weights.headers import read_headers
from quantkit.model.weights.open import open_weights
from quantkit.model.weights.tensors import CheckpointTensors
from quantkit.plan.formats import Format, Grid, in_blocks
from quantkit.plan.select import choose
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.grid import decode, from_bytes
from quantkit.quantization.layout import Contents, Pack, contents_of
from quantkit.quantization.projections import runs_of
from quantkit.quantization.rounding import FITS
from quantkit.quantization.rounding.apply import quantized_parts

HIDDEN, HEADS, FFN = 40, 4, 72  # no multiples of the block
BLOCK = 32
PLAIN = {
    "vocab_size": 61,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 40,
}


def gpt2(state):
    block = "transformer.h.1"
    return {
        f"{block}.attn.c_attn": state[f"{block}.attn.c_attn.weight"].T,
        f"{block}.attn.c_proj": state[f"{block}.attn.c_proj.weight"].T,
        f"{block}.mlp.c_fc": state[f"{block}.mlp.c_fc.weight"].T,
        f"{block}.mlp.c_proj": state[f"{block}.mlp.c_proj.weight"].T,
        "transformer.wpe": state["transformer.wpe.weight"],
        "lm_head": state["transformer.wte.weight"],
    }, {
        f"{block}.attn.c_attn": state[f"{block}.attn.c_attn.bias"],
        f"{block}.mlp.c_fc": state[f"{block}.mlp.c_fc.bias"],
    }


def phi3(state):
    block = "model.layers.1"
    gate_up = state[f"{block}.mlp.gate_up_proj.weight"]
    return {
        f"{block}.self_attn.qkv_proj": state[f"{block}.self_attn.qkv_proj.weight"],
        f"{block}.self_attn.o_proj": state[f"{block}.self_attn.o_proj.weight"],
        f"{block}.mlp.gate_up_proj[gate]": gate_up[:FFN],
        f"{block}.mlp.gate_up_proj[up]": gate_up[FFN:],
        f"{block}.mlp.down_proj": state[f"{block}.mlp.down_proj.weight"],
        "lm_head": state["lm_head.weight"],
        "model.embed_tokens": state["model.embed_tokens.weight"],
    }, {}


def gpt_neox(state):
    name = "gpt_neox.layers.1.attention.query_key_value"

    def by_role(fused):  # stored head by head: query, key and value of the first head, then of the second
        size = HIDDEN // HEADS
        rows = [
            3 * size * head + size * role + row
            for role in range(3)
            for head in range(HEADS)
            for row in range(size)
        ]
        return fused[rows]

    return {
        name: by_role(state[f"{name}.weight"]),
        "gpt_neox.layers.0.mlp.dense_4h_to_h": state["gpt_neox.layers.0.mlp.dense_4h_to_h.weight"],
        "embed_out": state["embed_out.weight"],
        "gpt_neox.embed_in": state["gpt_neox.embed_in.weight"],
    }, {name: by_role(state[f"{name}.bias"])}


def llama(state):
    attention = "model.layers.1.self_attn"
    parts = [state[f"{attention}.{name}_proj.weight"] for name in "qkv"]
    return {
        f"{attention}.q_proj+k_proj+v_proj": np.concatenate(parts),
        f"{attention}.o_proj": state[f"{attention}.o_proj.weight"],
        "model.layers.0.mlp.gate_proj": state["model.layers.0.mlp.gate_proj.weight"],
        "lm_head": state["lm_head.weight"],
        "model.embed_tokens": state["model.embed_tokens.weight"],
    }, {}


def tied_llama(state):
    weights, biases = llama(state)
    del weights["model.embed_tokens"]  # it is the head's
    return weights, biases


GPT2_SIZES = {"vocab_size": 61, "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": 40}
CASES = {
    "gpt2": ("GPT2LMHeadModel", GPT2_SIZES, gpt2),
    "phi3": ("Phi3ForCausalLM", {**PLAIN, "num_key_value_heads": 2, "pad_token_id": 0}, phi3),
    "gpt_neox": ("GPTNeoXForCausalLM", PLAIN, gpt_neox),
    "llama": ("LlamaForCausalLM", {**PLAIN, "num_key_value_heads": 2}, llama),
    "tied llama": ("LlamaForCausalLM", {**PLAIN, "tie_word_embeddings": True}, tied_llama),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder, map and state of each model."""
    made = {}
    for name, (model_class, sizes, _) in CASES.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        model = build_tiny(model_class, sizes)
        model.save_pretrained(folder)
        state = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
        state.setdefault("embed_out.weight", state.get("lm_head.weight"))  # renamed in transformers 5
        made[name] = (folder, inspect(str(folder)), state)
    return made


def a_format(grid):
    return Format(grid=grid, activations="block" if grid.block else "tensor")


def write(model, path, *, grid, min_dim=1, **options):
    folder, model_map, _ = model
    contents = contents_of(model_map, choose(model_map, min_dim=min_dim), a_format(grid))
    source = open_weights(open_source(str(folder)), model_map, random_weights=False)
    parts = quantized_parts(contents, source, **options)
    write_checkpoint(path, contents.tensors(), parts, {})
    return path.read_bytes()


def read(raw):
    """A safetensors file, naively."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    kinds = {"F32": np.float32, "F16": np.float16, "U8": np.uint8, "I8": np.int8}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(raw[first:last], kinds[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def naive(weight_OI, size):
    """(codes, scales) of every block, one after the other."""
    rows, columns = weight_OI.shape
    codes = np.zeros((rows, -(-columns // size), size), int)
    scales = np.zeros(codes.shape[:2], np.float32)
    for row in range(rows):
        for block, start in enumerate(range(0, columns, size)):
            values = weight_OI[row, start : start + size]
            scale = np.abs(values).max() / np.float32(127)
            scales[row, block] = stored_scale(scale) if size == BLOCK else scale
            codes[row, block, : len(values)] = np.round(values / scales[row, block])
    return codes, scales


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_plain_rounding_of_the_original_rows(name, models, tmp_path):
    stored = read(write(models[name], tmp_path / "w", grid=Grid(block=BLOCK)))
    weights, biases = CASES[name][2](models[name][2])
    for pack, weight_OI in weights.items():
        codes, scales = naive(weight_OI, BLOCK)
        assert (stored[f"{pack}.scales"] == scales).all(), pack
        assert (stored[f"{pack}.codes"].astype(int) - 128 == codes).all(), pack
    for pack, bias in biases.items():
        assert (stored[f"{pack}.bias"] == bias).all()


@pytest.mark.parametrize("name", CASES)
def test_channels_are_plain_rounding_of_the_original_rows(name, models, tmp_path):
    stored = read(write(models[name], tmp_path / "w", grid=Grid()))
    for pack, weight_OI in CASES[name][2](models[name][2])[0].items():
        codes, scales = naive(weight_OI, weight_OI.shape[1])
        if f"{pack}.codes" in stored:  # a table of its own is read row by row
            assert pack.rsplit(".", 1)[-1] in ("wpe", "embed_tokens", "embed_in")
            assert (stored[f"{pack}.codes"].astype(int) - 128 == codes).all(), pack
        else:
            assert (codes[:, 0] == stored[f"{pack}.codes_IO"].T).all(), pack
        assert (stored[f"{pack}.scales"].reshape(-1) == scales[:, 0]).all(), pack


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_planned_is_the_original(name, models, tmp_path):
    stored = read(write(models[name], tmp_path / "w", grid=Grid(block=BLOCK), min_dim=NOTHING))
    for pack, weight_OI in CASES[name][2](models[name][2])[0].items():
        if f"{pack}.weight_IO" in stored:
            assert (weight_OI == stored[f"{pack}.weight_IO"].T).all()
        elif f"{pack}.weight" in stored:
            assert (stored[f"{pack}.weight"] == weight_OI).all()
        else:
            assert pack == "lm_head", "a tied head reads its table"
    assert not any(name.endswith(("codes", "codes_IO", "scales")) for name in stored)


def test_norms_are_the_original_and_the_gain_offset_goes_into_the_gain(models, tmp_path):
    state = models["gpt2"][2]
    stored = read(write(models["gpt2"], tmp_path / "a", grid=Grid(block=BLOCK)))
    moved = read(write(models["gpt2"], tmp_path / "b", grid=Grid(block=BLOCK), gain_offset=1.0))
    for name in ("transformer.h.0.ln_2", "transformer.ln_f"):
        assert (stored[f"{name}.weight"] == state[f"{name}.weight"]).all()
        assert (stored[f"{name}.bias"] == state[f"{name}.bias"]).all()
        assert (moved[f"{name}.weight"] == state[f"{name}.weight"] + np.float32(1)).all()
        assert (moved[f"{name}.bias"] == state[f"{name}.bias"]).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("grid", [Grid(block=BLOCK), Grid()], ids=["block", "channel"])
@pytest.mark.parametrize("min_dim", [1, HIDDEN + 1, NOTHING], ids=["all", "some", "none"])
def test_progress_adds_up_to_all_weights_of_projections(name, grid, min_dim, models, tmp_path):
    """Padding is no progress, nor is a table that no projection reads: a bar must end at its total."""
    told = []
    write(models[name], tmp_path / "w", grid=grid, min_dim=min_dim, progress=told.append)
    assert min(told) > 0
    assert sum(told) == sum(layer.num_weights for layer in models[name][1].layers)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
@pytest.mark.parametrize("grid", [Grid(block=BLOCK), Grid()], ids=["block", "channel"])
def test_threads_and_chunks_do_not_change_a_byte(name, grid, models, tmp_path, monkeypatch):
    alone = write(models[name], tmp_path / "a", grid=grid, threads=1)
    assert write(models[name], tmp_path / "b", grid=grid, threads=4) == alone
    monkeypatch.setattr(
        "quantkit.quantization.rounding.apply.CHUNK_VALUES", 3 * HIDDEN
    )  # a few rows at a time
    assert write(models[name], tmp_path / "c", grid=grid, threads=4) == alone


@pytest.mark.once
def test_runs_of_interleaved_rows_are_cut_to_a_step():
    layer = one_layer(6, 4, Rows(start=2, length=3, stride=10, count=2))
    assert list(runs_of(layer, 100)) == [(2, 3), (12, 3)]
    assert list(runs_of(layer, 2)) == [(2, 2), (4, 1), (12, 2), (14, 1)]


@pytest.mark.once
def test_a_large_matrix_takes_a_few_chunks_of_memory(tmp_path):
    rows, columns = 20000, 1024
    size = rows * columns * 4
    entry = {"w.weight": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, size]}}
    header = json.dumps(entry).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # zeros that take no disk
    pack = Pack(
        name="w",
        layers=(one_layer(rows, columns),),
        format=in_blocks(128),
    )
    contents = Contents(packs=(pack,), tables=(), norms=(), norm_biases=frozenset())
    source = CheckpointTensors(stored=read_headers(tmp_path))
    tracemalloc.start()
    try:
        parts = quantized_parts(contents, source, threads=2)
        made = write_checkpoint(tmp_path / "out.safetensors", contents.tensors(), parts, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert made.slots["w.codes"].length == rows * columns
    assert peak < size * 0.45, f"{peak / 1e6:.0f} MB for a matrix of {size / 1e6:.0f} MB"


OUTPUTS, INPUTS = 50, 72
FORMATS = [in_blocks(32, bits=4), in_blocks(32, bits=4, is_symmetric=False), in_blocks(32), a_format(Grid())]


class OneMatrix:
    """A matrix and its bias, as a checkpoint gives them."""

    def __init__(self, weight_OI, bias_O):
        self.values = {"w.weight": weight_OI, "w.bias": bias_O}

    def read(self, name, start=0, count=None):
        return self.values[name][start:][:count].copy()


def tokens(seed=0, count=4000):
    """Correlated, and far from zero on average."""
    random = np.random.default_rng(seed)
    mixing_HI, mean_I = (
        np.random.default_rng(1).normal(size=(9, INPUTS)),
        np.random.default_rng(2).normal(size=INPUTS),
    )
    x_TI = random.normal(size=(count, 9)) @ mixing_HI + 0.3 * random.normal(size=(count, INPUTS))
    return x_TI + 4 * mean_I


def statistics_of(x_TI, *, names=("second_moment", "mean")):
    moment_II = (x_TI.T @ x_TI / len(x_TI)).astype(np.float32) if "second_moment" in names else None
    mean_I = x_TI.mean(axis=0).astype(np.float32) if "mean" in names else None
    return InputStatistics(num_rows=len(x_TI), second_moment_II=moment_II, mean_I=mean_I)


def one_product(pack_format, *, has_bias=True, adds_bias=False, seen=None, **options):
    """(W, b, W as it is multiplied, b as it is added) of one matrix; no b where none is stored."""
    random = np.random.default_rng(5)
    weight_OI = (random.normal(size=(OUTPUTS, INPUTS)) * 0.1).astype(np.float32)
    bias_O = random.normal(size=OUTPUTS).astype(np.float32)
    layer = replace(one_layer(OUTPUTS, INPUTS), has_bias=has_bias)
    pack = Pack(name="w", layers=(layer,), format=pack_format, adds_bias=adds_bias)
    contents = Contents(packs=(pack,), tables=(), norms=(), norm_biases=frozenset())
    stored = {}
    for name, part in quantized_parts(
        contents, OneMatrix(weight_OI, bias_O), statistics=lambda _: seen, **options
    ):
        stored.setdefault(name, []).append(part)
    stored = {name: np.concatenate(parts) for name, parts in stored.items()}
    grid = pack_format.grid
    if grid.block is None:
        made_OI = (stored["w.codes_IO"] * stored["w.scales"]).T.astype(np.float32)
    else:
        count = grid.num_blocks(INPUTS)
        zeros = None if grid.is_symmetric else from_bytes(stored["w.zeros"], grid.bits, count)
        codes = from_bytes(stored["w.codes"], grid.bits, grid.block)
        made_OI = decode(codes, stored["w.scales"], INPUTS, zeros)
    return weight_OI, bias_O if has_bias else np.zeros(OUTPUTS), made_OI, stored.get("w.bias")


@pytest.mark.once
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("has_bias", [True, False], ids=["with a bias", "without one"])
@pytest.mark.parametrize("pack_format", FORMATS, ids=str)
def test_a_corrected_bias_leaves_the_mean_output_where_it_was(pack_format, has_bias, fit):
    x_TI = tokens()
    options = {"has_bias": has_bias, "fit": fit, "seen": statistics_of(x_TI)}
    weight_OI, bias_O, made_OI, added_O = one_product(pack_format, adds_bias=True, **options)
    wanted_TO = x_TI @ weight_OI.T + bias_O
    shift_O = (x_TI @ made_OI.T + added_O - wanted_TO).mean(axis=0)
    untouched_O = (x_TI @ (made_OI - weight_OI).T).mean(axis=0)
    size = np.abs(wanted_TO).mean()
    assert np.abs(untouched_O).max() > 1e-4 * size
    assert np.abs(shift_O).max() < 2e-6 * size
    assert np.abs(shift_O).max() < 0.01 * np.abs(untouched_O).max()
    plain_OI, plain_O = one_product(pack_format, **options)[2:]
    assert (plain_OI == made_OI).all()
    assert plain_O is None if not has_bias else (plain_O == bias_O).all()


@pytest.mark.once
@pytest.mark.parametrize("pack_format", FORMATS, ids=str)
def test_a_bias_is_not_corrected_for_inputs_that_nobody_saw(pack_format):
    _, bias_O, _, added_O = one_product(pack_format, adds_bias=True)
    assert (added_O == bias_O).all()
    seen = statistics_of(tokens(), names=("second_moment",))
    _, bias_O, _, added_O = one_product(pack_format, adds_bias=True, seen=seen)
    assert (added_O == bias_O).all()


@pytest.mark.once
@pytest.mark.parametrize("fit", [name for name, row in FITS.items() if row.statistics])
@pytest.mark.parametrize("pack_format", FORMATS, ids=str)
def test_a_fit_without_its_statistics_is_plain_rounding(pack_format, fit):
    plain_OI = one_product(pack_format)[2]
    for seen in (None, statistics_of(tokens(), names=("mean",))):
        assert (one_product(pack_format, fit=fit, seen=seen)[2] == plain_OI).all()
    assert (one_product(pack_format, fit=fit, seen=statistics_of(tokens()))[2] != plain_OI).any()


@pytest.mark.once
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("pack_format", FORMATS, ids=str)
def test_no_cut_of_rows_and_no_thread_changes_a_fit(pack_format, fit, monkeypatch):
    options = {"fit": fit, "seen": statistics_of(tokens())}
    whole_OI = one_product(pack_format, threads=1, **options)[2]
    for rows, threads in ((1, 2), (7, 4), (33, 1)):
        monkeypatch.setattr("quantkit.quantization.rounding.apply.CHUNK_VALUES", rows * INPUTS)
        assert (one_product(pack_format, threads=threads, **options)[2] == whole_OI).all()
