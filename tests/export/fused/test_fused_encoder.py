"""Every encoder family with every head, run for real: the fused graph is the model, in float and in INT8.

The oracle of the float graph is transformers itself, with padding in the batch. That of the INT8 graph is
the checkpoint read back into transformers' modules with inputs rounded as the operators round them.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import quantize
from exporting import NOTHING, build_tiny, error
from fake_quantize import fake_quantize

from quantkit.errors import InputError
from quantkit.export.check import check_models
from quantkit.export.encoder import HEADS, depths, why_not_encoder
from quantkit.export.fused.encoder import emit_encoder
from quantkit.export.graph import METADATA_KEY, save
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.quantization.layout import planned_bytes
from quantkit.runtime.cpu_session import open_on_cpu
from quantkit.runtime.machine.facts import read_cpu

try:
    from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTModelForMaskedLM
except ImportError as missing:
    WHY_NO_OPTIMUM = str(missing)
else:
    WHY_NO_OPTIMUM = ""

CLASSES = {name: row.classes[0] for name, row in HEADS.items()}
TASKS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
SHAPES = [
    (name, {**FAMILIES[name].tiny, **variant}) for name in HEADS for variant in ({}, *FAMILIES[name].variants)
]
OF_ROBERTA = ("XLMRoberta", "Camembert")  # classes of model types that share its row
OTHER_ACTIVATIONS = {
    **dict.fromkeys(("bert", "roberta", "mpnet", "electra"), "hidden_act"),
    "distilbert": "activation",
    "modernbert": "hidden_activation",
}
CASES = [
    pytest.param(CLASSES[name] + task, sizes, id=f"{CLASSES[name]}{task}-{number}")
    for number, (name, sizes) in enumerate(SHAPES)
    for task in TASKS
]
CASES += [
    pytest.param(
        CLASSES[name] + "ForMaskedLM", {**FAMILIES[name].tiny, key: kind}, id=f"{CLASSES[name]}-{kind}"
    )
    for name, key in OTHER_ACTIVATIONS.items()
    for kind in ("relu",)
]
CASES += [
    pytest.param(name + task, FAMILIES["roberta"].tiny, id=name + task)
    for name in OF_ROBERTA
    for task in TASKS
]
CASES += [
    pytest.param(
        CLASSES[name] + "ForMaskedLM",
        {**FAMILIES[name].tiny, "tie_word_embeddings": False},
        id=f"{name}-untied",
    )
    for name in ("bert", "mpnet", "electra", "modernbert")
]
CASES += [
    pytest.param("ElectraForPreTraining", {**FAMILIES["electra"].tiny, **sizes}, id=f"detector-{number}")
    for number, sizes in enumerate(({}, {"embedding_size": 32, "hidden_act": "relu"}))
]
MODERN, DEBERTA = FAMILIES["modernbert"].tiny, FAMILIES["deberta_v2"].tiny
CASES += [
    pytest.param(f"ModernBert{task}", {**MODERN, **sizes}, id=f"ModernBert{task}-{name}")
    for task, name, sizes in (
        ("ForSequenceClassification", "mean", {"classifier_pooling": "mean"}),
        ("Model", "all-global", {"global_attn_every_n_layers": 1}),
        ("Model", "one-global", {"global_attn_every_n_layers": 9}),
        ("ForTokenClassification", "relu-head", {"classifier_activation": "relu"}),
        ("Model", "thetas", {"global_rope_theta": 77.0, "local_rope_theta": 5.0}),
        ("Model", "scaled", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
        ("Model", "odd-window", {"local_attention": 7}),
        ("Model", "narrowest-window", {"local_attention": 1}),
    )
]
CASES += [
    pytest.param(f"DebertaV2{task}", {**FAMILIES["deberta_v2"].tiny, **sizes}, id=f"DebertaV2{task}-{name}")
    for task, name, sizes in (
        ("Model", "absolute", {"position_biased_input": True, "relative_attention": False}),
        ("Model", "no-positions", {"relative_attention": False}),
        ("Model", "types", {"type_vocab_size": 2, "pos_att_type": ["p2c"]}),
        ("Model", "no-terms", {"pos_att_type": []}),
        ("ForSequenceClassification", "relu", {"pooler_hidden_act": "relu"}),
    )
]
CASES.append(pytest.param("RobertaModel", {**FAMILIES["roberta"].tiny, "type_vocab_size": 1}, id="one-type"))
PADDING_ID, LENGTH, SHOWN = 1, 20, 13
GENERATOR = np.random.default_rng(0)
FEEDS = {
    "input_ids": GENERATOR.integers(3, 60, (4, LENGTH)),
    "attention_mask": np.ones((4, LENGTH), np.int64),
    "token_type_ids": GENERATOR.integers(0, 2, (4, LENGTH)),
}
FEEDS["input_ids"][1::2, SHOWN:] = PADDING_ID
FEEDS["attention_mask"][1::2, SHOWN:] = 0


def shown(values, feeds=FEEDS):
    """What belongs to a token of a text; a window may leave padding nothing to read."""
    if values.shape[:2] == feeds["input_ids"].shape:
        return values[feeds["attention_mask"] == 1]
    return values


def write(quantized, path, *, outside=False):
    model = emit_encoder(
        quantized.map, quantized.contents, quantized.checkpoint, **quantized.options(outside=outside)
    )
    save(model, path)
    return model


def run(path, feeds=FEEDS):
    session = open_on_cpu(str(path), onnxruntime.SessionOptions())
    names = [entry.name for entry in session.get_outputs()]
    wanted = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
    return dict(zip(names, session.run(None, wanted), strict=True))


def original(model, feeds=FEEDS):
    is_told = getattr(model.config, "type_vocab_size", 1) > 1
    inputs = {key: torch.tensor(value) for key, value in feeds.items() if key != "token_type_ids" or is_told}
    with torch.inference_mode():
        return {key: value.numpy() for key, value in model(**inputs).items()}


@pytest.mark.parametrize(("class_name", "sizes"), CASES)
def test_the_float_graph_is_the_model(class_name, sizes, tmp_path):
    model = build_tiny(class_name, sizes)
    write(quantize(model, tmp_path, min_dim=NOTHING), tmp_path / "model.onnx")
    made, wanted = run(tmp_path / "model.onnx"), original(model)
    assert set(made) == set(wanted)
    for name, values in made.items():
        found = error(shown(values), shown(wanted[name]))
        assert found.relative < 1e-5
        assert found.absolute < 1e-4


WINDOW = {"local_attention": 8, "max_position_embeddings": 400}
LONG = {
    "mpnet": {"max_position_embeddings": 402},
    "modernbert": WINDOW,
    "electra": {"max_position_embeddings": 400},
    "deberta_v2": {"max_position_embeddings": 90},  # so many distances, in buckets
}


@pytest.mark.parametrize("standard", [True, False], ids=["standard", "contrib"])
@pytest.mark.parametrize("name", LONG)
def test_texts_of_any_length_and_padding_on_any_side(name, standard, tmp_path):
    """From one token to far beyond windows and distances; each row is the row alone.

    The last bits of rotations grow with the position.
    """
    model = build_tiny(CLASSES[name] + "Model", {**FAMILIES[name].tiny, **LONG[name]}, spread=0.3)
    quantized = quantize(model, tmp_path, min_dim=NOTHING)
    options = quantized.options()
    if not standard:
        options["target"] = replace(options["target"], opset=21, ir_version=10)
    graph = emit_encoder(quantized.map, quantized.contents, quantized.checkpoint, **options)
    save(graph, tmp_path / "model.onnx")
    assert ("MultiHeadAttention" in {node.op_type for node in graph.graph.node}) != standard
    ids = GENERATOR.integers(3, 60, (3, 300))
    for length in (1, 2, 3, 4, 5, 6, 9, 40, 130, 300):
        feeds = {"input_ids": ids[:, :length], "attention_mask": np.ones((3, length), np.int64)}
        feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
        wanted = original(model, feeds)["last_hidden_state"]
        made = run(tmp_path / "model.onnx", feeds)["last_hidden_state"]
        assert error(made, wanted).relative < 5e-5, length
        for side in ("right",) if name == "electra" else ("right", "left"):  # whose positions are columns
            widths = ((0, 0), (0, 50) if side == "right" else (50, 0))
            padded = {
                key: np.pad(values, widths, constant_values=PADDING_ID if key == "input_ids" else 0)
                for key, values in feeds.items()
            }
            made = run(tmp_path / "model.onnx", padded)["last_hidden_state"]
            made = made[:, :length] if side == "right" else made[:, 50:]
            assert error(made, wanted).relative < 5e-5, (length, side)


@pytest.mark.parametrize("scheme", ["int8_block32", "int8_block128", "int8_channel"])
@pytest.mark.parametrize(("name", "sizes"), SHAPES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(SHAPES)])
def test_the_integer_graph_is_the_checkpoint(name, sizes, scheme, tmp_path):
    if name == "albert" and scheme == "int8_channel" and read_cpu().saturates:
        pytest.skip("its layers share weights, whose sums onnxruntime cannot make exact on this processor")
    model = build_tiny(CLASSES[name] + "ForMaskedLM", sizes)
    quantized = quantize(model, tmp_path, scheme=scheme)
    write(quantized, tmp_path / "model.onnx")
    placement = check_models([tmp_path / "model.onnx"], quantized.plan)
    assert set(placement.projections) == {layer.name for layer in quantized.map.layers}
    made, wanted = shown(run(tmp_path / "model.onnx")["logits"]), shown(original(model)["logits"])
    stored = fake_quantize(copy.deepcopy(model), quantized.checkpoint)
    # A value on the border of two codes may round either way, and later layers carry that on: in its row, or
    # in all rows where the whole input has one scale. So the rows are read one at a time too.
    assert error(made, shown(original(stored)["logits"])).relative < 3e-2
    rows = [{name: values[row : row + 1] for name, values in FEEDS.items()} for row in range(4)]
    alone = (
        error(
            shown(run(tmp_path / "model.onnx", row)["logits"], row),
            shown(original(stored, row)["logits"], row),
        )
        for row in rows
    )
    assert min(each.relative for each in alone) < 1e-5
    assert 1e-4 < error(made, wanted).relative < 0.1, "the quantization shows, and is small"


@pytest.mark.parametrize("scheme", ["int8_block32", "int8_block128"])
def test_padding_does_not_change_a_row(scheme, tmp_path):
    model = build_tiny("BertModel", dict(FAMILIES["bert"].tiny))
    write(quantize(model, tmp_path, scheme=scheme), tmp_path / "model.onnx")
    together = run(tmp_path / "model.onnx")["last_hidden_state"][1, :SHOWN]
    alone = run(tmp_path / "model.onnx", {key: value[1:2, :SHOWN] for key, value in FEEDS.items()})
    assert error(together, alone["last_hidden_state"][0]).relative < 1e-3


def test_a_shared_block_is_stored_once_and_run_often(tmp_path):
    sizes = {**FAMILIES["albert"].tiny, "num_hidden_layers": 12}
    quantized = quantize(build_tiny("AlbertModel", sizes), tmp_path)
    model = write(quantized, tmp_path / "model.onnx")
    name = next(pack.name for pack in quantized.contents.packs if pack.name.endswith("ffn_output"))
    nodes = [node for node in model.graph.node if f"{name}.codes" in node.input]
    assert len(nodes) == 12
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)
    assert Counter(tensor.name for tensor in model.graph.initializer)[f"{name}.codes"] == 1
    stored = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    planned = planned_bytes(quantized.contents.tensors())
    assert planned <= stored < planned + 256
    owners = json.loads(model.metadata_props[0].value)["integer_nodes"]
    assert all(owners[node.name] == [name] for node in nodes)


def test_groups_run_in_the_order_of_the_model():
    sizes = {**FAMILIES["albert"].tiny, "num_hidden_groups": 2, "inner_group_num": 2}
    model = build_tiny("AlbertModel", sizes)
    order = []
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[0].endswith("albert_layers"):
            module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
    original(model)
    assert [block.name for block in depths(map_module(model, name="tiny").blocks)] == order


def test_weights_may_lie_beside_the_graph(tmp_path):
    model = build_tiny("BertModel", {**FAMILIES["bert"].tiny, "hidden_size": 64})
    quantized = quantize(model, tmp_path)
    write(quantized, tmp_path / "inside.onnx")
    beside = write(quantized, tmp_path / "beside.onnx", outside=True)
    assert any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in beside.graph.initializer)
    made, wanted = run(tmp_path / "beside.onnx"), run(tmp_path / "inside.onnx")
    assert all(np.array_equal(made[name], wanted[name]) for name in wanted)


def test_half_planned_attention_is_computed_apart(tmp_path):
    model = build_tiny("BertModel", dict(FAMILIES["bert"].tiny))
    quantized = quantize(model, tmp_path, exclude=("*.key",))
    write(quantized, tmp_path / "model.onnx")
    done = set(check_models([tmp_path / "model.onnx"], quantized.plan).projections)
    assert done == {layer.name for layer in quantized.map.layers if not layer.name.endswith(".key")}
    made, wanted = run(tmp_path / "model.onnx"), original(model)
    assert error(made["last_hidden_state"], wanted["last_hidden_state"]).relative < 0.1


def test_a_node_that_is_gone_is_named(tmp_path):
    quantized = quantize(build_tiny("BertModel", dict(FAMILIES["bert"].tiny)), tmp_path)
    model = write(quantized, tmp_path / "model.onnx")
    lost = next(node for node in model.graph.node if node.name.endswith("0.intermediate.dense"))
    lost.op_type, lost.domain = "MatMul", ""
    save(model, tmp_path / "model.onnx")
    with pytest.raises(InputError, match=r"encoder\.layer\.0\.intermediate\.dense"):
        check_models([tmp_path / "model.onnx"], quantized.plan)


@pytest.mark.parametrize(
    ("class_name", "sizes", "reason"),
    [
        ("GPT2LMHeadModel", FAMILIES["gpt2"].tiny, "no plain encoder"),
        ("T5ForConditionalGeneration", FAMILIES["t5"].tiny, "no plain encoder"),
        ("BertForPreTraining", FAMILIES["bert"].tiny, "without a fused head"),
        ("BertLMHeadModel", {**FAMILIES["bert"].tiny, "is_decoder": True}, "without a fused head"),
        ("BertModel", {**FAMILIES["bert"].tiny, "hidden_act": "silu"}, None),
        ("BertModel", {**FAMILIES["bert"].tiny, "hidden_act": "mish"}, "without a fused operator"),
        ("ModernBertModel", {**MODERN, "hidden_activation": "mish"}, "without a fused operator"),
        ("ModernBertForMaskedLM", {**MODERN, "classifier_activation": "tanh"}, "its head has an activation"),
        ("ModernBertModel", {**MODERN, "classifier_activation": "tanh"}, None),
        ("ModernBertForMultipleChoice", MODERN, "without a fused head"),
        ("ElectraForMultipleChoice", FAMILIES["electra"].tiny, "without a fused head"),
        ("ElectraForCausalLM", {**FAMILIES["electra"].tiny, "is_decoder": True}, "without a fused head"),
        ("MPNetForMultipleChoice", FAMILIES["mpnet"].tiny, "without a fused head"),
        ("DebertaV2Model", {**DEBERTA, "share_att_key": False}, "'.*pos_key_proj' has no place"),
        ("DebertaV2Model", {**DEBERTA, "conv_kernel_size": 3}, "'.*conv.conv.weight' is a parameter"),
        ("DebertaV2Model", {**DEBERTA, "embedding_size": 16}, "'.*embed_proj' has no place"),
        (
            "DebertaV2ForMaskedLM",
            {**DEBERTA, "legacy": False, "tie_word_embeddings": False},
            "parameter of no known kind",
        ),
        (
            "DebertaV2ForSequenceClassification",
            {**DEBERTA, "pooler_hidden_act": "tanh"},
            "its head has an activation",
        ),
    ],
)
def test_what_cannot_be_emitted_says_why(class_name, sizes, reason):
    model_map = map_module(build_tiny(class_name, dict(sizes)), name="tiny")
    found = why_not_encoder(model_map)
    assert (found is None) if reason is None else re.search(reason, found)
    if reason:
        with pytest.raises(InputError, match=reason):
            emit_encoder(model_map, None, None, target=None, keeps_weights_outside=False, metadata={})


@pytest.mark.skipif(bool(WHY_NO_OPTIMUM), reason=f"optimum's runtime does not import here: {WHY_NO_OPTIMUM}")
@pytest.mark.parametrize("class_name", ["BertModel", "BertForMaskedLM", "DistilBertForMaskedLM"])
def test_optimum_runs_the_same_file(class_name, tmp_path):
    family = "distilbert" if class_name.startswith("Distil") else "bert"
    model = build_tiny(class_name, dict(FAMILIES[family].tiny))
    write(quantize(model, tmp_path), tmp_path / "model.onnx")
    model.config.save_pretrained(tmp_path)
    is_base = class_name.endswith("Model")
    client_class = ORTModelForFeatureExtraction if is_base else ORTModelForMaskedLM
    client = client_class.from_pretrained(tmp_path)
    feeds = {key: torch.tensor(FEEDS[key]) for key in ("input_ids", "attention_mask")}
    name = "last_hidden_state" if is_base else "logits"
    made = getattr(client(**feeds), name).numpy()
    ours = run(tmp_path / "model.onnx", {**FEEDS, "token_type_ids": np.zeros_like(FEEDS["input_ids"])})[name]
    assert error(made, ours).relative < 1e-5
    assert METADATA_KEY in {entry.key for entry in onnx.load(tmp_path / "model.onnx").metadata_props}
