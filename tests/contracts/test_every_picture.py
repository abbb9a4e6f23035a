"""Every family of pictures with every head: the fused graph is the model, in float and in INT8.

The oracle of the float graph is transformers; that of the INT8 graph is the checkpoint read back into
transformers' modules, with inputs rounded as the operators round them.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch
from checkpoints import quantize
from examples import examples_of
from exporting import NOTHING, build_tiny, error
from fake_quantize import fake_quantize

from quantkit.export.check import check_models
from quantkit.export.encoder import TOWERS, why_not_encoder
from quantkit.export.fused.encoder import emit_encoder
from quantkit.export.graph import save
from quantkit.model.examples import inputs_of
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.runtime.cpu_session import open_on_cpu

CASES = [
    pytest.param(name, cls + task, {**FAMILIES[name].tiny, **variant}, id=f"{cls}{task}-{number}")
    for name, row in TOWERS.items()
    for cls in row.classes
    for task in row.tasks
    for number, variant in enumerate(({}, *FAMILIES[name].variants))
]
ON_EVERY_HEAD = pytest.mark.parametrize(("family", "class_name", "sizes"), CASES)
COUNT, LENGTH = 3, 11


def written(model, folder, **options):
    quantized = quantize(model, folder, **options)
    graph = emit_encoder(quantized.map, quantized.contents, quantized.checkpoint, **quantized.options())
    save(graph, folder / "model.onnx")
    return quantized


def run(path, examples, mask=None):
    session = open_on_cpu(str(path), onnxruntime.SessionOptions())
    mask = np.ones_like(examples) if mask is None else mask
    feeds = {
        entry.name: mask if entry.name == "attention_mask" else examples for entry in session.get_inputs()
    }
    names = [entry.name for entry in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def original(model, examples, **more):
    with torch.inference_mode():
        outputs = model(**inputs_of(examples), **more)
    return {name: value.numpy() for name, value in outputs.items() if torch.is_tensor(value)}


@ON_EVERY_HEAD
def test_the_float_graph_is_the_model(family, class_name, sizes, tmp_path):
    model = build_tiny(class_name, sizes)
    written(model, tmp_path, min_dim=NOTHING)
    examples = examples_of(model, COUNT, LENGTH)
    made, wanted = run(tmp_path / "model.onnx", examples), original(model, examples)
    assert set(made) == set(wanted)
    assert next(iter(made)) == next(iter(wanted)), "the first output is what clients of one output read"
    for name, values in made.items():
        found = error(values, wanted[name])
        assert found.relative < 1e-5
        assert found.absolute < 1e-4
    alone = run(tmp_path / "model.onnx", examples[:1])
    assert all(error(alone[name], made[name][:1]).relative < 1e-5 for name in made)


@ON_EVERY_HEAD
def test_the_integer_graph_is_the_checkpoint(family, class_name, sizes, tmp_path):
    model = build_tiny(class_name, sizes)
    quantized = written(model, tmp_path, scheme="int8_block32")
    placement = check_models([tmp_path / "model.onnx"], quantized.plan)
    assert set(placement.projections) == {layer.name for layer in quantized.map.layers}
    examples = examples_of(model, COUNT, LENGTH)
    first = next(iter(original(model, examples)))
    stored = fake_quantize(copy.deepcopy(model), quantized.checkpoint)
    rows = [examples[row : row + 1] for row in range(COUNT)]
    # A value on the border of two codes may round either way, and later layers carry that on.
    alone = [
        error(run(tmp_path / "model.onnx", row)[first], original(stored, row)[first]).relative for row in rows
    ]
    assert max(alone) < 3e-2
    assert min(alone) < 1e-3
    made, wanted = run(tmp_path / "model.onnx", examples)[first], original(model, examples)[first]
    assert 1e-4 < error(made, wanted).relative < 0.15, "the quantization shows, and is small"


@pytest.mark.parametrize(
    ("class_name", "family", "changes", "reason"),
    [
        ("Dinov2Backbone", "dinov2", {}, "without a fused head"),
        ("ViTForMaskedImageModeling", "vit", {"image_size": 16}, "without a fused head"),
        ("ViTModel", "vit", {"hidden_act": "mish"}, "without a fused operator"),
    ],
)
def test_what_cannot_be_emitted_says_why(class_name, family, changes, reason):
    model = build_tiny(class_name, {**FAMILIES[family].tiny, **changes})
    assert reason in (why_not_encoder(map_module(model, name="tiny")) or "")


@pytest.mark.parametrize("size", [(12, 12), (24, 8), (17, 15), (40, 29)], ids=str)
def test_positions_stretch_to_pictures_of_any_size(size, tmp_path):
    """Also to sizes that hold no whole number of patches."""
    model = build_tiny("Dinov2Model", dict(FAMILIES["dinov2"].tiny))
    written(model, tmp_path, min_dim=NOTHING)
    pictures = np.random.default_rng(0).standard_normal((2, 3, *size)).astype(np.float32)
    made, wanted = run(tmp_path / "model.onnx", pictures), original(model, pictures)
    for name, values in made.items():
        assert error(values, wanted[name]).relative < 1e-5


@pytest.mark.parametrize("class_name", ["CLIPTextModel", "SiglipTextModel"])
def test_padding_is_hidden_from_the_tokens_of_a_text(class_name, tmp_path):
    family = "clip_text" if class_name.startswith("CLIP") else "siglip_text"
    model = build_tiny(class_name, dict(FAMILIES[family].tiny))
    written(model, tmp_path, min_dim=NOTHING)
    ids, mask = examples_of(model, COUNT, LENGTH), np.ones((COUNT, LENGTH), np.int64)
    mask[1, 6:] = 0
    made = run(tmp_path / "model.onnx", ids, mask)
    wanted = original(model, ids, attention_mask=torch.from_numpy(mask))
    shown = mask.astype(bool)
    assert error(made["last_hidden_state"][shown], wanted["last_hidden_state"][shown]).relative < 1e-5
    assert error(made["pooler_output"][[0, 2]], wanted["pooler_output"][[0, 2]]).relative < 1e-5


@pytest.mark.parametrize("standard", [True, False], ids=["standard", "contrib"])
def test_older_operators_hide_later_tokens_too(standard, tmp_path):
    model = build_tiny("CLIPTextModelWithProjection", dict(FAMILIES["clip_text"].tiny))
    quantized = quantize(model, tmp_path, min_dim=NOTHING)
    options = quantized.options()
    if not standard:
        options["target"] = replace(options["target"], opset=21, ir_version=10)
    graph = emit_encoder(quantized.map, quantized.contents, quantized.checkpoint, **options)
    assert ("MultiHeadAttention" in {node.op_type for node in graph.graph.node}) != standard
    save(graph, tmp_path / "model.onnx")
    ids = examples_of(model, COUNT, LENGTH)
    ids[:, 4] = 60  # the largest, where the text ends
    made = run(tmp_path / "model.onnx", ids)["text_embeds"]
    assert error(made, original(model, ids)["text_embeds"]).relative < 1e-5
    ids[:, 5:] = 7
    again = run(tmp_path / "model.onnx", ids)["text_embeds"]
    assert error(again, made).relative < 1e-5, "what follows the end is read by nothing"
