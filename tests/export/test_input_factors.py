"""Factors in front of products whose norm cannot take them, in both dialects of graphs.

A post-norm's output is the residual too, so smoothing multiplies them in. The oracles: transformers itself
for graphs in float, the checkpoint read back into its modules for graphs in integers, and a model whose loud
channels spoil the scales of whole tokens.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import quantize
from exporting import NOTHING, build_tiny, error
from fake_quantize import fake_quantize

import quantkit
from quantkit.errors import InputError
from quantkit.export.fused.encoder import emit_encoder
from quantkit.export.graph import save
from quantkit.export.static.encoder import emit_static_encoder
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.pipeline.stages.resolve import smooths_by_default
from quantkit.recipe import override
from quantkit.runtime.cpu_session import open_on_cpu

LENGTH, LOUD, FACTOR = 20, (3, 17), 60.0
CLASSES = {
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "mpnet": "MPNetModel",
    "electra": "ElectraModel",
    "modernbert": "ModernBertModel",
    "distilbert": "DistilBertModel",
}
GENERATOR = np.random.default_rng(5)
IDS = GENERATOR.integers(3, 60, (2, LENGTH))


def loud(name):
    """A tiny model two channels of whose norms are large, as in released ones."""
    wide = {"embedding_size": 32} if name == "electra" else {}
    model = build_tiny(CLASSES[name], {**FAMILIES[name].tiny, **wide})
    with torch.no_grad():
        for path, norm in model.named_modules():
            if isinstance(norm, torch.nn.LayerNorm):
                norm.weight[list(LOUD)] = FACTOR if path else 1.0
    return model


def magnitudes_of(model):
    """The largest magnitude of every input channel, by torch's hooks."""
    peaks = {}

    def watch(name):
        def hook(_, inputs):
            peaks[name] = inputs[0].abs().amax((0, 1)).numpy()

        return hook

    linears = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    handles = [each.register_forward_pre_hook(watch(name)) for name, each in linears.items()]
    states_of(model)
    for handle in handles:
        handle.remove()
    return peaks


def num_smoothed(name):
    """Inputs with factors: behind post-norms all that a norm feeds, of pre-norms the one without a norm."""
    layers = FAMILIES[name].tiny.get("num_hidden_layers") or FAMILIES[name].tiny["n_layers"]
    return 1 if name == "modernbert" else 2 * layers


def states_of(model):
    with torch.inference_mode():
        return model(torch.tensor(IDS)).last_hidden_state.numpy()


def fused(quantized, folder):
    path = folder / "model.onnx"
    save(
        emit_encoder(quantized.map, quantized.contents, quantized.checkpoint, **quantized.options()),
        path,
    )
    session = open_on_cpu(str(path), onnxruntime.SessionOptions())
    full = {
        "input_ids": IDS,
        "attention_mask": np.ones_like(IDS),
        "token_type_ids": np.zeros_like(IDS),
    }
    return session.run(["last_hidden_state"], {each.name: full[each.name] for each in session.get_inputs()})[
        0
    ]


def smoothed_inputs(folder):
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    return [node.name for node in graph.node if node.name.endswith("/smoothed")]


@pytest.mark.parametrize("exclude", [(), ("attention_key",)], ids=["packed", "apart"])
@pytest.mark.parametrize("name", CLASSES)
def test_the_fused_graph_is_the_model(name, exclude, tmp_path):
    model = loud(name)
    smoothed = {"magnitudes": magnitudes_of(model), "exclude": exclude}
    made = fused(quantize(model, tmp_path / "float", min_dim=NOTHING, **smoothed), tmp_path / "float")
    assert error(made, states_of(model)).relative < 1e-5
    assert len(smoothed_inputs(tmp_path / "float")) == num_smoothed(name)

    quantized = quantize(model, tmp_path, scheme="int8_token", **smoothed)
    made, plain = fused(quantized, tmp_path), copy.deepcopy(model)
    blocks = len(quantized.map.blocks)
    apart = 2 if name == "modernbert" else 2 * blocks
    assert len(smoothed_inputs(tmp_path)) == num_smoothed(name) + (apart if exclude else 0)
    for path, norm in plain.named_modules():  # scales of what a pre-norm feeds lie in its gain
        if isinstance(norm, torch.nn.LayerNorm):
            norm.weight.data = torch.from_numpy(quantized.checkpoint.read(f"{path}.weight"))
    assert error(made, states_of(fake_quantize(plain, quantized.checkpoint))).relative < 3e-2


