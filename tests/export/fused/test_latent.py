"""Latents that are kept: block-diagonal or dense, in the real runtime, against torch and numpy."""

from __future__ import annotations

import copy
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from exporting import NOTHING, build_tiny, error, write_model
from fake_quantize import fake_quantize
from stored import open_checkpoint

from quantkit.errors import InputError
from quantkit.export.check import check_models
from quantkit.model.architectures.latents import keep_latents
from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.pipeline.stages.export import WEIGHTS_FILE, write_companions
from quantkit.plan.cost.specification import specify
from quantkit.plan.select import choose
from quantkit.runtime.cpu_session import open_on_cpu
from quantkit.runtime.decoder import open_decoder, positions_of

HEADS, HIDDEN = 4, 256
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_latent_heads": HEADS,
}
IDS = np.random.default_rng(0).integers(1, 60, (2, 9))


def make(folder, *, drifted=(), **changes):
    """A checkpoint whose latents are block-diagonal but for the layers that `drifted`."""
    model = build_tiny("WsFfnForCausalLM", {**SIZES, **changes})
    for index, ffn in enumerate(model.model.ffns()):
        if index not in drifted:
            width = ffn.config.z_dim
            blocks = [torch.ones(width, width)] * ffn.config.n_head
            ffn.latent.weight.data *= torch.block_diag(*blocks)
    model.save_pretrained(folder)
    return model


def export(folder, out, *, scheme="int8_block32", min_dim=1, keeps=True, **options):
    out.mkdir()
    source, model_map = open_source(str(folder)), inspect(str(folder))
    weights = open_weights(source, model_map, random_weights=False)
    if keeps:
        model_map = keep_latents(model_map, weights)
    plan = choose(model_map, min_dim=min_dim)
    exported = write_model(
        model_map, plan, weights, out, scheme=scheme, **{"keeps_checkpoint": True, **options}
    )
    write_companions(source, model_map, out)
    return model_map, plan, exported


def run_latents(out, ids=IDS):
    """{layer: latents} by onnxruntime alone."""
    session = open_on_cpu(str(out / "model.onnx"), onnxruntime.SessionOptions())
    mask = np.ones_like(ids)
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask, ids.shape[1])}
    for each in session.get_inputs():
        if each.name.startswith("past_key_values"):
            feeds[each.name] = np.zeros((len(ids), each.shape[1], 0, each.shape[3]), np.float32)
    names = [each.name for each in session.get_outputs() if each.name.startswith("latents")]
    return dict(zip(names, session.run(names, feeds), strict=True))


def torch_latents(model, ids=IDS):
    with torch.inference_mode():
        return [each.numpy() for each in model.eval().latents(torch.from_numpy(ids))]


def stored_bytes(out, name):
    slots = open_checkpoint(out / WEIGHTS_FILE).slots
    return {key.rpartition(".")[2]: slot.length for key, slot in slots.items() if key.startswith(f"{name}.")}


def test_at_inference_the_latent_is_left_out_of_map_checkpoint_and_graph(tmp_path):
    model = make(tmp_path / "model")
    model_map, plan, _ = export(tmp_path / "model", tmp_path / "out", keeps=False)
    latents = [entry for entry in plan.layers if "latent" in entry.name]
    assert [entry.name for entry in latents] == [f"model.layers.{i}.mlp.latent" for i in range(2)]
    assert all(not entry.quantized and "not run at inference" in entry.reason for entry in latents)
    assert plan.projections.total == plan.projections.quantized == 2 * 7 + 1
    num_latent = 2 * HIDDEN * HIDDEN
    assert plan.parameters.total == sum(p.numel() for p in model.parameters()) - num_latent
    assert any(f"{num_latent:,} weights run in training alone" in note for note in model_map.notes)
    assert not [name for name in open_checkpoint(tmp_path / "out" / WEIGHTS_FILE).slots if "latent" in name]
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    names = [node.name for node in graph.node] + [each.name for each in (*graph.initializer, *graph.output)]
    assert not [name for name in names if "latent" in name]


@pytest.mark.parametrize("drifted", [(), (1,), (0, 1)])
def test_float_latents_are_those_of_torch(drifted, tmp_path):
    model = make(tmp_path / "model", drifted=drifted, norm_placement="post" if drifted else "pre")
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    made, wanted = run_latents(tmp_path / "out"), torch_latents(model)
    assert list(made) == ["latents.0", "latents.1"]
    for index, expected in enumerate(wanted):
        assert expected.shape == (*IDS.shape, HEADS, HIDDEN // HEADS)
        assert error(made[f"latents.{index}"], expected).relative < 1e-5
        assert error(made[f"latents.{index}"], expected).absolute < 1e-4
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(IDS)).logits.numpy()
    assert error(open_decoder(tmp_path / "out", threads=1).logits(IDS), logits).relative < 1e-5


