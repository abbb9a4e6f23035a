"""Traced models and encoder-decoders as a user runs them: measured, reported, answering."""

from __future__ import annotations

import json
import math
import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch
import transformers
from commands import quantkit as run_quantkit
from exporting import build_tiny

from quantkit.evaluation.text import read_text
from quantkit.export.traced.trace import why_not_trace
from quantkit.model.families import FAMILIES
from quantkit.recipe import Measure
from quantkit.runtime.machine.facts import cache_bytes
from quantkit.runtime.tokenizer import open_text

REASON = why_not_trace()
needs_optimum = pytest.mark.skipif(
    bool(REASON), reason=f"optimum-onnx does not run beside transformers {transformers.__version__}: {REASON}"
)
NAMES = (pytest.param("bloom", marks=needs_optimum), "t5")
DEMO = Path(str(resources.files("quantkit") / "assets" / "demo"))
RECIPE = "select: {min_dim: 1}\nmeasure: {seconds: 1.0, max_tokens: 400, window: 100, threads: 1}\n"
CHANGES = {"vocab_size": 4096, "decoder_start_token_id": 0, "eos_token_id": None}
COUNT = 6


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory):
    """(family, model, its folder, the artifact, what was printed)"""
    folder = tmp_path_factory.mktemp(request.param)
    row = FAMILIES[request.param]
    model = build_tiny(row.tiny_class, {**row.tiny, **CHANGES})
    model.save_pretrained(folder / "model")
    shutil.copyfile(DEMO / "tokenizer.json", folder / "model" / "tokenizer.json")
    (folder / "recipe.yaml").write_text(RECIPE)
    out = folder / "out"
    ran = run_quantkit(
        "quantize", str(folder / "model"), "--recipe", str(folder / "recipe.yaml"), "-o", str(out)
    )
    assert ran.returncode == 0, ran.stderr
    return request.param, model, folder / "model", out, ran.stdout


def text_ids(folder):
    text, _ = read_text(Measure())
    return open_text(folder).encode(text)[:400]


def score(logits, ids):
    """Negative log-likelihoods of the ids, each by the logits at its place."""
    return -torch.log_softmax(logits.double(), dim=-1)[range(len(ids)), ids]


def reference_perplexity(name, model, ids):
    """The figure of the report, from the original by loops of its own."""
    losses = []
    with torch.inference_mode():
        if name == "t5":
            for begin in range(50, 400, 50):
                heard, said = ids[begin - 50 : begin], ids[begin : begin + 50]
                made = model(
                    input_ids=torch.tensor([heard]), decoder_input_ids=torch.tensor([[0, *said[:-1]]])
                )
                losses.append(score(made.logits[0], said))
        else:
            for begin in range(0, 350, 50):
                window = ids[begin : begin + 100]
                made = score(model(input_ids=torch.tensor([window])).logits[0, :-1], window[1:])
                losses.append(made if begin == 0 else made[-50:])
    return math.exp(float(torch.cat(losses).mean())), len(torch.cat(losses))


def test_the_report_has_accuracy_latency_and_memory(made):
    name, model, folder, out, _ = made
    document = json.loads((out / "report.json").read_text())
    accuracy, latency, memory = document["accuracy"], document["latency"][0], document["memory"]
    wanted, count = reference_perplexity(name, model, text_ids(folder))
    assert accuracy["perplexity"]["reference"] == pytest.approx(wanted, rel=1e-5)
    assert accuracy["perplexity"]["quantized"] == pytest.approx(wanted, rel=0.02)
    assert 0 < accuracy["kl_divergence"] < 0.01
    assert accuracy["is_meaningful"]
    protocol = accuracy["protocol"]
    assert (protocol["num_tokens"], protocol["window"], protocol["stride"]) == (count, 100, 50)
    assert ("the encoder reads the first half" in protocol["text"]) == (name == "t5")
    for timed in (latency, latency["reference"]):
        assert timed["prefill_ms"] > 0
        assert timed["decode_ms_per_token"] > 0
    assert latency["reference"]["name"] == "the same graph in float32"
    has_floor = name == "bloom" and cache_bytes() is None  # any processor's cache holds this model
    assert ("floor_ms_per_token" in latency) == has_floor, "what was not measured is absent"
    for model_memory in (memory["quantized"], memory["reference"]):
        assert memory["empty_process_bytes"] < model_memory["load_peak_bytes"]
        assert memory["empty_process_bytes"] < model_memory["run_peak_bytes"]
    assert document["size"]["reference_bytes"] > document["size"]["artifact_bytes"]
    assert not list(out.glob(".*")), "the float reference is gone"


