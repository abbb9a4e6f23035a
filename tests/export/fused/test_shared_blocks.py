"""What several depths share is stored once and quantized once: in the checkpoint, in the graphs, in bytes.

The unshared twin is a model with the same depth in which every layer has weights of its own, so that the
difference of the two files is known by multiplication alone.
"""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from exporting import NOTHING, build_tiny, error, export
from fake_quantize import fake_quantize
from stored import open_checkpoint

from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.model.model_map import FFN_ROLES
from quantkit.plan.cost.specification import specify
from quantkit.quantization.calibration.passes import collect
from quantkit.runtime.session import open_session
from quantkit.runtime.traced import TracedTexts

pytestmark = pytest.mark.once

DEPTH, HIDDEN, WIDE = 3, 64, 256
SIZES = {
    "vocab_size": 61,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": DEPTH,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
READ = np.random.default_rng(0).integers(1, 60, (2, 9))
WRITTEN = np.concatenate([np.zeros((2, 1), np.int64), np.random.default_rng(1).integers(1, 60, (2, 5))], 1)
BLOCK = 32
BYTES_PER_WEIGHT = 1 + 2 / BLOCK  # INT8 with a float16 scale for each block


def one_wide(folder, **changes):
    model = build_tiny("OneWideForConditionalGeneration", {**SIZES, **changes})
    model.save_pretrained(folder)
    return model


def logits_of(model):
    with torch.inference_mode():
        made = model(input_ids=torch.from_numpy(READ), decoder_input_ids=torch.from_numpy(WRITTEN))
    return made.logits.numpy()


def stepwise(folder):
    model = open_session(folder)
    state = TracedTexts(model=model, ids=READ)
    first = state.read()
    return np.stack([first, *(state.feed(WRITTEN[:, at : at + 1]) for at in range(1, 6))], axis=1)


def codes_read(path, name):
    """How many nodes of a file multiply with these weights, and how many copies of them it has."""
    model = onnx.load(str(path), load_external_data=False)
    codes = [tensor.name for tensor in model.graph.initializer if tensor.name.startswith(f"{name}.codes")]
    nodes = [node for node in model.graph.node if set(codes) & set(node.input)]
    return len(nodes), len(codes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="gated"),
        pytest.param(
            {"ffn_kind": "standard", "hidden_act": "relu", "norm_kind": "layer_norm", "uses_bias": True},
            id="standard",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"encoder_ffn": "own", "decoder_ffn": "own", "tie_word_embeddings": True},
            id="unshared",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_encoder_decoder_goes_the_whole_way(changes, tmp_path):
    """Float and INT8, whole and token by token, against torch and the checkpoint read back into it."""
    model = one_wide(tmp_path / "model", **changes)
    wanted = logits_of(model)
    export(tmp_path / "model", tmp_path / "float", min_dim=NOTHING, original=tmp_path / "model")
    made = open_session(tmp_path / "float").answer_logits(READ, WRITTEN)
    assert error(made, wanted).relative < 1e-5
    assert error(stepwise(tmp_path / "float"), wanted).relative < 1e-5
    exported = export(tmp_path / "model", tmp_path / "int8", original=tmp_path / "model")
    model_map = map_module(model, name="model")
    assert set(exported.placement.projections) == {layer.name for layer in model_map.layers}
    checkpoint = open_checkpoint(tmp_path / "int8" / "weights.safetensors")
    fake = logits_of(fake_quantize(model, checkpoint))
    for made in (
        open_session(tmp_path / "int8").answer_logits(READ, WRITTEN),
        stepwise(tmp_path / "int8"),
    ):
        assert error(made, fake).relative < 2e-2
        assert 1e-4 < error(made, wanted).relative < 0.1


def held_bytes(path):
    """Bytes of all initializers of a file, inside of it and beside it."""
    model = onnx.load(str(path), load_external_data=False)
    outside = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
    inside = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    return inside + sum(int(entry.value) for entry in outside if entry.key == "length")


def test_one_wide_ffn_is_stored_once_in_bytes(tmp_path):
    sizes, held = {}, {}
    for name, kind in (("shared", "shared"), ("twin", "own")):
        one_wide(tmp_path / name, encoder_ffn=kind)
        export(tmp_path / name, tmp_path / f"{name}-out", original=tmp_path / name)
        header_and_codes = open_checkpoint(tmp_path / f"{name}-out" / "weights.safetensors")
        sizes[name] = sum(slot.length for slot in header_and_codes.slots.values())
        held[name] = held_bytes(tmp_path / f"{name}-out" / "encoder_model.onnx")
        source = json.loads((tmp_path / name / "config.json").read_text())
        assert source["encoder_ffn"] == kind
    saved = (DEPTH - 1) * 3 * HIDDEN * WIDE * BYTES_PER_WEIGHT
    assert sizes["twin"] - sizes["shared"] == saved == held["twin"] - held["shared"]
    graph = tmp_path / "shared-out" / "encoder_model.onnx"
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert codes_read(graph, f"model.encoder.layers.0.mlp.{part}") == (DEPTH, 1)
        assert codes_read(graph, f"model.encoder.layers.1.mlp.{part}") == (0, 0)
        twin = tmp_path / "twin-out" / "encoder_model.onnx"
        assert codes_read(twin, f"model.encoder.layers.1.mlp.{part}") == (1, 1)


def test_albert_is_stored_once_in_bytes(tmp_path):
    """Twelve depths on one block weigh what one depth weighs; the graph alone grows, by its nodes."""
    sizes = {}
    for depth in (1, 12):
        config = {**FAMILIES["albert"].tiny, "num_hidden_layers": depth, "hidden_size": 64}
        build_tiny("AlbertForMaskedLM", config).save_pretrained(tmp_path / str(depth))
        export(tmp_path / str(depth), tmp_path / f"out-{depth}")
        slots = open_checkpoint(tmp_path / f"out-{depth}" / "weights.safetensors").slots.values()
        graph = onnx.load(str(tmp_path / f"out-{depth}" / "model.onnx"))
        held = sum(len(tensor.raw_data) for tensor in graph.graph.initializer)
        sizes[depth] = (sum(slot.length for slot in slots), held, len(graph.graph.initializer))
    assert sizes[1] == sizes[12]
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
    assert codes_read(tmp_path / "out-12" / "model.onnx", layer) == (12, 1)


def test_costs_count_calls_once_in_bytes_and_each_time_in_work():
    shared = map_module(build_tiny("OneWideForConditionalGeneration", SIZES), name="shared")
    twin = map_module(
        build_tiny("OneWideForConditionalGeneration", {**SIZES, "encoder_ffn": "own"}), name="twin"
    )
    calls = {layer.name: layer.calls for layer in shared.layers if layer.role in FFN_ROLES}
    assert calls == {
        f"model.encoder.layers.0.mlp.{part}": DEPTH for part in ("gate_proj", "up_proj", "down_proj")
    }
    one, other = (specify(each, batch=1, length=8) for each in (shared, twin))
    ffn = [[row for row in spec.rows if row.group == "ffn"] for spec in (one, other)]
    macs = [sum(row.macs for row in rows) for rows in ffn]
    assert macs[0] == macs[1] == DEPTH * 8 * 3 * HIDDEN * WIDE
    stored = [sum(row.weight_bytes for row in rows) for rows in ffn]
    assert stored[1] == DEPTH * stored[0] == DEPTH * 3 * HIDDEN * WIDE * 4
    assert sum(row.parameters for row in one.rows) == shared.num_parameters


@pytest.mark.parametrize("name", ["albert", "quantkit_one_wide"])
def test_statistics_are_those_of_all_calls_one_after_another(name, tmp_path):
    """Mean, square and peak of the pooled inputs, against the calls gathered by a hook and concatenated."""
    row = FAMILIES[name]
    model = build_tiny(row.tiny_class, {**row.tiny, "num_hidden_layers": 3}, dtype=torch.float64)
    shared = next(
        layer
        for layer in map_module(model, name=name).layers
        if layer.role == "ffn_down" and layer.calls == 3
    )
    seen = []
    hook = model.get_submodule(shared.matrix).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].reshape(-1, inputs[0].shape[-1]).numpy())
    )
    tokens = np.random.default_rng(2).integers(5, 60, (2, 7))
    statistics = collect(
        model,
        tokens,
        requested={shared.matrix: frozenset({"peak", "mean"})},
        blocks=(),
        folder=tmp_path,
        batch=2,
    ).read(shared.matrix)
    hook.remove()
    rows = np.concatenate(seen[-3:])
    assert statistics.num_rows == len(rows) == 3 * tokens.size
    np.testing.assert_allclose(statistics.peak_I, np.abs(rows).max(0), rtol=1e-6)
    np.testing.assert_allclose(statistics.mean_I, rows.mean(0), rtol=1e-6, atol=1e-9)
