"""Every rotary rule of every family that rotates: the float graph has transformers' logits."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from exporting import NOTHING, build_tiny, error, export

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.model.load import TRANSFORMERS_MAJOR
from quantkit.runtime.decoder import open_decoder, start

ORIGINAL, POSITIONS = 16, 40
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": POSITIONS}
PAIRS = SIZES["head_dim"] // 2
RANDOM = np.random.default_rng(0)
IDS = np.random.default_rng(1).integers(6, 60, (1, POSITIONS))
SHORT, LONG = RANDOM.uniform(1, 2, PAIRS).tolist(), RANDOM.uniform(2, 40, PAIRS).tolist()
YARN = {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
CONFIGS = {
    "plain": {},
    "theta": {"rope_theta": 500.0},
    "default": {"rope_scaling": {"rope_type": "default"}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "linear, old spelling": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "llama3, strong": {"rope_scaling": {**LLAMA3, "factor": 32.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}},
    "yarn, past the last pair": {"rope_scaling": {**YARN, "beta_slow": 1e-6}},
    "yarn, not truncated": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn, attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.25}},
    "yarn, original outside": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.5},
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {"rope_scaling": LONGROPE, "original_max_position_embeddings": ORIGINAL},
    "longrope, original inside": {
        "rope_scaling": {**LONGROPE, "factor": 2.5, "original_max_position_embeddings": ORIGINAL}
    },
    "longrope, factor": {"rope_scaling": {**LONGROPE, "factor": 3.5}},
    "longrope, attention factor": {
        "rope_scaling": {**LONGROPE, "attention_factor": 1.4},
        "original_max_position_embeddings": ORIGINAL,
    },
    "partial": {"partial_rotary_factor": 0.5, "rotary_pct": 0.5},
    "parameters": {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}},
}
FAMILIES_WITH_ROPE = ("gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
CASES = [
    pytest.param(
        family,
        changes,
        id=f"{family}-{name}",
        marks=() if family == "llama" or name.startswith(("longrope", "partial")) else pytest.mark.slow,
    )
    for family in FAMILIES_WITH_ROPE
    for name, changes in CONFIGS.items()
]


def model_of(family, changes):
    sizes = {**FAMILIES[family].tiny, **SIZES, **json.loads(json.dumps(changes))}
    if family == "gpt_neox":
        del sizes["head_dim"]
    if family == "phi3" and "rope_type" in (
        sizes.get("rope_scaling") or {}
    ):  # its published configs' spelling
        sizes["rope_scaling"]["type"] = sizes["rope_scaling"].pop("rope_type")
    return build_tiny(FAMILIES[family].tiny_class, sizes)


def logits_of(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_the_float_graph_rotates_as_transformers_does(family, changes, tmp_path):
    if "rope_parameters" in changes and TRANSFORMERS_MAJOR < 5:
        pytest.skip("a spelling of transformers 5")
    try:
        model = model_of(family, changes)
        wanted = {length: logits_of(model, IDS[:, :length]) for length in (ORIGINAL, POSITIONS)}
    except Exception as fault:
        pytest.skip(f"transformers cannot run it: {type(fault).__name__}")
    model.save_pretrained(tmp_path / "model")
    try:
        exported = export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    except InputError:
        return
    assert exported.kind == "decoder"
    decoder = open_decoder(tmp_path / "out", threads=1)
    for length, logits in wanted.items():
        if length <= decoder.context:
            assert error(decoder.logits(IDS[:, :length]), logits).relative < 1e-4
        else:  # another table from there on, which cannot share a cache with this one
            assert "longrope" in json.dumps(changes)
            with pytest.raises(InputError, match=f"up to {decoder.context} tokens"):
                start(decoder, batch=1, capacity=length)


CONTEXT = 131072
TABLE_CASES = {
    "plain": ("llama", {"rope_theta": 5e5}),
    "llama3": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}}),
    "yarn": ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 32768}}),
    "longrope": (
        "phi3",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": CONTEXT - 1},
    ),
    "partial": ("gpt_neox", {"rotary_pct": 0.5}),
    "local and global": ("gemma3", {"layer_types": ["sliding_attention", "full_attention"]}),
}


def tables_of_module(model, number, positions):
    """Cosines and sines by the rotary module that the block itself is given."""
    base = getattr(model, "model", None) or model.base_model
    rows, ids = torch.zeros(1), torch.from_numpy(positions[None])
    kinds = getattr(model.config, "layer_types", None) if model.config.model_type == "gemma3_text" else None
    if kinds and TRANSFORMERS_MAJOR >= 5:
        tables = base.rotary_emb(rows, ids, kinds[number])
    elif kinds and kinds[number] == "sliding_attention":
        tables = base.rotary_emb_local(rows, ids)
    else:
        tables = base.rotary_emb(rows, ids)
    return [table[0, :, : table.shape[-1] // 2].numpy() for table in tables]


def as_opened(path):
    """The graph as onnxruntime runs it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_name("opened.onnx"))
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath).graph


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize(("family", "changes"), TABLE_CASES.values(), ids=TABLE_CASES)
def test_an_opened_graph_holds_the_tables_of_the_module(family, changes, target, tmp_path):
    """To the last position of a long context; no node computes them in a run, and the file has none."""
    model = model_of(family, {**changes, "max_position_embeddings": CONTEXT})
    model.save_pretrained(tmp_path / "model")
    exported = export(tmp_path / "model", tmp_path / "out", target=target)
    assert exported.paths[0].stat().st_size < CONTEXT * 4
    graph = as_opened(exported.paths[0])
    assert not [node.name for node in graph.node if node.name.startswith("rope_")]
    constants = {tensor.name: tensor for tensor in graph.initializer}
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert attentions
    positions = np.unique(np.geomspace(1, CONTEXT - 1, 1000).astype(np.int64) - 1)
    tolerance = 1.5e-7 if target == "cpu" else 2**-11
    for number, node in enumerate(attentions):
        for name, table in zip(node.input[7:9], tables_of_module(model, number, positions), strict=True):
            opened = onnx.numpy_helper.to_array(constants[name])[positions].astype(np.float32)
            assert np.abs(opened - table).max() <= tolerance * np.abs(table).max()


def test_a_longrope_model_ends_where_its_short_factors_do(tmp_path):
    model_of("phi3", CONFIGS["longrope"]).save_pretrained(tmp_path / "model")
    assert inspect(str(tmp_path / "model")).context == ORIGINAL
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    settings = json.loads((tmp_path / "out" / "genai_config.json").read_text())
    assert (
        settings["model"]["context_length"] == open_decoder(tmp_path / "out", threads=1).context == ORIGINAL
    )
