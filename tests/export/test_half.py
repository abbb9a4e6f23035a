"""Graphs in half precision: the same numbers to float16's precision, run by whoever has the operators.

No GPU is needed: onnxruntime's CPU provider has most of the operators for float16 and converts around the
rest.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from exporting import build_tiny, error, export
from onnx import TensorProto, numpy_helper

from quantkit.errors import InputError
from quantkit.export.half import to_half
from quantkit.pipeline.stages.export import ExportJob, export_float
from quantkit.plan.targets import TARGETS

GPT2 = {"vocab_size": 61, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 40}
LLAMA = {"vocab_size": 61, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 40}
BERT = {"vocab_size": 61, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 192, "max_position_embeddings": 40}
MODELS = {"GPT2LMHeadModel": GPT2, "LlamaForCausalLM": LLAMA, "BertModel": BERT}
SCHEMES = ("int8_block32", "int8_block128", "int4_block32", "int4_block32_zeros")
IDS = np.random.default_rng(0).integers(0, 61, (2, 24))
STEPS = 6


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {}
    for name, sizes in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        build_tiny(name, sizes).save_pretrained(made[name])
    return made


def open_file(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])


def run(folder, ids=IDS, past=None):
    """Every output by name; `past` are the outputs of the call before, whose tokens come first."""
    session = open_file(folder / "model.onnx")
    held = next(iter(past.values())).shape[2] if past else 0
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones((len(ids), held + ids.shape[1]), np.int64),
        "token_type_ids": np.zeros_like(ids),
        "position_ids": np.tile(held + np.arange(ids.shape[1]), (len(ids), 1)),
    }
    if "past" in str([each.name for each in session.get_inputs()]):
        feeds["attention_mask"] *= ids.shape[1]  # logits of all
    types = {"tensor(float16)": np.float16, "tensor(float)": np.float32}
    for each in session.get_inputs():
        if each.name.startswith("past"):
            empty = np.zeros((len(ids), each.shape[1], 0, each.shape[3]), types[each.type])
            feeds[each.name] = past[each.name.replace("past_key_values", "present")] if past else empty
    names = [each.name for each in session.get_outputs()]
    found = session.run(names, {each.name: feeds[each.name] for each in session.get_inputs()})
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_float32_graph_computes(name, scheme, originals, tmp_path):
    wide, half = tmp_path / "wide", tmp_path / "half"
    export(originals[name], wide, scheme=scheme)
    export(originals[name], half, scheme=scheme, target="gpu")
    _round_no_input(wide / "model.onnx")
    wanted, made = run(wide), run(half)
    assert set(made) == set(wanted)
    for key, values in made.items():
        assert values.dtype == (np.float16 if key.startswith("present") else np.float32)
        found = error(values, wanted[key])
        assert 1e-6 < found.relative < 0.005, key
        assert np.median(np.abs(values - wanted[key])) < 1e-3 * np.abs(wanted[key]).max()


def _round_no_input(path):
    """Products with their inputs as they are, which is how a graph of halves computes."""
    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    onnx.save(model, path)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_token_by_token_it_says_what_it_says_at_once(name, originals, tmp_path):
    export(originals[name], tmp_path, scheme="int8_block32", target="gpu")
    whole = run(tmp_path)
    first = IDS.shape[1] - STEPS
    state = run(tmp_path, IDS[:, :first])
    for place in range(first, IDS.shape[1]):
        past = {key: values for key, values in state.items() if key.startswith("present")}
        assert next(iter(past.values())).dtype == np.float16
        state = run(tmp_path, IDS[:, place : place + 1], past)
        found = error(state["logits"][:, 0], whole["logits"][:, place])
        assert found.relative < 0.005
        assert found.absolute < 0.005 * np.abs(whole["logits"]).max()


@pytest.mark.once
def test_nothing_but_the_outputs_is_float32(originals, tmp_path):
    export(originals["GPT2LMHeadModel"], tmp_path, scheme="int8_block32", target="gpu")
    model = onnx.load(tmp_path / "model.onnx")
    assert {tensor.data_type for tensor in model.graph.initializer} == {
        TensorProto.FLOAT16,
        TensorProto.UINT8,
        TensorProto.INT64,
    }
    casts = {
        node.name: attribute.i
        for node in model.graph.node
        if node.op_type == "Cast"
        for attribute in node.attribute
    }
    assert [name for name, to in casts.items() if to == TensorProto.FLOAT] == ["logits/widened"]
    assert model.graph.node[-1].name == "logits/widened"
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=False)
    types = {value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    assert TensorProto.FLOAT not in types
    assert TensorProto.FLOAT16 in types


@pytest.mark.once
def test_weights_beside_the_graph_are_halved_in_it(originals, tmp_path):
    inside, beside = tmp_path / "inside", tmp_path / "beside"
    export(originals["GPT2LMHeadModel"], inside, target="gpu", min_dim=100)
    export(originals["GPT2LMHeadModel"], beside, target="gpu", min_dim=100, single_file_bytes=0)
    model = onnx.load(beside / "model.onnx", load_external_data=False)
    outside = [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    assert outside
    assert {tensor.data_type for tensor in outside} == {TensorProto.UINT8, TensorProto.FLOAT16}
    wanted, made = run(inside), run(beside)
    assert all(np.array_equal(made[key], wanted[key]) for key in wanted)


@pytest.mark.once
def test_what_float16_cannot_hold_is_refused(originals, tmp_path):
    export(originals["GPT2LMHeadModel"], tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    for name, value, words in (("transformer.ln_f.weight", 7e4, "holds 7e[+]04, which float16 cannot"),):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        tensor = next(each for each in changed.graph.initializer if each.name == name)
        values = numpy_helper.to_array(tensor).copy()
        values.flat[0] = value
        tensor.CopyFrom(numpy_helper.from_array(values, name))
        with pytest.raises(InputError, match=words):
            to_half(changed, tmp_path)


@pytest.mark.once
def test_products_that_no_gpu_has_are_named(originals, tmp_path):
    with pytest.raises(InputError, match=r"DynamicQuantizeMatMul \(node 'transformer\.h\.0\.attn\.c_attn"):
        export(originals["GPT2LMHeadModel"], tmp_path, scheme="int8_channel", target="gpu")


@pytest.mark.once
def test_the_reference_stays_in_float32(originals, tmp_path):
    from quantkit.model.inspect import inspect
    from quantkit.model.load import open_source
    from quantkit.model.weights.open import open_weights
    from quantkit.plan.select import choose

    folder = str(originals["GPT2LMHeadModel"])
    model_map = inspect(folder)
    weights = open_weights(open_source(folder), model_map, random_weights=False)
    plan = choose(model_map, min_dim=1)
    job = ExportJob(model_map=model_map, plan=plan, weights=weights, scheme="int8_block32", target="gpu")
    export_float(job, tmp_path)
    types = {tensor.data_type for tensor in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert TensorProto.FLOAT16 not in types
    assert TARGETS["gpu"].is_half
