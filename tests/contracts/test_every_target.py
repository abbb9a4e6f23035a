"""Every target of the table: what is exported keeps its promises, and a file that does not is refused."""

from __future__ import annotations

import dataclasses
import platform

import numpy as np
import onnx
import pytest
import torch
from exporting import build_tiny, error, export
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError
from quantkit.export.check import broken_promises, check_models, require_promises
from quantkit.plan.select import choose
from quantkit.plan.targets import ARM, DEFAULT_TARGET, FUSED, TARGETS
from quantkit.recipe import Recipe
from quantkit.runtime.decoder import open_decoder
from quantkit.runtime.encoder import encode, open_encoder

GPT2 = {"vocab_size": 61, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 40}
BERT = {"vocab_size": 61, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 192, "max_position_embeddings": 40}
MODELS = {"GPT2LMHeadModel": (GPT2, "int8_block32"), "BertModel": (BERT, "int8_mixed")}
IDS = np.random.default_rng(0).integers(0, 61, (2, 24))
ROWS = [name for name, row in TARGETS.items() if not row.is_static]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {}
    for name, (sizes, _) in MODELS.items():
        folder, model = tmp_path_factory.mktemp(name), build_tiny(name, sizes)
        model.save_pretrained(folder)
        with torch.inference_mode():
            found = model(input_ids=torch.from_numpy(IDS))
        made[name] = (folder, (found.logits if "logits" in found else found.last_hidden_state).numpy())
    return made


def scheme_for(target: str, name: str) -> str:
    """A scheme that the target has the operators for."""
    has_channels = "com.microsoft::DynamicQuantizeMatMul" in TARGETS[target].fused_operators
    return MODELS[name][1] if has_channels else "int8_block32"


@pytest.fixture(scope="module")
def exported(originals, tmp_path_factory):
    """(folder, what was exported) by target and model, made when first asked for."""
    made = {}

    def ask(target: str, name: str):
        if (target, name) not in made:
            folder = tmp_path_factory.mktemp(f"{target}-{name}")
            scheme = scheme_for(target, name)
            result = export(originals[name][0], folder, scheme=scheme, target=target)
            made[target, name] = (folder, result)
        return made[target, name]

    return ask


def graph_of(exported, target, name="GPT2LMHeadModel"):
    return onnx.load(exported(target, name)[0] / "model.onnx")


def faults(model, target="cpu"):
    return list(broken_promises(model, TARGETS[target]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ROWS)
def test_what_is_exported_keeps_the_promises(target, name, exported):
    model, row = graph_of(exported, target, name), TARGETS[target]
    assert faults(model, target) == []
    opsets = {each.domain: each.version for each in model.opset_import}
    # The standard's attention is the one operator that asks for more, and on a CPU what encoders have.
    is_newest = any(node.op_type == "Attention" for node in model.graph.node)
    assert is_newest == (name == "BertModel" and row.opset > 21)
    assert opsets == {"": 23 if is_newest else 21, "com.microsoft": 1}
    assert model.ir_version == (11 if is_newest else 10)
    assert opsets[""] <= row.opset
    assert model.ir_version <= row.ir_version
    assert set(row.domains) >= {node.domain for node in model.graph.node} - {""}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ROWS)
def test_what_is_exported_runs_and_is_near_the_original(target, name, exported, originals):
    if TARGETS[target].machines and platform.machine() not in TARGETS[target].machines:
        pytest.skip(f"{target} is for {TARGETS[target].machines[0]}, and this is {platform.machine()}")
    if TARGETS[target].is_half:
        pytest.skip(f"{target} is in half precision, which tests/export/test_half.py runs")
    folder = exported(target, name)[0]
    if name == "BertModel":
        made = encode(open_encoder(folder, threads=1), IDS)["last_hidden_state"]
    else:
        made = open_decoder(folder, threads=1).logits(IDS)
    found = error(made, originals[name][1])
    assert 1e-5 < found.relative < 0.08
    assert found.absolute < 0.08 * np.abs(originals[name][1]).max()


@pytest.mark.once
@pytest.mark.parametrize("name", MODELS)
def test_arm_has_the_operators_of_x86_and_signed_weights(name, exported):
    """The structure alone: nothing here is an Arm processor."""
    arm, x86 = (graph_of(exported, target, name) for target in ("cpu-arm", "cpu"))
    assert [node.op_type for node in arm.graph.node] == [node.op_type for node in x86.graph.node]
    types = {tensor.name: tensor.data_type for tensor in arm.graph.initializer}
    for node in arm.graph.node:
        if node.op_type == "DynamicQuantizeMatMul":
            assert types[node.input[1]] == TensorProto.INT8
        if node.op_type == "MatMulNBits":  # stored as code + 128, without a zero point of their own
            assert types[node.input[1]] == TensorProto.UINT8
            assert len(node.input) < 4 or not node.input[3]
    assert TARGETS["cpu-arm"].machines == ARM
    assert TARGETS["cpu-arm"].channel_bits == 8


@pytest.mark.once
def test_a_recipe_can_name_every_target_and_no_other():
    assert set(Recipe.model_json_schema()["properties"]["target"]["enum"]) == set(TARGETS)
    assert Recipe().target == DEFAULT_TARGET
    assert TARGETS["cpu"] is TARGETS["cpu-vnni"]
    assert all(row.description for row in TARGETS.values())


