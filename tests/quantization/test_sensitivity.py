"""The loss of one product alone, against a model that was changed by hand, and against the runtime."""

from __future__ import annotations

import copy
import json
from functools import partial

import numpy as np
import pytest
import torch
from exporting import build_tiny, export
from stored import stored_scale

from quantkit.model.inspect import inspect_source, map_module
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.model.weights.torch_model import torch_model
from quantkit.plan.formats import in_blocks
from quantkit.plan.select import choose
from quantkit.quantization.calibration.statistics import no_statistics
from quantkit.quantization.layout import contents_of
from quantkit.quantization.sensitivity import measure_sensitivity
from quantkit.quantization.simulate import round_blocks
from quantkit.runtime.decoder import open_decoder
from quantkit.workers.open import open_workers
from quantkit.workers.record import WorkerSettings

SIZES = {"vocab_size": 61, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 40}
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
}
TOKENS = np.random.default_rng(0).integers(0, 61, (3, 24))


def nobody(_):
    return None


def units_of(model):
    model_map = map_module(model, name="tiny")
    contents = contents_of(model_map, choose(model_map, min_dim=1), in_blocks(32))
    return model_map, contents.packs


def divergence(model, changed):
    """KL(model || changed), token by token in float64."""
    total = []
    for window in TOKENS:
        ids = torch.from_numpy(window[None])
        with torch.inference_mode():
            p = model(input_ids=ids).logits[0].double().log_softmax(-1).numpy()
            q = changed(input_ids=ids).logits[0].double().log_softmax(-1).numpy()
        total += [(np.exp(a) * (a - b)).sum() for a, b in zip(p, q, strict=True)]
    return float(np.mean(total))


def rounded(weight_OI, bits):
    """Blocks of 32, one after the other."""
    largest = 2 ** (bits - 1) - 1
    made = weight_OI.copy()
    for row in made:
        for start in range(0, len(row), 32):
            scale = np.float32(stored_scale(np.abs(row[start : start + 32]).max() / largest))
            row[start : start + 32] = np.round(row[start : start + 32] / scale) * scale
    return made


@pytest.mark.parametrize(("name", "bits"), [("int8_block32", 8), ("int4_block32", 4)])
def test_one_product_alone_loses_what_a_changed_model_loses(name, bits, tmp_path):
    model = build_tiny("GPT2LMHeadModel", SIZES)
    before = copy.deepcopy(model.state_dict())
    model_map, units = units_of(model)
    found = measure_sensitivity(
        model, model_map, units, [name], TOKENS,
        fit="rtn", statistics=nobody, cache=tmp_path / "s.json", key="tiny",
    )  # fmt: skip
    assert [unit.name for unit in found] == [unit.name for unit in units]
    changed = copy.deepcopy(model)
    linear = changed.transformer.h[1].mlp.c_fc
    linear.weight.data = torch.from_numpy(rounded(linear.weight.detach().numpy().T, bits).T.copy())
    linear.register_forward_pre_hook(lambda _, inputs: (round_blocks(inputs[0], 32),))
    option = next(unit for unit in found if unit.name == "transformer.h.1.mlp.c_fc").options
    losses = {choice.format: choice.loss for choice in option}
    assert losses["float"] == 0
    assert losses[name] == pytest.approx(divergence(model, changed), rel=0.02)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} was not put back"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_head_that_shares_its_table_changes_the_embedding_too(tmp_path):
    model = build_tiny("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True})
    model_map, units = units_of(model)
    head = [unit for unit in units if unit.name == "lm_head"]
    found = measure_sensitivity(
        model, model_map, head, ["int8_block32"], TOKENS,
        fit="rtn", statistics=nobody, cache=tmp_path / "s.json", key="tiny",
    )  # fmt: skip
    changed = copy.deepcopy(model)
    weight = changed.model.embed_tokens.weight
    weight.data = torch.from_numpy(rounded(weight.detach().numpy(), 8))
    assert changed.lm_head.weight is weight
    changed.lm_head.register_forward_pre_hook(lambda _, inputs: (round_blocks(inputs[0], 32),))
    assert found[0].options[1].loss == pytest.approx(divergence(model, changed), rel=0.02)


def test_losses_of_all_products_add_up_to_about_that_of_the_exported_model(tmp_path):
    model = build_tiny("LlamaForCausalLM", LLAMA)
    model.save_pretrained(tmp_path / "model")
    model_map, units = units_of(model)
    found = measure_sensitivity(
        model, model_map, units, ["int8_block32"], TOKENS,
        fit="rtn", statistics=nobody, cache=tmp_path / "s.json", key="tiny",
    )  # fmt: skip
    export(tmp_path / "model", tmp_path / "out", scheme="int8_block32")
    decoder = open_decoder(tmp_path / "out", threads=1)
    with torch.inference_mode():
        p = model(input_ids=torch.from_numpy(TOKENS)).logits.double().log_softmax(-1)
    q = torch.from_numpy(decoder.logits(TOKENS)).double().log_softmax(-1)
    whole = float((p.exp() * (p - q)).sum(-1).mean())
    assert sum(unit.options[1].loss for unit in found) == pytest.approx(whole, rel=0.5)


def test_what_is_known_is_not_measured_again(tmp_path):
    model = build_tiny("GPT2LMHeadModel", SIZES)
    model_map, units = units_of(model)
    cache = tmp_path / "s.json"

    def run(key="tiny", fit="rtn"):
        return measure_sensitivity(
            model, model_map, units[:2], ["int8_block32"], TOKENS,
            fit=fit, statistics=nobody, cache=cache, key=key,
        )  # fmt: skip

    first = run()
    stored = json.loads(cache.read_text())
    stored["losses"][f"{units[0].name}: int8_block32"] = 0.5
    del stored["losses"][f"{units[1].name}: int8_block32"]
    cache.write_text(json.dumps(stored))
    again = run()
    assert again[0].options[1].loss == 0.5, "read, not measured"
    assert again[1] == first[1], "measured, since it was missing"
    assert run(key="other") == first, "figures of another model are not taken"
    cache.write_text("{")
    assert run() == first, "a damaged file is no obstacle"


@pytest.mark.slow
def test_workers_measure_the_losses_of_one_process(tmp_path):
    build_tiny("LlamaForCausalLM", LLAMA).save_pretrained(tmp_path / "model")
    source = open_source(tmp_path / "model")
    model_map = inspect_source(source)
    weights = open_weights(source, model_map, random_weights=False)
    build = partial(torch_model, source, model_map, weights)
    _, units = units_of(build())

    def run(module, name, **options):
        return measure_sensitivity(
            module, model_map, units, ["int8_block32", "int4_block32"], TOKENS,
            fit="rtn", statistics=no_statistics, cache=tmp_path / name, key="tiny", **options,
        )  # fmt: skip

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = run(build(), "alone.json")
    finally:
        torch.set_num_threads(threads)
    progress = []
    with open_workers(WorkerSettings(number=2)) as workers:
        assert run(None, "spread.json", workers=workers, rebuild=build, progress=progress.append) == alone
    assert sum(progress) == 2 * len(units)