@pytest.mark.parametrize("scheme", ["int8_block32", "int8_block64", "int4_block32_zeros", "int8_channel"])
def test_integer_latents_are_those_of_the_checkpoint(scheme, tmp_path):
    """One layer block-diagonal, one dense: torch with the stored values and rounded inputs is the oracle."""
    model = make(tmp_path / "model", drifted=(1,))
    _, plan, _ = export(tmp_path / "model", tmp_path / "out", scheme=scheme)
    assert plan.projections.total == plan.projections.quantized == 2 * 8 + 1
    fake = fake_quantize(copy.deepcopy(model), open_checkpoint(tmp_path / "out" / WEIGHTS_FILE))
    made, wanted, original = run_latents(tmp_path / "out"), torch_latents(fake), torch_latents(model)
    for index in range(2):
        latent = made[f"latents.{index}"]
        assert error(latent, wanted[index]).relative < 2e-2
        lost = np.abs(latent - original[index]).mean()
        assert np.abs(latent - wanted[index]).mean() < 0.5 * lost + 1e-6
        assert 0 < lost < (0.3 if scheme.startswith("int4") else 0.05) * np.abs(original[index]).mean()


def test_a_block_diagonal_latent_takes_as_many_times_fewer_bytes_as_it_has_heads(tmp_path):
    make(tmp_path / "model", drifted=(1,))
    export(tmp_path / "model", tmp_path / "out")
    diagonal, dense = (stored_bytes(tmp_path / "out", f"model.layers.{i}.mlp.latent") for i in range(2))
    assert dense == {"codes": HIDDEN * HIDDEN, "scales": HIDDEN * HIDDEN // 32 * 2}
    assert diagonal == {key: size // HEADS for key, size in dense.items()}
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    held = [
        sum(len(each.raw_data) for each in graph.initializer if f"{i}.mlp.latent" in each.name)
        for i in range(2)
    ]
    assert held == [sum(diagonal.values()), sum(dense.values())], "the file holds it once, in slices"
    nodes = [node for node in graph.node if node.op_type == "MatMulNBits" and "0.mlp.latent" in node.name]
    assert len(nodes) == HEADS


@pytest.mark.parametrize("keeps_outside", [False, True])
def test_what_lies_off_the_diagonal_is_exactly_zero_in_the_runtime(keeps_outside, tmp_path):
    """A head's latents do not move by one bit when the hidden units of all other heads do."""
    model = make(tmp_path / "model")
    changed = copy.deepcopy(model)
    width = HIDDEN // HEADS
    changed.model.ffns()[0].w1.weight.data[width:] *= 3.0
    changed.save_pretrained(tmp_path / "changed")
    found = []
    for name in ("model", "changed"):
        out = tmp_path / f"{name}-out"
        export(tmp_path / name, out, single_file_bytes=0 if keeps_outside else 64 << 20)
        found.append(run_latents(out)["latents.0"])
    assert (found[0][:, :, 0] == found[1][:, :, 0]).all()
    assert np.abs(found[0][:, :, 1:] - found[1][:, :, 1:]).min(axis=(0, 1, 3)).shape == (HEADS - 1,)
    assert np.abs(found[0][:, :, 1:] - found[1][:, :, 1:]).mean() > 0.1


def test_heads_that_no_block_fills_are_padded(tmp_path):
    model = make(tmp_path / "model", intermediate_size=40, num_latent_heads=4)
    export(tmp_path / "model", tmp_path / "out")
    made, wanted = run_latents(tmp_path / "out"), torch_latents(model)
    for index in range(2):
        assert error(made[f"latents.{index}"], wanted[index]).relative < 0.05
    assert stored_bytes(tmp_path / "out", "model.layers.0.mlp.latent")["codes"] == 40 * 16


def test_a_file_that_lacks_a_head_is_found_out(tmp_path):
    make(tmp_path / "model")
    _, plan, _ = export(tmp_path / "model", tmp_path / "out")
    path = tmp_path / "out" / "model.onnx"
    check_models([path], plan)
    model = onnx.load(path)
    node = next(each for each in model.graph.node if each.name == "model.layers.0.mlp.latent#3")
    node.op_type = "MatMul"
    onnx.save(model, path)
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.latent"):
        check_models([path], plan)
    properties = {each.key: each.value for each in model.metadata_props}
    assert json.loads(properties["quantkit"])["num_blocks"]["model.layers.0.mlp.latent"] == HEADS


def test_costs_count_latents_where_they_run_alone(tmp_path):
    make(tmp_path / "model", drifted=(1,))
    model_map = inspect(str(tmp_path / "model"))
    weights = open_weights(open_source(str(tmp_path / "model")), model_map, random_weights=False)
    kept = keep_latents(model_map, weights)
    without, with_latents = (specify(each, batch=2, length=5) for each in (model_map, kept))
    num_latent = 2 * HIDDEN * HIDDEN
    assert without.totals.parameters == model_map.num_parameters - num_latent
    assert not [row for row in without.rows if "latent" in row.name]
    assert any(f"{num_latent:,} parameters" in note for note in without.notes)
    assert not any("training alone" in note for note in with_latents.notes)
    assert [layer.num_groups for layer in kept.layers if layer.role == "ffn_latent"] == [HEADS, 1]
    num_kept = HIDDEN * HIDDEN // HEADS + HIDDEN * HIDDEN
    assert with_latents.totals.parameters == without.totals.parameters + num_kept == kept.num_parameters
    plan = choose(kept, min_dim=1)
    assert (
        plan.parameters.total - plan.parameters.quantized
        == sum(norm.features for norm in kept.norms) + 61 * 32
    )
    more = with_latents.totals.matrix_macs - without.totals.matrix_macs
    assert more == 2 * 5 * num_kept


def test_a_model_without_latents_has_none_to_keep(tmp_path):
    build_tiny("ReferenceForCausalLM", {"vocab_size": 61}).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="no latent projection"):
        export(tmp_path / "model", tmp_path / "out")
