"""Hidden units that sleep, repeat or shout, planted where a test knows them, and units proved dead."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from exporting import build_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.cli.inspect import show_ffn_units
from quantkit.errors import InputError
from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.pipeline.ffn_units import bits_lost, ffn_units, observe_units, verdict
from quantkit.quantization.dead_units import dead_units
from quantkit.report.losses import sensitivity_page

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
TOKENS = np.random.default_rng(0).integers(1, 60, (3, 24))
VARIANTS = {
    "relu": {"ffn_kind": "standard", "hidden_act": "relu", "norm_kind": "layer_norm", "uses_bias": True},
    "gelu": {"ffn_kind": "standard", "hidden_act": "gelu", "norm_kind": "rms_norm", "uses_bias": True},
    "swiglu": {"ffn_kind": "gated", "hidden_act": "silu"},
    "reglu": {"ffn_kind": "gated", "hidden_act": "relu", "uses_bias": True, "norm_placement": "post"},
}


def build(name):
    return build_tiny("ReferenceForCausalLM", {**SIZES, **VARIANTS[name]})


def looked_at(model, folder):
    model.save_pretrained(folder)
    source, model_map = open_source(str(folder)), inspect(str(folder))
    weights = open_weights(source, model_map, random_weights=False)
    return model_map, weights, observe_units(source, model_map, weights, TOKENS)


def hidden_of(model):
    """What the first block's way down reads, by a hook: the oracle of every count."""
    seen = []
    down = model.model.layers[0].mlp.down_proj
    handle = down.register_forward_pre_hook(lambda _, given_: seen.append(given_[0].detach().clone()))
    with torch.no_grad():
        for window in TOKENS:
            model(torch.from_numpy(window[None]))
    handle.remove()
    return torch.cat(seen).reshape(-1, SIZES["intermediate_size"]).numpy()


def curved(mlp):
    """The projection before the curve."""
    return mlp.gate_proj if hasattr(mlp, "gate_proj") else mlp.up_proj


@pytest.mark.once
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_planted_is_found(name, tmp_path):
    model = build(name)
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        keys = [each for each in (mlp.up_proj, getattr(mlp, "gate_proj", None)) if each is not None]
        for each in keys:  # 3 silent units, 2 copies of another
            each.weight[[1, 2, 3]] = 0
            each.weight[[10, 11]] = each.weight[9].clone()
            if each.bias is not None:
                each.bias[9] += 1  # awake on every text
            if each.bias is not None:
                each.bias[[1, 2, 3]] = 0
                each.bias[[10, 11]] = each.bias[9].clone()
        mlp.up_proj.weight[20] *= 100  # one outlier
        (mlp.up_proj if len(keys) == 1 else keys[1]).weight[20].abs_()
    hidden_TH = np.abs(hidden_of(model))
    peak_H = hidden_TH.max(0)
    quiet = 0.0 if "relu" in VARIANTS[name]["hidden_act"] else 0.01 * np.median(peak_H[peak_H > 0])
    _, _, report = looked_at(model, tmp_path)
    first = report.layers[0]
    assert report.num_tokens == first.num_rows == TOKENS.size
    assert report.way == "blocks"
    assert first.num_silent == (peak_H <= quiet).sum() >= 3
    typical = np.median(peak_H[peak_H > quiet])
    assert first.typical_peak == pytest.approx(typical, rel=1e-5)
    assert first.peak == pytest.approx(peak_H.max(), rel=1e-5)
    assert first.num_outliers == (peak_H > 8 * typical).sum() >= 1
    assert first.num_duplicates == 2
    assert first.num_proved >= 3
    assert report.layers[1].num_duplicates == 0
    assert first.bits_lost_in_row == pytest.approx(np.log2(peak_H.max() / typical), rel=1e-4)
    assert first.verdict != "any"
    assert report.layers[1].verdict == "any"


@pytest.mark.once
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_proved_is_silent_whatever_is_read(name, tmp_path):
    """In float64, on random norm outputs of every length that the norm can give: the very worst included."""
    model = build(name).double()
    relu = VARIANTS[name]["hidden_act"] == "relu"
    mlp = model.model.layers[0].mlp
    key = curved(mlp)
    with torch.no_grad():
        key.weight[4] = 0
        if key.bias is not None:
            key.bias[4] = 0
            key.bias[[5, 6]] -= 200  # far below what any input reaches
            key.bias[7] -= 3  # below most inputs, but not all: no proof
        mlp.down_proj.weight[:, 8] = 0
    model_map, weights, _ = looked_at(model, tmp_path)
    found = dead_units(model_map, weights, model_map.blocks[0])
    has_bounds = relu and key.bias is not None
    assert set(np.flatnonzero(found.silent_H)) == ({4, 5, 6} if has_bounds else {4})
    assert list(np.flatnonzero(found.unread_H)) == [8]
    norm = model.model.layers[0].ffn_norm
    norm = model.model.layers[0].attention_norm if VARIANTS[name].get("norm_placement") == "post" else norm
    with torch.no_grad():
        x = (
            torch.randn(2000, 32, dtype=torch.float64)
            * torch.logspace(-2, 3, 2000, dtype=torch.float64)[:, None]
        )
        worst = torch.linalg.pinv(key.weight[5:8] * norm.weight).T * 1e6  # what wakes those units most
        given_ = norm(torch.cat([x, worst, -worst]))
        made = mlp.act_fn(key(given_))
    assert (made[:, found.silent_H] == 0).all()


