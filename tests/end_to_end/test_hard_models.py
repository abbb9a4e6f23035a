"""The default on what breaks quantizers: loud columns, calibration in another language or on few tokens."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from commands import quantkit
from sentences import DEMO
from transformers import GPT2LMHeadModel

pytestmark = [pytest.mark.slow, pytest.mark.once]
LOUD, COLUMNS = 1e4, (3, 100)
GREEK = "Μῆνιν ἄειδε, θεά, Πηληϊάδεω Ἀχιλῆος οὐλομένην, πολλὰς δὲ ψυχὰς Ἄϊδι προΐαψεν ἡρώων. "


def make_loud(folder):
    """The embedded model with two inputs of each product 10,000 times as large; its function stays."""
    shutil.copytree(DEMO, folder)
    model = GPT2LMHeadModel.from_pretrained(DEMO)
    with torch.no_grad():
        for block in model.transformer.h:
            for norm, product in ((block.ln_1, block.attn.c_attn), (block.ln_2, block.mlp.c_fc)):
                for column in COLUMNS:
                    norm.weight[column] *= LOUD
                    norm.bias[column] *= LOUD
                    product.weight[column] /= LOUD
    model.save_pretrained(folder)
    return str(folder)


def divergence(folder, *arguments):
    folder.mkdir()
    recipe = folder / "quick.yaml"
    recipe.write_text(
        "measure: {latency: false, memory: false, max_tokens: 4000, threads: 1, seconds: 1.0}\n"
    )
    ran = quantkit("quantize", *arguments, "--recipe", str(recipe), "-o", str(folder / "out"))
    assert ran.returncode == 0, ran.stderr
    report = json.loads((folder / "out" / "report.json").read_text())
    assert report["judgement"]["verdict"] == "faithful"
    return report["accuracy"]["kl_divergence"]


@pytest.mark.parametrize("scheme", ["int8_block32", "int4_block32"])
def test_the_loss_stays_of_one_size(scheme, tmp_path):
    usual = divergence(tmp_path / "usual", "demo", "--scheme", scheme)
    loud = divergence(tmp_path / "loud", make_loud(tmp_path / "model"), "--scheme", scheme)
    assert loud < 3 * usual
    few = ("--calibration-windows", "2", "--calibration-length", "128")
    assert divergence(tmp_path / "few", "demo", "--scheme", scheme, *few) < 3 * usual


@pytest.fixture
def greek(tmp_path):
    text = tmp_path / "greek.txt"
    text.write_text(GREEK * 600, encoding="utf-8")
    return str(text)


def test_calibration_in_another_language_costs_the_default_little(greek, tmp_path):
    usual = divergence(tmp_path / "usual", "demo")
    assert divergence(tmp_path / "greek", "demo", "--calibration-text", greek) < 2 * usual


def test_int4_calibrated_in_another_language_loses_less_than_plain_rounding(greek, tmp_path):
    scheme = ("--scheme", "int4_block32")
    plain = divergence(tmp_path / "plain", "demo", *scheme, "--fit", "rtn", "--transform", "none")
    assert divergence(tmp_path / "greek", "demo", *scheme, "--calibration-text", greek) < 0.8 * plain
