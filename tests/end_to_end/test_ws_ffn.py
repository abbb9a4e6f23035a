"""A decoder with wsFFN from training to a running INT8 file, by the commands that the docs name."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from commands import quantkit, refused

from quantkit.model.architectures.ws_ffn import WsFfnConfig, WsFfnForCausalLM
from quantkit.model.companions import tokenizer_files
from quantkit.model.load import open_source
from quantkit.runtime.decoder import positions_of
from quantkit.runtime.tokenizer import open_text

pytestmark = pytest.mark.once

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_latent_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
BARS = {"increase": 0.005, "kl_divergence": 0.003, "top1_agreement": 0.965}


def trained(folder: Path, *, steps: int = 60, **changes) -> Path:
    """A few steps on the bundled text, with the bundled tokenizer beside the weights."""
    demo = open_source("demo")
    text = (demo.folder / "calibration.txt").read_text(encoding="utf-8")
    tokens = np.array(open_text(demo.folder).encode(text[:20000]))
    torch.manual_seed(0)
    model = WsFfnForCausalLM(WsFfnConfig(**{**SIZES, **changes})).train()
    optimizer, chances = torch.optim.AdamW(model.parameters(), lr=3e-3), np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        starts = chances.integers(0, len(tokens) - 33, 8)
        ids = torch.from_numpy(np.stack([tokens[start : start + 33] for start in starts]))
        output = model(ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.losses["main"].item())
    assert losses[-1] < losses[0]
    model.eval().save_pretrained(folder)
    for path in tokenizer_files(demo):
        shutil.copyfile(path, folder / path.name)
    return folder


def test_from_training_to_a_running_integer_file(tmp_path):
    model = trained(tmp_path / "model")
    shown = quantkit("inspect", str(model), "--min-dim", "64", "--json")
    described = json.loads(shown.stdout)
    assert described["projections"] == {"total": 15, "quantized": 15}
    reasons = {each["reason"] for each in described["layers"] if each["role"] == "ffn_latent"}
    assert reasons == {"not run at inference: a training loss alone reads it"}

    out = tmp_path / "out"
    recipe = tmp_path / "short.yaml"
    recipe.write_text("select: {min_dim: 64}\nmeasure: {latency: false, memory: false, max_tokens: 1024}\n")
    ran = quantkit("quantize", str(model), "-o", str(out), "--recipe", str(recipe), "--json")
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    accuracy = document["accuracy"]
    assert accuracy["perplexity"]["increase"] <= BARS["increase"]
    assert accuracy["kl_divergence"] <= BARS["kl_divergence"]
    assert accuracy["top1_agreement"] >= BARS["top1_agreement"]
    written = quantkit("generate", str(out), "The king", "--max-new-tokens", "8")
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("The king")


@pytest.mark.parametrize("uses", [True, False])
def test_latents_are_kept_on_request(uses, tmp_path):
    folder = trained(tmp_path / "model", steps=20, use_aux_loss=uses, norm_placement="post")
    out = tmp_path / "out"
    ran = quantkit("quantize", str(folder), "-o", str(out), "--min-dim", "64", "--no-eval", "--keep-latent")
    assert ran.returncode == 0, ran.stderr
    report = json.loads((out / "report.json").read_text())
    assert any(("dense" if uses else "block-diagonal") in note for note in report["notes"])
    assert report["projections"] == {"total": 17, "quantized": 17}
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(1).integers(1, 4000, (2, 7))
    mask = np.ones_like(ids)
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask, 7)}
    for each in session.get_inputs():
        if each.name.startswith("past_key_values"):
            feeds[each.name] = np.zeros((2, each.shape[1], 0, each.shape[3]), np.float32)
    made = session.run(["latents.0", "latents.1"], feeds)
    original = WsFfnForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        wanted = [each.numpy() for each in original.latents(torch.from_numpy(ids))]
    for one, other in zip(made, wanted, strict=True):
        assert one.shape == other.shape == (2, 7, 4, 64)
        assert 0 < np.abs(one - other).mean() < 0.05 * np.abs(other).mean()
        assert np.abs(one - other).max() < 0.1 * np.abs(other).max()


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    folder = trained(tmp_path / "model", steps=6)
    assert "no latent projection" in refused("quantize", "demo", "--keep-latent", "--no-eval")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_latent_heads": 7}))
    for verb in (("inspect", str(folder)), ("quantize", str(folder), "-o", str(tmp_path / "out"))):
        assert "d_ffn 256 does not divide into n_head 7" in refused(*verb)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_training_script_writes_its_page(tmp_path, monkeypatch):
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    monkeypatch.syspath_prepend(str(scripts))
    import train_ws_ffn

    typed = ["train", "-o", str(tmp_path / "models"), "--docs", str(tmp_path / "docs")]
    monkeypatch.setattr(sys, "argv", [*typed, "--steps", "6", "--every", "3", "--timed-steps", "2"])
    train_ws_ffn.main()
    figures = json.loads((tmp_path / "docs" / "ws-ffn.json").read_text())
    with_losses, without = figures["runs"].values()
    assert with_losses["similarity"]["start"] == without["similarity"]["start"]
    assert with_losses["curve"][0]["held_out"] == without["curve"][0]["held_out"]
    assert with_losses["curve"][-1]["held_out"] < with_losses["curve"][0]["held_out"]
    assert without["drift"] == 0 < with_losses["drift"]
    page = (tmp_path / "docs" / "ws-ffn.md").read_text()
    assert "MISSED" not in page
    assert (tmp_path / "docs" / "ws-ffn.svg").read_text().startswith("<svg")