@pytest.mark.once
def test_a_node_outside_of_the_promise_is_named_with_its_layer(exported):
    model = graph_of(exported, "cpu")
    (node,) = (each for each in model.graph.node if each.name == "transformer.h.1/activation")
    node.op_type = "GroupNorm"
    (fault,) = faults(model)
    assert fault == ("com.microsoft::GroupNorm (node 'transformer.h.1/activation', layer 'transformer.h.1')")
    unnamed = helper.make_node("Nonsense", [node.output[0]], ["made"], name="Nonsense_7")
    model.graph.node.append(unnamed)
    assert faults(model)[1] == "Nonsense (node 'Nonsense_7', layer 'transformer.h.1')"
    scoped = helper.make_node("Foo", [], ["y"], name="/h.0/attn/Foo", domain="ai.acme")
    model.graph.node.append(scoped)
    assert faults(model)[2] == "ai.acme::Foo (node '/h.0/attn/Foo', layer 'h.0.attn')"


@pytest.mark.once
def test_it_is_refused_before_anything_runs(exported, tmp_path):
    model = graph_of(exported, "cpu")
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            node.op_type = "LayerNorm"
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    result = exported("cpu", "GPT2LMHeadModel")[1]
    plan = choose(_map_of(result), min_dim=1)
    with pytest.raises(InputError, match=r"breaks what its target promises.*transformer\.h\.0\.ln_1.*more"):
        check_models([path], plan, TARGETS["cpu"])
    with pytest.raises(InputError, match="choose another --target or --scheme"):
        require_promises(path, model, TARGETS["cpu"])


def _map_of(result):
    from quantkit.model.inspect import inspect

    return inspect(str(result.folder))


@pytest.mark.once
def test_opset_and_ir_version_are_bounds(exported):
    model, row = graph_of(exported, "cpu"), TARGETS["cpu"]
    model.ir_version = row.ir_version + 1
    next(each for each in model.opset_import if not each.domain).version = row.opset + 1
    assert faults(model) == ["opset 24 is newer than 23", "IR version 12 is newer than 11"]
    model.ir_version -= 3
    next(each for each in model.opset_import if not each.domain).version -= 5
    assert faults(model) == []


@pytest.mark.once
def test_element_types_are_promised(exported):
    model = graph_of(exported, "cpu")
    gain = next(each for each in model.graph.initializer if each.name == "transformer.ln_f.weight")
    half = numpy_helper.to_array(gain).astype(np.float16)
    gain.CopyFrom(numpy_helper.from_array(half, gain.name))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    model.graph.node.append(
        helper.make_node("Cast", ["logits"], ["low"], name="Cast_99", to=TensorProto.FLOAT16)
    )
    value = helper.make_tensor("v", TensorProto.FLOAT16, [1], [0.5])
    model.graph.node.append(helper.make_node("Constant", [], ["half"], name="Constant_98", value=value))
    output = model.graph.output[0].name
    assert sorted(faults(model)) == [
        "Cast makes FLOAT16 (node 'Cast_99', layer 'lm_head')",
        "Constant makes FLOAT16 (node 'Constant_98', layer 'none')",
        f"output '{output}' is BFLOAT16",
        "weight 'transformer.ln_f.weight' is FLOAT16",
    ]


@pytest.mark.once
def test_fixed_sizes_are_promised(exported):
    model = graph_of(exported, "cpu")
    row = dataclasses.replace(TARGETS["cpu"], is_static=True)
    found = list(broken_promises(model, row))
    assert "input 'input_ids' has the free size batch, sequence" in found
    for value in (*model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            size.dim_value = size.dim_value or 1
    assert list(broken_promises(model, row)) == []


@pytest.mark.once
def test_a_list_of_standard_operators_is_a_promise(exported):
    model = graph_of(exported, "cpu")
    used = {node.op_type for node in model.graph.node if not node.domain}
    row = dataclasses.replace(TARGETS["cpu"], standard_operators=frozenset(used))
    assert list(broken_promises(model, row)) == []
    without = dataclasses.replace(row, standard_operators=frozenset(used - {"ArgMax"}))
    (fault,) = broken_promises(model, without)
    assert fault.startswith("ArgMax (node ")
    no_domain = dataclasses.replace(row, domains=())
    assert {fault.split("::")[0] for fault in broken_promises(model, no_domain)} == {"com.microsoft"}


@pytest.mark.once
def test_branches_are_looked_into(exported):
    model = graph_of(exported, "cpu")
    inner = helper.make_graph(
        [helper.make_node("Upsample", ["logits"], ["y"], name="deep.one")], "then", [], []
    )
    branch = helper.make_node("If", ["c"], ["z"], name="If_1", then_branch=inner, else_branch=inner)
    model.graph.node.append(branch)
    assert faults(model) == ["Upsample (node 'deep.one', layer 'deep.one')"] * 2, "deprecated since opset 10"


@pytest.mark.once
def test_every_fused_operator_of_the_table_is_one_that_onnxruntime_runs():
    import onnxruntime.capi.onnxruntime_pybind11_state as state

    known = {f"{each.domain}::{each.name}" for each in state.get_all_operator_schema()}
    assert known >= FUSED
