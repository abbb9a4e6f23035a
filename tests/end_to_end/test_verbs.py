"""Stages again as a user runs them: eval, bench and compare on an artifact, and every wrong input."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from commands import quantkit, refused
from exporting import build_tiny
from safetensors.torch import load_file, save_file

from quantkit.evaluation import measure
from quantkit.evaluation.artifact import open_artifact, stored_recipe
from quantkit.evaluation.benchmark import benchmark
from quantkit.model.families import FAMILIES
from quantkit.model.load import open_source
from quantkit.pipeline.options import with_options
from quantkit.progress import Progress

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """The embedded model, quantized; accuracy measured on few tokens, nothing timed."""
    folder = tmp_path_factory.mktemp("verbs") / "out"
    recipe = folder.parent / "quick.yaml"
    recipe.write_text("measure: {latency: false, memory: false, max_tokens: 700, threads: 1, seconds: 1.0}\n")
    made = quantkit("quantize", "demo", "--recipe", str(recipe), "-o", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


def printed(*arguments):
    ran = quantkit(*arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_eval_finds_what_the_report_says(artifact):
    report = json.loads((artifact / "report.json").read_text())
    found = printed("eval", str(artifact))
    assert found["reference"] == "demo"
    assert found["accuracy"]["protocol"] == report["accuracy"]["protocol"]
    for key in ("kl_divergence", "top1_agreement"):
        assert found["accuracy"][key] == pytest.approx(report["accuracy"][key], rel=1e-6)
    for key in ("reference", "quantized", "increase"):
        assert found["accuracy"]["perplexity"][key] == pytest.approx(
            report["accuracy"]["perplexity"][key], rel=1e-6
        )
    assert found["environment"]["versions"]["onnxruntime"]


def test_eval_on_another_text_and_for_a_person(artifact, tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("To be, or not to be, that is the question. " * 30, encoding="utf-8")
    found = printed("eval", str(artifact), "--text", str(text), "--window", "64", "--stride", "64")
    protocol = found["accuracy"]["protocol"]
    assert (protocol["text"], protocol["window"], protocol["stride"]) == ("own.txt", 64, 64)
    page = quantkit("eval", str(artifact), "--text", str(text)).stdout
    for words in ("int8_block32 of demo; reference: demo", "KL divergence", "own.txt", "machine:"):
        assert words in page


def test_eval_without_its_original(artifact, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(artifact, folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("model: demo", "model: /nowhere/at/all"))
    found = printed("eval", str(folder), "--check", "none")
    beside = printed("eval", str(artifact))
    assert "reference" not in found
    assert set(found["accuracy"]["perplexity"]) == {"quantized", "quantized_standard_error"}
    perplexity = beside["accuracy"]["perplexity"]["quantized"]
    assert found["accuracy"]["perplexity"]["quantized"] == pytest.approx(perplexity, rel=1e-9)
    assert "not on this disk" in found["notes"][0]
    assert "warning: the original, /nowhere/at/all" in quantkit("eval", str(folder), "--check", "none").stdout
    # Beside another artifact: here itself, so nothing differs.
    same = printed("eval", str(folder), "--reference", str(artifact), "--check", "none")["accuracy"]
    assert (same["kl_divergence"], same["top1_agreement"]) == (0, 1)


def test_bench_times_and_weighs_the_artifact(artifact):
    found = printed("bench", str(artifact), "--prompt", "16", "--decode", "4")
    (entry,) = found["latency"]
    assert (entry["prompt_length"], entry["num_decoded"], entry["threads"]) == (16, 4, 1)
    for phase in ("prefill", "decode"):
        timing = entry[phase]
        assert 0 < timing["lowest_ms"] <= timing["median_ms"] <= timing["highest_ms"]
        assert timing["num_runs"] >= 5
    assert "reference" not in entry
    memory = found["memory"]
    loaded, run = (memory["quantized"][f"{what}_peak_bytes"] for what in ("load", "run"))
    assert memory["empty_process_bytes"] + 4e6 < loaded < 1e9
    assert run > loaded * 0.9
    assert found["size"]["artifact_bytes"] == (artifact / "model.onnx").stat().st_size
    page = quantkit("bench", str(artifact), "--prompt", "16", "--decode", "4").stdout
    for words in ("prefill of 16 tokens, ms", "quartiles", "peak memory to run, MB", "1 threads"):
        assert words in page


def test_the_memory_floor_stands_where_the_artifact_tells_its_traffic(artifact, monkeypatch):
    monkeypatch.setattr(measure, "cache_bytes", lambda: 4 << 20)
    recipe = with_options(stored_recipe(artifact), {"prompt": 8, "decode": 2})
    opened = open_artifact(artifact, recipe)

    def with_metadata(metadata):
        return dataclasses.replace(opened, session=dataclasses.replace(opened.session, metadata=metadata))

    told = with_metadata({**opened.session.metadata, "bytes_per_token": 6_000_000})
    made = benchmark(told, progress=Progress(quiet=True))
    assert 6e6 / 1e12 * 1e3 < made.latency.floor_ms_per_token < 6e6 / 1e8 * 1e3  # 0.1 to 1000 GB/s
    assert made.notes == ()
    monkeypatch.setattr(measure, "cache_bytes", lambda: 32 << 20)
    made = benchmark(told, progress=Progress(quiet=True))
    assert made.latency.floor_ms_per_token is None
    assert "that a token reads fit the processor's cache" in made.notes[0]
    silent = with_metadata({})
    made = benchmark(silent, progress=Progress(quiet=True))
    assert made.latency.floor_ms_per_token is None
    assert "no memory floor" in made.notes[0]


def test_compare_puts_reports_side_by_side(artifact, tmp_path):
    other = tmp_path / "other"
    made = quantkit("quantize", "demo", "--scheme", "int8_block16", "--no-eval", "-o", str(other))
    assert made.returncode == 0, made.stderr
    document = printed("compare", str(artifact), str(other))
    first, second = document["artifacts"]
    assert second["ratios"] == {"size_bytes": second["values"]["size_bytes"] / first["values"]["size_bytes"]}
    assert second["ratios"]["size_bytes"] > 1, "smaller blocks have more scales"
    assert "perplexity" in first["values"]
    page = quantkit("compare", str(artifact), str(other), "--format", "markdown").stdout
    assert "other: int8_block16 for cpu" in page
    html = other.parent / "compared.html"
    assert "Ratio to out" in quantkit("compare", str(artifact), str(other), "--html", str(html)).stdout
    assert "Comparison of artifacts" in html.read_text()


def test_encoders_are_measured_beside_their_original(tmp_path):
    source, out = tmp_path / "bert", tmp_path / "out"
    build_tiny("BertModel", dict(FAMILIES["bert"].tiny)).save_pretrained(source)
    made = quantkit("quantize", str(source), "--min-dim", "1", "--no-eval", "-o", str(out))
    assert made.returncode == 0, made.stderr
    found = printed("bench", str(out), "--prompt", "8")
    assert "decode_ms_per_token" not in found["latency"][0]
    assert found["latency"][0]["prefill_ms"] > 0
    shutil.rmtree(source)
    assert "name the original with --reference" in refused("eval", str(out))


def test_a_reference_with_missing_weights_is_refused(artifact, tmp_path):
    source = tmp_path / "damaged"
    shutil.copytree(open_source("demo").folder, source)
    tensors = load_file(source / "model.safetensors")
    del tensors["transformer.h.0.attn.c_attn.weight"]
    save_file(tensors, source / "model.safetensors")
    line = refused("eval", str(artifact), "--reference", str(source))
    assert "the checkpoint lacks 1 tensors: transformer.h.0.attn.c_attn.weight" in line


def test_wrong_input_is_one_line(artifact, tmp_path):
    path = str(artifact)
    for verb in ("eval", "bench"):
        assert "no model.onnx there" in refused(verb, str(tmp_path))
    assert "cannot be read" in refused("compare", path, str(tmp_path))
    assert "two folders or more" in refused("compare", path)
    assert "allowed: table, markdown, json" in refused("compare", path, path, "--format", "csv")
    assert "600 tokens are more than the model's context; allowed: up to 512" in refused(
        "eval", path, "--window", "600"
    )
    assert "measure.stride" in refused("eval", path, "--stride", "0")
    assert "cannot be read" in refused("eval", path, "--text", str(tmp_path / "none.txt"))
    assert "no such folder" in refused("eval", path, "--reference", "/no/such/model")
    assert "--prompt and --decode: 1000 tokens" in refused(
        "bench", path, "--prompt", "500", "--decode", "500"
    )
    assert "measure.threads" in refused("bench", path, "--threads", "0")
    (tmp_path / "report.json").write_text('{"model": "x"}')
    assert "not a report: scheme, target, projections, matrices" in refused("compare", path, str(tmp_path))
    (tmp_path / "report.json").write_text("{")
    assert "not JSON" in refused("compare", path, str(tmp_path))