def test_eval_finds_the_same_figures_again(made, tmp_path):
    *_, out, _ = made
    wanted = json.loads((out / "report.json").read_text())["accuracy"]
    ran = run_quantkit("eval", str(out), "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["accuracy"]["perplexity"]["quantized"] == wanted["perplexity"]["quantized"]
    assert found["accuracy"]["kl_divergence"] == pytest.approx(wanted["kl_divergence"], rel=1e-3)
    assert found["accuracy"]["protocol"] == wanted["protocol"]
    alone = shutil.copytree(out, tmp_path / "alone")
    (alone / "recipe.yaml").write_text(RECIPE)  # which names no original
    ran = run_quantkit("eval", str(alone), "--check", "none", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["accuracy"]
    assert found["perplexity"]["quantized"] == wanted["perplexity"]["quantized"]
    assert found["protocol"] == wanted["protocol"]
    ran = run_quantkit("eval", str(alone), "--check", "none", "--reference", str(out), "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["accuracy"]["kl_divergence"] == 0, "an artifact beside itself"


def test_only_models_of_one_kind_are_compared(made, tmp_path):
    name, *_, out, _ = made
    other = "demo"
    if name != "t5":  # a decoder beside a model that reads and answers
        other = str(tmp_path / "t5")
        build_tiny(FAMILIES["t5"].tiny_class, dict(FAMILIES["t5"].tiny)).save_pretrained(other)
    ran = run_quantkit("eval", str(out), "--reference", other)
    assert ran.returncode == 2
    assert ("the reference is a decoder or an encoder" in ran.stderr) == (name == "t5")
    assert len(ran.stderr.strip().splitlines()) == 1


def test_the_page_says_how_it_was_measured(made):
    name, *_, printed = made
    for words in ("perplexity", "KL divergence", "prefill of 128 tokens", "decode, ms/token", "peak memory"):
        assert words in printed
    assert ("prefill is the encoder over the prompt" in printed) == (name == "t5")


def original_answer(model, ids):
    prompt = torch.tensor([ids])
    made = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=COUNT,
        do_sample=False,
        pad_token_id=0,
    )
    return made[0].tolist()[-COUNT:]


def test_generate_answers_from_the_artifact_and_from_the_original(made):
    name, model, folder, out, _ = made
    options = ("--max-new-tokens", str(COUNT))
    text = open_text(folder)
    ran = run_quantkit("generate", str(folder), "The king", *options, "--json")
    assert ran.returncode == 0, ran.stderr
    (answer,) = json.loads(ran.stdout)
    assert answer["tokens"] == original_answer(model, text.encode("The king"))
    assert answer["text"] == text.decode(answer["tokens"])
    alone = json.loads(run_quantkit("generate", str(out), "The king", *options, "--json").stdout)[0]
    beginning = "" if name == "t5" else "The king"
    assert len(alone["tokens"]) == COUNT
    assert run_quantkit("generate", str(out), "The king", *options).stdout == f"{beginning}{alone['text']}\n"
    batch = run_quantkit("generate", str(out), "The king", "O", *options)
    assert batch.stdout.startswith(f"[1] {beginning}{alone['text']}\n[2] ")


def test_an_empty_prompt_is_one_line(made):
    *_, out, _ = made
    ran = run_quantkit("generate", str(out), "")
    assert ran.returncode == 2
    assert "empty prompt" in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


def test_a_model_without_a_tokenizer_is_timed_all_the_same(tmp_path):
    row = FAMILIES["t5"]
    build_tiny(row.tiny_class, dict(row.tiny)).save_pretrained(tmp_path / "t5")
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("threads: 1", "threads: 1, memory: false"))
    ran = run_quantkit(
        "quantize",
        str(tmp_path / "t5"),
        "--recipe",
        str(tmp_path / "recipe.yaml"),
        "-o",
        str(tmp_path / "out"),
        "--json",
    )
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert "accuracy" not in document
    assert "memory" not in document
    assert document["latency"][0]["decode_ms_per_token"] > 0
    assert any("no tokenizer" in note for note in document["notes"])