def test_loud_channels_no_longer_spoil_their_tokens(tmp_path):
    model = loud("bert")
    plain = fused(quantize(model, tmp_path / "plain", scheme="int8_token"), tmp_path / "plain")
    smoothed = quantize(model, tmp_path / "smooth", scheme="int8_token", magnitudes=magnitudes_of(model))
    states = states_of(model)
    quiet = [channel for channel in range(states.shape[-1]) if channel not in LOUD]
    errors = [
        error(made[..., quiet], states[..., quiet]) for made in (plain, fused(smoothed, tmp_path / "smooth"))
    ]
    assert errors[1].relative < 0.75 * errors[0].relative
    assert errors[1].absolute < errors[0].absolute


@pytest.mark.parametrize("name", CLASSES)
def test_the_static_graph_is_the_model(name, tmp_path):
    model = loud(name)
    quantized = quantize(model, tmp_path, min_dim=NOTHING, magnitudes=magnitudes_of(model))
    graph = emit_static_encoder(
        quantized.map,
        quantized.contents,
        quantized.checkpoint,
        tokens=LENGTH,
        target=quantized.options()["target"],
        metadata={"kind": "encoder"},
    )
    path = tmp_path / "model.onnx"
    save(graph, path)
    session = open_on_cpu(str(path), onnxruntime.SessionOptions())
    full = {
        "input_ids": IDS[:1],
        "attention_mask": np.ones_like(IDS[:1]),
        "token_type_ids": np.zeros_like(IDS[:1]),
    }
    feeds = {each.name: full[each.name].astype(np.int32) for each in session.get_inputs()}
    made = session.run(["last_hidden_state"], feeds)[0]
    assert error(made, states_of(model)[:1]).relative < 1e-5
    assert len(smoothed_inputs(tmp_path)) == num_smoothed(name)


OFF = {"accuracy": False, "latency": False, "memory": False, "min_dim": 1}


def test_encoders_are_smoothed_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loud("bert").save_pretrained("model")
    artifact = quantkit.quantize("model", output="out", **OFF)
    assert artifact.recipe.transforms == ["smoothquant"]
    assert len(smoothed_inputs(tmp_path / "out")) == 2 * FAMILIES["bert"].tiny["num_hidden_layers"]
    recipe, model_map = artifact.recipe, inspect("model")
    assert smooths_by_default(recipe, model_map, "encoder")
    assert not smooths_by_default(override(recipe, {"target": "npu"}), model_map, "encoder")


def test_an_encoder_for_a_gpu_has_products_that_gpus_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loud("bert").save_pretrained("model")
    artifact = quantkit.quantize("model", output="out", target="gpu", **OFF)
    assert json.loads((artifact.folder / "manifest.json").read_text())
    assert "scheme: int8_block32" in (artifact.folder / "recipe.yaml").read_text()
    with pytest.raises(InputError, match="no operator for products of 'int8_token'; allowed: int8_block16"):
        quantkit.quantize("model", output="other", target="gpu", scheme="int8_token", **OFF)
    with pytest.raises(InputError, match="no operator for products of 'int8_channel'"):
        quantkit.quantize("model", output="other", target="gpu", layers={"*query*": "int8_channel"}, **OFF)
    assert not (tmp_path / "other").exists()
