"""The main job as a user runs it: the artifact, its report, and every way in which an input can be wrong."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from commands import quantkit, quantkit_alone, refused
from exporting import build_tiny
from safetensors.numpy import load_file, save_file

from quantkit.export.traced.trace import why_not_trace
from quantkit.model.families import FAMILIES
from quantkit.pipeline.stages import export as export_stage
from quantkit.report.clients import loading
from quantkit.report.quantization import brief_page
from quantkit.report.tables import print_page
from quantkit.runtime.decoder import open_decoder
from quantkit.runtime.tokenizer import open_text

pytestmark = pytest.mark.once

NEVER = ("--no-eval", "--min-dim", "1")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """`quantkit quantize demo` with everything measured, once."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    recipe = folder.parent / "quick.yaml"
    recipe.write_text("measure: {seconds: 1.0, max_tokens: 700, threads: 1}\n")
    result = quantkit_alone("quantize", "demo", "--recipe", str(recipe), "-o", str(folder), "--json")
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout)


@pytest.fixture
def tiny(tmp_path):
    """A random GPT-2 of two blocks in a folder."""
    folder = tmp_path / "tiny"
    build_tiny("GPT2LMHeadModel", dict(FAMILIES["gpt2"].tiny)).save_pretrained(folder)
    return folder


def test_the_report_holds_the_contract(artifact):
    folder, printed = artifact
    document = json.loads((folder / "report.json").read_text())
    assert printed["artifact"] == str(folder)
    assert {**document, "artifact": str(folder)} == printed
    size, accuracy, latency = document["size"], document["accuracy"], document["latency"][0]
    assert size["ratio"] == pytest.approx(size["artifact_bytes"] / size["source_bytes"])
    assert size["artifact_bytes"] == (folder / "model.onnx").stat().st_size
    assert size["artifact_bytes"] < 0.3 * 4 * 5_918_720
    assert accuracy["perplexity"]["quantized"] == pytest.approx(accuracy["perplexity"]["reference"], rel=0.01)
    assert 0 < accuracy["kl_divergence"] < 0.003
    assert accuracy["top1_agreement"] > 0.965
    assert latency["decode_ms_per_token"] > 0
    assert latency["reference"]["prefill_ms"] > 0
    assert document["placement"] == [
        {"provider": "CPUExecutionProvider", "node_fraction": 1.0, "mac_fraction": 1.0}
    ]
    assert document["environment"]["versions"]["onnxruntime"]


def test_the_folder_is_whole_and_every_file_is_in_the_manifest(artifact):
    folder, _ = artifact
    names = {path.name for path in folder.iterdir()}
    assert {
        "model.onnx",
        "config.json",
        "tokenizer.json",
        "recipe.yaml",
        "report.json",
        "report.md",
        "report.html",
    } < names
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == names - {"manifest.json", "README.md"}
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert manifest["integer_operators"] == {"MatMulNBits": 25}
    assert sum(layer["quantized"] for layer in manifest["plan"]["layers"]) == 37


def test_the_resolved_recipe_reproduces_the_model_bit_for_bit(artifact, tmp_path):
    folder, _ = artifact
    again = quantkit(
        "quantize", "--recipe", str(folder / "recipe.yaml"), "--no-eval", "-o", str(tmp_path / "again")
    )
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (folder / "model.onnx").read_bytes()


