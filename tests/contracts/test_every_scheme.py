"""Every scheme of the table on a tiny model: written, exported and run, and as accurate as it says."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from exporting import build_tiny, error, export, observe
from fake_quantize import fake_quantize
from stored import open_checkpoint

from quantkit.model.model_map import Role
from quantkit.plan.formats import SCHEMES, with_little_padding
from quantkit.plan.targets import TARGETS
from quantkit.quantization.layout import DTYPES, planned_bytes
from quantkit.recipe import Recipe
from quantkit.runtime.decoder import open_decoder

SIZES = {"vocab_size": 61, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 40}
IDS = np.random.default_rng(0).integers(0, 61, (2, 24))


def logits_of(model):
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(IDS)).logits.numpy()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """(the model's folder, its logits, the model)."""
    folder = tmp_path_factory.mktemp("original")
    model = build_tiny("GPT2LMHeadModel", SIZES)
    model.save_pretrained(folder)
    return folder, logits_of(model), model


@pytest.fixture(scope="module")
def exported(original, tmp_path_factory):
    """Each scheme's folder and what was exported, made once."""
    made, statistics = {}, observe(original[2], IDS)
    for name in SCHEMES:
        folder = tmp_path_factory.mktemp(name)
        made[name] = (folder, export(original[0], folder, scheme=name, statistics=statistics))
    return made


@pytest.mark.parametrize("name", SCHEMES)
def test_it_runs_and_stays_near_the_original(name, original, exported):
    decoder = open_decoder(exported[name][0], threads=1)
    made = error(decoder.logits(IDS), original[1])
    bound = 0.05 if SCHEMES[name].body.grid.bits == 8 else 0.5
    assert 1e-5 < made.relative < bound, "the rounding shows, and is small"
    assert made.absolute < bound * np.abs(original[1]).max()


@pytest.mark.parametrize("name", SCHEMES)
def test_the_runtime_computes_what_the_checkpoint_says(name, original, exported):
    """Against the checkpoint read back into torch, rounding inputs as the runtime does."""
    checkpoint = open_checkpoint(exported[name][0] / "weights.safetensors")
    fake = logits_of(fake_quantize(copy.deepcopy(original[2]), checkpoint))
    made = open_decoder(exported[name][0], threads=1).logits(IDS)
    assert error(made, fake).relative < 0.02, "one code more or less where a float sum fell otherwise"
    assert np.median(np.abs(made - fake)) < 3e-3 * np.abs(fake).max()


def test_accuracy_falls_from_small_blocks_to_one_scale_a_tensor(original, exported):
    """Root of the mean square, since the largest single error of a tiny model is chance."""
    errors = {}
    for name in SCHEMES:
        decoder = open_decoder(exported[name][0], threads=1)
        errors[name] = float(np.sqrt(((decoder.logits(IDS) - original[1]) ** 2).mean()))
    assert errors["int8_block16"] < errors["int8_block64"] < errors["int8_channel"]
    assert errors["int8_static16"] < errors["int8_static8"]
    assert errors["int8_block128"] < errors["int4_block32"] < errors["int4_block128"]
    assert errors["int4_block32_zeros"] < errors["int4_block32"], "a zero point uses every code"
    assert min(errors, key=lambda name: errors[name]) in ("int8_block16", "int8_block32")


@pytest.mark.parametrize("name", SCHEMES)
def test_planned_bytes_are_the_bytes_of_the_tensors(name, exported):
    folder, result = exported[name]
    checkpoint = open_checkpoint(folder / "weights.safetensors")
    arrays = [checkpoint.read(tensor) for tensor in checkpoint.slots]
    planned = planned_bytes(result.contents.tensors())
    assert planned == sum(array.nbytes for array in arrays)
    assert planned == planned_bytes(slot.spec for slot in checkpoint.slots.values())
    assert result.planned_bytes == pytest.approx(result.num_bytes, rel=0.01)
    assert {str(array.dtype) for array in arrays} <= {np.dtype(kind).name for kind in DTYPES.values()}
    for pack in result.contents.packs:
        stored = sum(
            checkpoint.slots[spec.name].length
            for spec in pack.tensors()
            if not spec.name.endswith((".bias", ".input_scale", ".input_zero"))
        )
        role = pack.layers[0].role
        row = SCHEMES[name].format_of(role)
        grid = with_little_padding(row.grid, pack.in_features) if role is Role.LM_HEAD else row.grid
        outliers = (2 * pack.out_features + 8) * (pack.in_features // 32 if row.outliers else 0)
        assert stored == grid.num_bytes(pack.out_features, pack.in_features) + outliers
        assert stored == replace(row, grid=grid).num_bytes(pack.out_features, pack.in_features)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_planned_projection_is_integer_in_the_file(name, exported):
    placement = exported[name][1].placement
    assert len(placement.projections) == 13  # six of each block, and the head
    count = 13 if Role.ATTENTION_VALUE in SCHEMES[name].roles else 9
    assert placement.num_integer_nodes == count, "query, key and value of one format are one node"
    if SCHEMES[name].body.grid.block:
        assert placement.integer_operators == {"MatMulNBits": count}
    else:
        kind = "MatMul" if SCHEMES[name].body.is_static else "DynamicQuantizeMatMul"
        assert placement.integer_operators == {kind: 8, "MatMulNBits": 1}


@pytest.mark.parametrize(
    "name", [name for name in SCHEMES if SCHEMES[name].body.activations not in ("tensor", "token", "mixed")]
)
def test_a_row_is_the_same_beside_any_other(name, exported):
    decoder = open_decoder(exported[name][0], threads=1)
    together, alone = decoder.logits(IDS), decoder.logits(IDS[:1])
    assert error(together[:1], alone).relative < 1e-3


@pytest.mark.once
def test_a_recipe_can_name_every_scheme_and_target_and_no_other():
    schema = Recipe.model_json_schema()["properties"]
    assert set(schema["scheme"]["enum"]) == {"auto", *SCHEMES}
    assert set(schema["target"].get("enum", [schema["target"].get("const")])) == set(TARGETS)


@pytest.mark.once
@pytest.mark.parametrize("name", SCHEMES)
def test_its_name_says_its_grid(name):
    row = SCHEMES[name]
    grid, activations = row.body.grid, row.body.activations
    kind = f"block{grid.block}" if grid.block else {"tensor": "channel"}.get(activations, activations)
    mixed_name = f"int{grid.bits}" if row.roles else None
    ending = "_outliers" if row.body.outliers else "" if grid.is_symmetric else "_zeros"
    assert name == (mixed_name or f"int{grid.bits}_{kind}{ending}")
    assert (activations == "block") is (grid.block is not None)
    assert row.head.grid.block, "one position at a time is read block-wise"
    assert row.head.grid.is_symmetric, "an embedding reads rows of it"