@pytest.mark.once
def test_the_page_of_the_embedded_model_says_what_its_json_says(capsys):
    def shown(output_format, *, is_wanted=True, max_tokens="256"):
        show_ffn_units("demo", is_wanted, None, max_tokens, False, output_format)
        return capsys.readouterr().out

    document = json.loads(shown("json"))
    assert (document["num_tokens"], document["way"], len(document["layers"])) == (256, "blocks", 6)
    assert {each["hidden_features"] for each in document["layers"]} == {1024}
    page = shown("markdown")
    for each in document["layers"]:
        (line,) = (line for line in page.splitlines() if each["block"] in line)
        assert line.rstrip(" |").endswith(each["verdict"])
    assert "transformer.h.5" in shown("table")
    with pytest.raises(InputError, match="add --ffn"):
        shown("table", is_wanted=False)
    with pytest.raises(InputError, match="--max-tokens"):
        shown("table", max_tokens="few")


STRANGERS = {  # two matrices of keys, one, and one that holds both
    "StableLmForCausalLM": ("model.layers.0.mlp.{}_proj", ("gate", "up"), 64),
    "Starcoder2ForCausalLM": ("model.layers.0.mlp.{}", ("c_fc",), 64),
    "GlmForCausalLM": ("model.layers.0.mlp.{}_proj", (), 64),
}


@pytest.mark.parametrize("architecture", STRANGERS)
def test_a_family_without_a_row_is_looked_at_too(architecture, tmp_path):
    """Its FFNs are found by a forward pass; what a hook sees of the way down is the oracle."""
    path, keys, hidden = STRANGERS[architecture]
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    model = build_tiny(architecture, sizes)
    modules = dict(model.named_modules())
    down = modules[path.format("down" if "{}_proj" in path else "c_proj")]
    with torch.no_grad():
        for key in keys:
            modules[path.format(key)].weight[[1, 2]] = 0
            if modules[path.format(key)].bias is not None:
                modules[path.format(key)].bias[[1, 2]] = 0
    model.save_pretrained(tmp_path)
    np.save(tmp_path / "ids.npy", TOKENS)
    report = ffn_units(str(tmp_path), text=tmp_path / "ids.npy", max_tokens=120, quiet=True)
    seen = []
    handle = down.register_forward_pre_hook(lambda _, given_: seen.append(given_[0].detach().clone()))
    with torch.no_grad():
        model(torch.from_numpy(TOKENS))
    handle.remove()
    peak_H = torch.cat(seen).reshape(-1, hidden).abs().amax(0).numpy()
    first = report.layers[0]
    assert len(report.layers) == 2
    assert (first.hidden_features, first.num_rows) == (hidden, TOKENS.size)
    assert first.peak == pytest.approx(peak_H.max(), rel=1e-5)
    assert first.num_silent == (peak_H <= 0.01 * np.median(peak_H[peak_H > 0])).sum()
    assert first.num_proved == (2 if keys else 0)


@pytest.mark.once
def test_sensitivity_shows_them_beside_the_losses():
    units = [
        {"name": name, "options": [{"format": "float", "loss": 0}, {"format": "int8_block64", "loss": loss}]}
        for name, loss in (("up", 0.5), ("down", 0.25))
    ]
    assert len(sensitivity_page("model", units, "protocol").tables) == 1
    ffn = {"block": "h.0", "hidden_features": 64, "num_silent": 3, "num_proved": 2, "num_duplicates": 1}
    ffn |= {"num_outliers": 7, "peak": 9.0, "typical_peak": 1.0, "bits_lost_in_row": 3.2}
    ffn |= {"bits_lost_in_blocks": 1.1, "verdict": "blocks"}
    losses, seen = sensitivity_page("model", [units[0], {**units[1], "ffn": ffn}], "protocol").tables
    assert [row[0] for row in losses.rows[1:]] == ["up", "down"]
    assert seen.rows == (("h.0", "64", "3", "2", "1", "7", "9.00x", "3.2/1.1", "blocks"),)


@pytest.mark.once
@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.5, 4.0), min_size=64, max_size=64), st.integers(0, 63), st.integers(4, 12))
def test_bits_lost_are_those_of_the_loudest(peaks, place, doublings):
    """One unit louder by 2^n costs the median unit about n bits in its row, and in its own block alone."""
    peak_H = np.concatenate([np.ones(64), peaks, np.ones(128)])
    peak_H[64 + place] = 2.0**doublings * 4
    in_row, in_blocks = bits_lost(peak_H, 1.0)
    assert in_row == pytest.approx(doublings + 2)
    assert in_blocks <= in_row / 4 + 0.5
    assert verdict(in_row, in_blocks) == ("blocks" if in_blocks <= 3 else "resists")