def test_the_page_for_a_person(tmp_path):
    result = quantkit("quantize", "demo", "--no-eval", "-o", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    for words in ("37 of 37 projections (25 of 25 matrices)", "size, MB", "artifact:", "report.md"):
        assert words in result.stdout
    for words in ("perplexity", "formula", "time:"):
        assert words not in result.stdout, "what was not measured is absent, and details are asked for"
    more = quantkit("quantize", "demo", "--no-eval", "--force", "-v", "-o", str(tmp_path / "out")).stdout
    assert "= 37, equal to the count" in more
    assert "time: " in more


def test_what_quantize_shows_fits_one_screen(artifact, monkeypatch):
    _, document = artifact
    monkeypatch.setenv("COLUMNS", "80")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        print_page(brief_page(document))
    lines = output.getvalue().splitlines()
    assert len(lines) <= 24
    assert all(name in output.getvalue() for name in ("perplexity", "KL divergence", "decode", "verdict: "))
    table = lines[lines.index(next(line for line in lines if line.startswith("metric"))) :]
    assert not [line for line in table[:16] if len(line) > 80]


def test_a_report_is_shown_again(artifact):
    folder, printed = artifact
    again = json.loads(quantkit("report", str(folder), "--json").stdout)
    assert {**again, "artifact": str(folder)} == printed
    assert (
        quantkit("report", str(folder), "--format", "markdown").stdout == (folder / "report.md").read_text()
    )
    assert "perplexity" in quantkit("report", str(folder)).stdout
    assert "report.json" in refused("report", str(folder.parent))


def test_the_web_page_is_made_again_with_its_hash(artifact, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(artifact[0], folder)
    page, manifest = folder / "report.html", folder / "manifest.json"
    first = page.read_bytes(), manifest.read_bytes()
    assert b"The model, projection by projection" in first[0]
    page.unlink()
    assert "report.html is missing" in refused("verify", str(folder))
    assert str(page) in quantkit("report", str(folder)).stdout
    assert (page.read_bytes(), manifest.read_bytes()) == first
    page.write_text("of an older version")
    manifest.write_text(manifest.read_text().replace(hashlib.sha256(first[0]).hexdigest(), "0" * 64))
    assert quantkit("report", str(folder)).returncode == 0
    assert quantkit("verify", str(folder)).returncode == 0
    assert page.read_bytes() == first[0]


def test_the_report_holds_what_its_web_page_shows(artifact):
    folder, document = artifact
    size, manifest = document["size"], json.loads((folder / "manifest.json").read_text())
    assert sum(part["num_bytes"] for part in size["parts"]) == size["artifact_bytes"]
    planned = [(layer["name"], layer["reason"]) for layer in manifest["plan"]["layers"]]
    assert [(layer["name"], layer["reason"]) for layer in document["layers"]] == planned
    assert document["recipe"] == (folder / "recipe.yaml").read_text()
    assert document["files"].items() < manifest["files"].items()
    samples = document["samples"]["samples"]
    assert len(samples) == 4
    prompt, tokens = samples[0]["text"], samples[0]["quantized"]
    ran = quantkit("generate", str(folder), prompt, "--max-new-tokens", f"{len(tokens)}", "--json")
    assert json.loads(ran.stdout)[0]["text"] == "".join(tokens)


def test_the_code_of_the_page_runs_in_each_client(artifact, monkeypatch, capsys):
    folder, document = artifact
    monkeypatch.chdir(folder)
    assert (folder / "README.md").read_text(encoding="utf-8").count("logits of this many last tokens") == 1
    codes = list(loading(document))
    assert [code.title for code in codes] == ["quantkit", "optimum", "onnxruntime-genai", "onnxruntime"]
    for code, library in zip(codes, ("quantkit", "optimum", "onnxruntime_genai", "onnxruntime"), strict=True):
        if importlib.util.find_spec(library):
            exec(compile(code.text, code.title, "exec"), {})
            shown = capsys.readouterr().out.strip()
            assert shown, code.title
    num_tokens = len(open_text(folder).encode("The king is"))
    assert shown == f"(1, {num_tokens}, 4096)", "onnxruntime alone gives the logits of every token"


def test_a_bare_session_prints_no_warning(artifact):
    folder, _ = artifact
    program = f"import onnxruntime; onnxruntime.InferenceSession({str(folder / 'model.onnx')!r})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_generate_continues_a_text_alone_and_in_a_batch(artifact):
    folder, _ = artifact
    alone = quantkit("generate", str(folder), "The king", "--max-new-tokens", "8", "--json")
    batch = quantkit("generate", str(folder), "The king", "O", "--max-new-tokens", "8", "--json")
    assert alone.returncode == batch.returncode == 0, alone.stderr + batch.stderr
    assert json.loads(alone.stdout)[0] == json.loads(batch.stdout)[0]
    streamed = quantkit("generate", str(folder), "The king", "--max-new-tokens", "8")
    assert streamed.stdout == "The king" + json.loads(alone.stdout)[0]["text"] + "\n"


def test_generate_runs_an_original_in_float():
    result = quantkit("generate", "demo", "The king", "--max-new-tokens", "4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("The king")


def test_weights_beside_the_graph(tiny, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("# beside\nsingle_file_mb: 0\n")
    result = quantkit("quantize", str(tiny), "--recipe", str(recipe), *NEVER, "-o", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    moved = shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    assert (moved / "weights.safetensors").exists()
    assert np.isfinite(open_decoder(moved).logits(np.array([[1, 2, 3]]))).all()


@pytest.mark.parametrize("scheme", ["int8_block16", "int8_block64", "int8_channel"])
def test_sizes_that_are_no_multiple_of_a_block(scheme, tmp_path):
    model = build_tiny("GPT2LMHeadModel", {**FAMILIES["gpt2"].tiny, "n_embd": 40, "n_head": 5, "n_inner": 50})
    model.save_pretrained(tmp_path / "odd")
    out = str(tmp_path / "out")
    result = quantkit("quantize", str(tmp_path / "odd"), "--scheme", scheme, *NEVER, "-o", out)
    assert result.returncode == 0, result.stderr


def test_random_weights_say_that_accuracy_means_nothing(tmp_path):
    folder = tmp_path / "config-only"
    folder.mkdir()
    config = FAMILIES["llama"].tiny | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ("quantize", str(folder), "--min-dim", "1", "-o", str(tmp_path / "out"), "--threads", "1")
    assert "--random-weights" in refused(*arguments)
    result = quantkit(*arguments, "--random-weights")
    assert result.returncode == 0, result.stderr
    assert "meaningless" in result.stdout


def damaged(folder, change):
    """The folder with one change to its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


def put(name, value):
    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name].flat[3] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("transformer.h.1.mlp.c_fc.weight", np.nan), ("transformer.h.1.mlp.c_fc.weight", "NaN")),
        (put("transformer.ln_f.bias", np.inf), ("transformer.ln_f.bias", "infinite")),
        (lambda t: t.pop("transformer.h.0.attn.c_proj.bias"), ("transformer.h.0.attn.c_proj.bias", "lacks")),
        (
            lambda t: t.update({"transformer.wte.weight": t["transformer.wte.weight"][:-1].copy()}),
            ("transformer.wte.weight", "[60, 32]"),
        ),
    ],
    ids=["nan", "inf", "missing", "shape"],
)
def test_a_broken_checkpoint_is_refused_by_tensor_and_leaves_nothing(tiny, tmp_path, change, words):
    out = tmp_path / "out"
    line = refused("quantize", damaged(tiny, change), *NEVER, "-o", str(out))
    for word in words:
        assert word in line
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_extra_tensor_is_a_note(tiny, tmp_path):
    folder = damaged(tiny, lambda tensors: tensors.update(stray=np.ones(3, np.float32)))
    result = quantkit("quantize", folder, *NEVER, "-o", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    assert "stray" in result.stdout


def test_a_half_precision_overflow_is_named(tiny, tmp_path):
    def overflow(tensors):
        for name, values in tensors.items():
            with np.errstate(over="ignore"):
                tensors[name] = (values * (1e6 if name.endswith("wpe.weight") else 1)).astype(np.float16)

    line = refused("quantize", damaged(tiny, overflow), *NEVER, "-o", str(tmp_path / "out"))
    assert "transformer.wpe.weight" in line
    assert "F16" in line


def test_bfloat16_shards(tmp_path):
    model = build_tiny("GPT2LMHeadModel", dict(FAMILIES["gpt2"].tiny), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    result = quantkit("quantize", str(tmp_path / "model"), *NEVER, "-o", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("demo", "--scheme", "int8_block127"), ("scheme", "int8_block128")),
        (("demo", "--min-dim", "0"), ("--min-dim",)),
        (("demo", "--min-dim", "100000"), ("no projection",)),
        (("demo", "--target", "toaster"), ("target", "cpu")),
        (("demo", "--text", "/no/such/file"), ("--text",)),
        ((), ("no model was named",)),
        (("bert-base-uncased", "--random-weights", "--no-eval", "--recipe", "/no.yaml"), ("/no.yaml",)),
    ],
)
def test_wrong_flags_are_one_line(arguments, words, tmp_path):
    line = refused("quantize", *arguments, "-o", str(tmp_path / "out"))
    for word in words:
        assert word in line
    assert not list(tmp_path.iterdir())


def test_an_older_artifact_is_kept_unless_forced(tiny, tmp_path):
    out = tmp_path / "out"
    assert quantkit("quantize", str(tiny), *NEVER, "-o", str(out)).returncode == 0
    before = (out / "manifest.json").read_bytes()
    assert "--force" in refused("quantize", str(tiny), *NEVER, "-o", str(out))
    assert (out / "manifest.json").read_bytes() == before
    forced = quantkit("quantize", str(tiny), *NEVER, "-o", str(out), "--force", "--scheme", "int8_block32")
    assert forced.returncode == 0, forced.stderr
    assert (out / "manifest.json").read_bytes() != before
    (out / "README.md").write_text("Ours.")
    again = ("quantize", str(tiny), *NEVER, "-o", str(out), "--force")
    assert "README.md" in refused(*again), "a card that somebody wrote in is theirs"


def test_killed_at_any_moment_nothing_half_written_stays(tiny, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "quantkit.cli", "quantize", str(tiny), "--min-dim", "1", "-o", str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    partial = tmp_path / ".out.partial"
    deadline = time.monotonic() + 60
    while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert partial.exists(), "the run had begun to write"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    again = quantkit("quantize", str(tiny), *NEVER, "-o", str(out))
    assert again.returncode == 0, again.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", "out"}


def test_an_encoder_is_compared_by_its_outputs(tmp_path):
    """BERT with the demo's tokenizer: what counts is how close its vectors stay, and the time of a text."""
    sizes = {**FAMILIES["bert"].tiny, "vocab_size": 4096, "max_position_embeddings": 160, "hidden_size": 64}
    folder = tmp_path / "bert"
    build_tiny("BertModel", sizes).save_pretrained(folder)
    demo = Path(str(resources.files("quantkit") / "assets" / "demo"))
    shutil.copyfile(demo / "tokenizer.json", folder / "tokenizer.json")
    recipe = tmp_path / "quick.yaml"
    recipe.write_text("select: {min_dim: 1}\nmeasure: {seconds: 1.0, max_tokens: 600, threads: 1}\n")
    out = tmp_path / "out"
    ran = quantkit("quantize", str(folder), "--recipe", str(recipe), "-o", str(out), "--json")
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["scheme"] == "int8_token", "the default of encoders"
    assert document["similarity"]["mean_cosine"] > 0.998
    assert 0 < document["similarity"]["relative_rms_error"] < 0.05
    assert "decode_ms_per_token" not in document["latency"][0]
    assert "accuracy" not in document
    assert "cosine" in quantkit("report", str(out)).stdout


@pytest.mark.slow
def test_a_traced_model_is_whole_and_says_what_was_not_measured(tmp_path):
    reason = why_not_trace()
    if reason:
        pytest.skip(f"optimum's exporter does not import here: {reason}")
    build_tiny("T5ForConditionalGeneration", dict(FAMILIES["t5"].tiny)).save_pretrained(tmp_path / "t5")
    out = tmp_path / "out"
    ran = quantkit("quantize", str(tmp_path / "t5"), "--min-dim", "1", "-o", str(out))
    assert ran.returncode == 0, ran.stderr
    assert "33 of 33 projections" in ran.stdout
    assert "brings no tokenizer" in ran.stdout
    manifest = json.loads((out / "manifest.json").read_text())
    assert {"encoder_model.onnx", "decoder_model.onnx", "weights.safetensors"} <= set(manifest["files"])


@pytest.mark.slow
def test_random_weights_count_a_shared_table_once(tmp_path):
    ran = quantkit(
        "quantize", "gpt2", "--random-weights", "--scheme", "int8_block128", "--no-eval",
        "-o", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    size = json.loads(ran.stdout)["size"]
    assert size["source_bytes"] == 4 * 124_439_808
    assert size["ratio"] <= 0.262


def test_a_float_graph_unlike_transformers_exits_with_1_and_keeps_the_artifact(tmp_path, monkeypatch):
    row, out = FAMILIES["llama"], tmp_path / "out"
    build_tiny(row.tiny_class, row.tiny).save_pretrained(tmp_path / "model")

    def export_with_wrong_norms(job, folder, **options):
        norms = tuple(replace(norm, epsilon=norm.epsilon + 0.1) for norm in job.model_map.norms)
        return right(replace(job, model_map=replace(job.model_map, norms=norms)), folder, **options)

    right = export_stage.export_dynamic
    monkeypatch.setattr(export_stage, "export_dynamic", export_with_wrong_norms)
    ran = quantkit("quantize", str(tmp_path / "model"), *NEVER, "--transform", "none", "-o", str(out))
    assert ran.returncode == 1
    assert "BROKEN: difference of the float32 graph from transformers" in ran.stdout
    assert "verdict: broken" in ran.stdout
    assert "verdict: broken" in (out / "report.md").read_text()
    assert json.loads((out / "report.json").read_text())["judgement"]["verdict"] == "broken"


def test_a_missing_tokenizer_is_said_at_once_and_in_the_report(tmp_path):
    row, out = FAMILIES["llama"], tmp_path / "out"
    build_tiny(row.tiny_class, row.tiny).save_pretrained(tmp_path / "model")
    ran = quantkit("quantize", str(tmp_path / "model"), *NEVER, "--transform", "none", "-o", str(out))
    assert ran.returncode == 0
    assert ran.stderr.startswith("note: the checkpoint has no tokenizer")
    assert "the checkpoint has no tokenizer" in (out / "report.md").read_text()


@pytest.mark.parametrize("text", ["50", "1", "100%", "250%", "0", "-1%", "nan", "half"])
def test_a_perplexity_budget_that_may_mean_percent_is_refused(text):
    line = refused("quantize", "demo", "--max-ppl-increase", text)
    assert "--max-ppl-increase" in line and "such as 0.5%, or a share below 1" in line
    if text == "50":
        assert "next: 50% if you mean percent" in line
