"""Calibration, fits, transforms, mixes, budgets and measured sizes, as a user has them."""

from __future__ import annotations

import json
import os
import statistics
from unittest import mock

import numpy as np
import pytest
import yaml
from commands import quantkit as run_here
from exporting import build_tiny
from stored import open_checkpoint

from quantkit.model.families import FAMILIES

pytestmark = pytest.mark.once

FEW = ("--calibration-windows", "4", "--calibration-length", "128")
SHORT = ("--max-tokens", "1200")


def quantkit(*arguments, cache):
    with mock.patch.dict(os.environ, {"QUANTKIT_CACHE": str(cache), "COLUMNS": "200"}):
        return run_here(*map(str, arguments))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def refused(cache, *arguments):
    ran = quantkit(*arguments, cache=cache)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    lines = [line for line in ran.stderr.splitlines() if line.startswith("quantkit:")]
    assert len(lines) == 1
    assert "Traceback" not in ran.stderr
    return lines[0]


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory, cache):
    """The demo in INT4 by the default fit, with statistics kept."""
    out = tmp_path_factory.mktemp("int4") / "out"
    ran = quantkit(
        "quantize", "demo", "--scheme", "int4_block32", *FEW, *SHORT, "--keep-checkpoint",
        "--statistics", out.parent / "statistics", "-o", out, cache=cache,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return out, ran.stdout, json.loads((out / "report.json").read_text())


def test_four_bits_are_fitted_with_feedback_and_say_what_that_gained(four_bits):
    out, printed, report = four_bits
    assert report["fit"] == "gptq"
    assert len(report["layer_losses"]) == 25
    gains = [
        each["output_error"] / each["plain_output_error"]
        for each in report["layer_losses"]
        if each["format"].startswith("int4")
    ]
    assert statistics.median(gains) < 0.8
    assert "fit: gptq; error of outputs" in printed
    assert report["accuracy"]["kl_divergence"] < 0.02
    assert (out / "model.onnx").stat().st_size < 0.19 * report["size"]["reference_bytes"]
    packs = {
        pack["name"]: pack["grid"]
        for pack in open_checkpoint(out / "weights.safetensors").description["packs"]
    }
    assert packs["lm_head"]["bits"] == 8, "the head, and the table that it shares, stay at eight"
    assert {grid["bits"] for name, grid in packs.items() if name != "lm_head"} == {4}


def test_the_recipe_in_the_artifact_reproduces_it_bit_for_bit(four_bits, cache, tmp_path):
    out = four_bits[0]
    ran = quantkit(
        "quantize", "--recipe", out / "recipe.yaml", "--no-eval", "-o", tmp_path / "again", cache=cache
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (out / "model.onnx").read_bytes()


def test_statistics_that_were_kept_are_used_again(four_bits, cache, tmp_path):
    kept = four_bits[0].parent / "statistics" / "1-fit" / "index.json"
    before = kept.stat().st_mtime_ns
    ran = quantkit(
        "quantize", "demo", "--scheme", "int4_block128", *FEW, "--no-eval",
        "--statistics", kept.parents[1], "-o", tmp_path / "out", cache=cache,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert kept.stat().st_mtime_ns == before, "the same text through the same model: nothing is run again"


def test_statistics_that_nobody_wants_are_removed(four_bits, cache):
    assert not list((cache / "statistics").glob("*/*")), "kept ones lie where the user said"


def test_layers_may_have_schemes_of_their_own(cache, tmp_path):
    out = tmp_path / "out"
    ran = quantkit(
        "quantize", "demo", "--scheme", "int4_block128", "--fit", "mse", "--no-eval", "-o", out,
        "--layer", "ffn_down=int8_block32", "--layer", "transformer.h.0.*=float",
        "--layer", "lm_head=int4_block32",
        cache=cache,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    formats = {
        each["name"]: each["format"] for each in json.loads((out / "report.json").read_text())["layer_losses"]
    }
    assert not any(name.startswith("transformer.h.0.") for name in formats)
    assert formats["transformer.h.1.mlp.c_proj"].startswith("int8 block 32")
    assert formats["transformer.h.1.mlp.c_fc"].startswith("int4 block 128")
    assert formats["lm_head"].startswith("int4 block 32")
    said = quantkit("generate", out, "The king", "--max-new-tokens", "5", cache=cache)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("The king")


@pytest.mark.slow
def test_a_budget_is_held_on_unseen_text_by_a_smaller_model_than_any_uniform_one(cache, tmp_path):
    out = tmp_path / "out"
    ran = quantkit(
        "quantize", "demo", "--max-kl", "0.004", "--fit", "output", *FEW, *SHORT, "-o", out, cache=cache
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((out / "report.json").read_text())
    search = report["search"]
    assert search["holds"]
    assert report["accuracy"]["kl_divergence"] <= 0.004
    assert len(search["candidates"]) + len(search["verdicts"]) <= 20
    holding = [
        each["cost"]
        for each in search["candidates"]
        if each["label"].startswith("all ") and each["loss"]["kl_divergence"] <= 0.004
    ]
    assert search["chosen"]["cost"] < min(holding)
    assert "budget: KL divergence within 0.004, held" in ran.stdout
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert recipe["budget"]["max_kl"] is None, "the recipe holds what was found, and does not search again"
    assert len(recipe["layers"]) == 37
    again = quantkit(
        "quantize", "--recipe", out / "recipe.yaml", "--no-eval", "-o", tmp_path / "again", cache=cache
    )
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (out / "model.onnx").read_bytes()


@pytest.mark.slow
def test_a_budget_that_cannot_be_held_ends_with_the_best_there_is_and_exit_code_1(cache, tmp_path):
    out, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    recipe.write_text("budget: {max_kl: 1.0e-9, evaluations: 2}\nfit: output\n")
    kept = ["--layer", "*h.0.attn.*=float"]
    ran = quantkit(
        "quantize", "demo", "--recipe", recipe, *kept, *FEW, *SHORT, "--no-eval", "-o", out, cache=cache
    )
    assert ran.returncode == 1, ran.stderr
    assert "BUDGET MISSED" in ran.stdout
    layers = json.loads((out / "manifest.json").read_text())["plan"]["layers"]
    left = {each["name"] for each in layers if not each["quantized"]}
    assert {name for name in left if ".h.0.attn." in name} == {
        each["name"] for each in layers if ".h.0.attn." in each["name"]
    }, "what the user left in float, no search takes away"


def files_of(folder):
    """Bytes of graph, weights, tokenizer and configs on disk."""
    documents = {"README.md", "manifest.json", "recipe.yaml", "report.html", "report.json", "report.md"}
    return sum(path.stat().st_size for path in folder.iterdir() if path.name not in documents)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["4.5MB", "0.8"])
def test_a_target_size_is_met_and_used(size, cache, tmp_path):
    out = tmp_path / "out"
    ran = quantkit(
        "quantize", "demo", "--target-size", size, "--fit", "output", *FEW, *SHORT, "--no-eval", "-o", out,
        cache=cache,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((out / "report.json").read_text())
    most = 4.5e6 if size == "4.5MB" else 0.8 * report["size"]["source_bytes"]
    assert 0.97 * most < files_of(out) <= most
    assert "held" in ran.stdout
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    assert "target_size" not in recipe["budget"], "the recipe holds what was found"
    assert len(recipe["layers"]) == 37


@pytest.mark.slow
def test_a_size_that_misses_the_accuracy_beside_it_says_so(cache, tmp_path):
    out = tmp_path / "out"
    ran = quantkit(
        "quantize", "demo", "--target-size", "4MB", "--max-kl", "1e-6", "--fit", "output", *FEW, *SHORT,
        "--no-eval", "-o", out, cache=cache,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "KL divergence within 1e-06, NOT held; size within 4.00 MB, held" in ran.stdout
    assert files_of(out) <= 4e6


@pytest.mark.slow
def test_a_budget_that_only_floats_hold_says_so(cache, tmp_path):
    out = tmp_path / "out"
    ran = quantkit(
        "quantize", "demo", "--max-kl", "1e-9", "--fit", "output", *FEW, *SHORT, "--no-eval", "-o", out,
        cache=cache,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "NOTHING QUANTIZED" in ran.stdout


@pytest.mark.slow
def test_sizes_are_chosen_by_measuring(cache, tmp_path):
    out = tmp_path / "out"
    ran = quantkit("quantize", "demo", "--min-dim", "auto", "--no-eval", "-o", out, cache=cache)
    assert ran.returncode == 0, ran.stderr
    recipe, report = (
        yaml.safe_load((out / "recipe.yaml").read_text()),
        json.loads((out / "report.json").read_text()),
    )
    assert isinstance(recipe["select"]["min_dim"], int)
    shapes = {(each["in_features"], each["out_features"]) for each in report["shape_times"]}
    assert {(256, 768), (256, 256), (256, 1024), (1024, 256)} <= shapes
    assert all(each["median_us"] > 0 for each in report["shape_times"])


@pytest.mark.slow
def test_sensitivity_alone(cache):
    ran = quantkit("inspect", "demo", "--sensitivity", "--include", "*.h.0.*", "--json", cache=cache)
    assert ran.returncode == 0, ran.stderr
    units = json.loads(ran.stdout)["units"]
    assert [unit["name"].rsplit(".", 2)[-2:] for unit in units] == [
        ["attn", "c_attn"], ["attn", "c_proj"], ["mlp", "c_fc"], ["mlp", "c_proj"],
    ]  # fmt: skip
    for unit in units:
        losses = {each["format"]: each["loss"] for each in unit["options"]}
        assert losses["float"] == 0
        assert 0 < losses["int8_block32"] < losses["int4_block32"]


@pytest.mark.slow
def test_an_integer_cache_generates_nearly_the_same(cache, tmp_path):
    for name in ("float32", "int8"):
        ran = quantkit("quantize", "demo", "--cache", name, *SHORT, "-o", tmp_path / name, cache=cache)
        assert ran.returncode == 0, ran.stderr
    kl = [
        json.loads((tmp_path / name / "report.json").read_text())["accuracy"]["kl_divergence"]
        for name in ("float32", "int8")
    ]
    assert kl[0] < kl[1] < 1.5 * kl[0]
    texts = [
        quantkit("generate", tmp_path / name, "The king", "--max-new-tokens", "8", cache=cache).stdout
        for name in ("float32", "int8")
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_static_ranges_come_from_the_text(cache, tmp_path):
    ids = np.random.default_rng(0).integers(0, 3000, (6, 64))
    np.save(tmp_path / "ids.npy", ids)
    for name, calibration in (
        ("text", FEW),
        ("ids", ("--calibration-text", tmp_path / "ids.npy", "--calibration-length", "64")),
    ):
        ran = quantkit(
            "quantize", "demo", "--scheme", "int8_static8", *calibration, *SHORT, "--keep-checkpoint",
            "-o", tmp_path / name, cache=cache,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
    scales = [
        float(
            open_checkpoint(tmp_path / name / "weights.safetensors").read(
                "transformer.h.3.mlp.c_proj.input_scale"
            )
        )
        for name in ("text", "ids")
    ]
    assert scales[0] != scales[1]
    report = json.loads((tmp_path / "text" / "report.json").read_text())
    assert report["accuracy"]["perplexity"]["increase"] < 0.05


def test_wrong_input_is_one_line(cache, tmp_path):
    short, latin = tmp_path / "short.txt", tmp_path / "latin.txt"
    short.write_text("Too short.")
    latin.write_bytes("Käse".encode("latin-1") * 4000)
    static = ("quantize", "demo", "--scheme", "int8_static8", "-o", str(tmp_path / "out"))
    assert "tokens" in refused(cache, *static, "--calibration-text", str(short))
    assert "UTF-8" in refused(cache, *static, "--calibration-text", str(latin))
    assert "nowhere.txt" in refused(cache, *static, "--calibration-text", str(tmp_path / "nowhere.txt"))
    plain = ("quantize", "demo", "-o", str(tmp_path / "out"))
    assert "smoothquant" in refused(cache, *plain, "--transform", "smooth")
    assert "PATTERN=SCHEME" in refused(cache, *plain, "--layer", "ffn_down")
    assert "int8_block32" in refused(cache, *plain, "--layer", "ffn_down=int9")
    assert "matches no projection" in refused(cache, *plain, "--layer", "mlp.down=float")
    for size in ("4MiB", "50", "-0.2", "1.0", "0MB", "4.5 MB", "nan"):
        assert "120MB" in refused(cache, *plain, f"--target-size={size}")
    assert "0.5%" in refused(cache, *plain, "--max-ppl-increase", "half")
    assert "gptq" in refused(cache, *plain, "--fit", "best")
    assert "untie" in refused(cache, *plain, "--transform", "hadamard")
    assert not (tmp_path / "out").exists()


def test_what_an_architecture_cannot_take_is_refused_before_any_work(cache, tmp_path):
    build_tiny("BloomForCausalLM", dict(FAMILIES["bloom"].tiny)).save_pretrained(tmp_path / "bloom")
    build_tiny("BertForMaskedLM", dict(FAMILIES["bert"].tiny)).save_pretrained(tmp_path / "bert")
    common = ("--min-dim", "1", "--no-eval", "-o", str(tmp_path / "out"))
    assert "traced" in refused(cache, "quantize", tmp_path / "bloom", *common, "--transform", "smoothquant")
    assert "needs a decoder" in refused(cache, "quantize", tmp_path / "bert", *common, "--max-kl", "0.01")
    assert "fused graph" in refused(cache, "quantize", tmp_path / "bert", *common, "--cache", "int8")
