"""`--target npu` as a user meets it: two graphs that every verb takes, one line for what they cannot do."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from commands import quantkit, refused
from exporting import build_tiny, error

import quantkit as package
from quantkit.errors import InputError
from quantkit.export.check import check_models
from quantkit.export.static.shared_weights import with_all_logits
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.plan.select import choose
from quantkit.plan.targets import TARGETS
from quantkit.runtime.generate import generate
from quantkit.runtime.graph import INPUTS_AS_WRITTEN
from quantkit.runtime.providers.table import PROVIDERS, plugin_devices
from quantkit.runtime.static_decoder import StaticRow, open_raw, open_static_decoder, run_prompt
from quantkit.runtime.tokenizer import open_text

pytestmark = pytest.mark.once

DEMO = Path(package.__file__).parent / "assets" / "demo"
SIZES = {"gpt2": {"n_positions": 96}, "llama": {"max_position_embeddings": 96}}
PROMPT, CACHE = 24, 60
TINY = ("--min-dim", "1", "--target", "npu")
LENGTHS = ("--prompt-length", str(PROMPT), "--cache-length", str(CACHE))
QUICK = "measure: {threads: 1, seconds: 0.2, max_tokens: 200, latency: %s, memory: %s}\n"
QUICK += "calibration: {windows: 8, length: 64}\n"


def build(name: str, folder: Path):
    """A tiny model with random weights that reads with the bundled tokenizer."""
    model = build_tiny(FAMILIES[name].tiny_class, {**FAMILIES[name].tiny, **SIZES[name], "vocab_size": 4096})
    model.save_pretrained(folder)
    shutil.copyfile(DEMO / "tokenizer.json", folder / "tokenizer.json")
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(artifact, its model in torch) by family, quantized when first asked for."""

    @functools.cache
    def ask(name: str):
        folder = tmp_path_factory.mktemp(name)
        model = build(name, folder / "model")
        times = "true" if name == "gpt2" else "false"
        (folder / "quick.yaml").write_text(QUICK % (times, times))
        arguments = ("--recipe", str(folder / "quick.yaml"), "-o", str(folder / "out"), "--json")
        ran = quantkit("quantize", str(folder / "model"), *TINY, *LENGTHS, *arguments)
        assert ran.returncode == 0, ran.stderr
        return folder / "out", model

    return ask


def logits_of(model, ids) -> np.ndarray:
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(np.asarray(ids)[None])).logits[0].numpy()


@pytest.mark.parametrize(("name", "opset"), [("gpt2", 21), ("llama", 23)])
def test_the_artifact_says_what_it_is(name, opset, made):
    folder, _ = made(name)
    files = {path.name for path in folder.iterdir()}
    assert files >= {"prompt.onnx", "decode.onnx", "weights.data", "tokenizer.json", "recipe.yaml"}
    assert not files & {"model.onnx", "weights.safetensors", "genai_config.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["target"], manifest["scheme"], manifest["opset"]) == ("npu", "int8_static16", opset)
    assert manifest["static"] == {"prompt": PROMPT, "cache": CACHE}
    report = json.loads((folder / "report.json").read_text())
    assert report["accuracy"]["protocol"]["window"] == PROMPT
    assert 0 < report["accuracy"]["kl_divergence"] < 1e-3
    assert abs(report["accuracy"]["perplexity"]["increase"]) < 0.005
    assert report["placement"][0]["mac_fraction"] == 1
    held = sum((folder / name).stat().st_size for name in ("prompt.onnx", "decode.onnx", "weights.data"))
    assert report["size"]["artifact_bytes"] == held
    for path in (folder / "prompt.onnx", folder / "decode.onnx"):
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert {node.op_type for node in model.graph.node} <= TARGETS["npu"].standard_operators
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_graphs_are_the_model(name, made):
    """A prompt shorter than the graph, and one that is longer: what is beyond it follows token by token."""
    folder, model = made(name)
    decoder = open_static_decoder(folder, threads=1)
    ids = np.random.default_rng(3).integers(1, 4096, 50)
    wanted = logits_of(model, ids)
    row = StaticRow(decoder=decoder, prompt=ids[:10])
    logits = row.read()
    stepped = np.concatenate([logits, *(row.step(int(token)) for token in ids[10:])])
    found = error(stepped, wanted[9:])
    assert 1e-6 < found.relative < 0.03
    assert found.absolute < 0.03 * np.abs(wanted).max()
    row = StaticRow(decoder=decoder, prompt=ids)
    logits = row.read()
    assert row.length == 50
    assert error(logits[0], wanted[-1]).relative < 0.03


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generated_tokens_are_those_of_the_bare_runtime(name, made):
    """The files alone with a cache that is kept by hand, from what the graphs declare."""
    folder, _ = made(name)
    ran = quantkit("generate", str(folder), "The king said unto", "--max-new-tokens", "12", "--json")
    (document,) = json.loads(ran.stdout)
    prompt = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))(
        document["prompt"]
    )["input_ids"]
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(*INPUTS_AS_WRITTEN)
    first, later = (
        onnxruntime.InferenceSession(
            str(folder / f"{kind}.onnx"), options, providers=["CPUExecutionProvider"]
        )
        for kind in ("prompt", "decode")
    )
    ids, shown = np.zeros((2, 1, PROMPT), np.int32)
    ids[0, : len(prompt)], shown[0, : len(prompt)] = prompt, 1
    names = [each.name for each in first.get_outputs()]
    feeds = {"input_ids": ids, "attention_mask": shown}
    feeds["logit_position"] = np.array([len(prompt) - 1], np.int32)
    out = dict(zip(names, first.run(names, feeds), strict=True))
    caches = {}
    for each in later.get_inputs():
        if each.name.startswith("past"):
            fresh = out[each.name.replace("past_key_values", "present")]
            caches[each.name] = np.repeat(fresh[:, :, :1], CACHE, axis=2)
            caches[each.name][:, :, : len(prompt)] = fresh[:, :, : len(prompt)]
    tokens = [int(out["logits"][0, -1].argmax())]
    for place in range(len(prompt), len(prompt) + 11):
        mask = np.zeros((1, CACHE + 1), np.int32)
        mask[0, :place], mask[0, -1] = 1, 1
        step_feeds = {"input_ids": np.array([[tokens[-1]]], np.int32), "attention_mask": mask}
        step_feeds["position_ids"] = np.array([[place]], np.int32)
        out = dict(zip(names, later.run(names, {**step_feeds, **caches}), strict=True))
        for past, cache in caches.items():
            cache[:, :, place] = out[past.replace("past_key_values", "present")][:, :, 0]
        tokens.append(int(out["logits"][0, -1].argmax()))
    assert document["tokens"] == tokens[: len(document["tokens"])]
    assert len(document["tokens"]) == 12 or document["tokens"][-1] == 0


def test_logits_that_are_measured_are_those_that_are_shipped(made):
    folder, _ = made("llama")
    decoder = open_static_decoder(folder, threads=1)
    whole = open_raw(with_all_logits(folder / "prompt.onnx"), folder, threads=1)
    ids = np.random.default_rng(5).integers(1, 4096, PROMPT)
    every, _ = run_prompt(whole, ids)
    for count in (1, 7, PROMPT):
        (shipped,), _ = run_prompt(decoder.prompt, ids[:count])
        assert error(every[count - 1], shipped).relative < 1e-3


def test_every_projection_is_an_integer_product_in_both_files(made, tmp_path):
    folder, _ = made("gpt2")
    plan = choose(inspect(str(folder.parent / "model")), min_dim=1)
    paths = [folder / "prompt.onnx", folder / "decode.onnx"]
    placement = check_models(paths, plan, TARGETS["npu"], in_each=True)
    assert set(placement.projections) == {layer.name for layer in plan.layers}
    spoilt = onnx.load(paths[1])
    node = next(each for each in spoilt.graph.node if each.name == "transformer.h.1.mlp.c_fc")
    weight = next(each for each in spoilt.graph.node if node.input[1] in each.output)
    codes = next(each for each in spoilt.graph.initializer if each.name == weight.input[0])
    zeros = np.zeros(tuple(codes.dims), np.float32)
    spoilt.graph.initializer.append(onnx.numpy_helper.from_array(zeros, "floats"))
    node.input[1] = "floats"
    onnx.save(spoilt, tmp_path / "decode.onnx")
    with pytest.raises(InputError, match=r"1 planned projections are not integer .*h\.1\.mlp\.c_fc"):
        check_models([paths[0], tmp_path / "decode.onnx"], plan, in_each=True)


def test_its_recipe_makes_the_same_bytes_again(made, tmp_path):
    folder, _ = made("gpt2")
    again = tmp_path / "again"
    ran = quantkit("quantize", "--recipe", str(folder / "recipe.yaml"), "--no-eval", "-o", str(again))
    assert ran.returncode == 0, ran.stderr
    for name in ("prompt.onnx", "decode.onnx", "weights.data"):
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name


def test_other_verbs_take_it(made):
    folder, _ = made("gpt2")
    report = json.loads((folder / "report.json").read_text())
    ran = json.loads(quantkit("eval", str(folder), "--json").stdout)
    assert ran["accuracy"]["kl_divergence"] == pytest.approx(report["accuracy"]["kl_divergence"], rel=1e-6)
    timed = json.loads(quantkit("bench", str(folder), "--json").stdout)["latency"][0]
    assert timed["prefill_ms"] > 0
    assert timed["decode_ms_per_token"] > 0
    shown = quantkit("report", str(folder))
    assert "prompt.onnx reads 24 tokens at once" in " ".join(shown.stdout.split())
    compared = json.loads(quantkit("compare", str(folder), str(folder), "--format", "json").stdout)
    assert "int8_static16" in json.dumps(compared)


def test_several_prompts_say_what_each_says_alone(made):
    folder, _ = made("llama")
    prompts = ("The king", "And it came to pass in those days")
    together = json.loads(
        quantkit("generate", str(folder), *prompts, "--max-new-tokens", "6", "--json").stdout
    )
    for prompt, document in zip(prompts, together, strict=True):
        (alone,) = json.loads(
            quantkit("generate", str(folder), prompt, "--max-new-tokens", "6", "--json").stdout
        )
        assert document["tokens"] == alone["tokens"]


def test_eight_bits_come_with_a_warning(made, tmp_path):
    source = made("gpt2")[0].parent / "model"
    (tmp_path / "quick.yaml").write_text(QUICK % ("false", "false"))
    arguments = ("--recipe", str(tmp_path / "quick.yaml"), "-o", str(tmp_path / "out"), "--json")
    ran = quantkit("quantize", str(source), *TINY, *LENGTHS, "--scheme", "int8_static8", *arguments)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert any("lose more accuracy" in note for note in document["notes"])
    assert 1e-6 < document["accuracy"]["kl_divergence"] < 0.05
    decode = onnx.load(tmp_path / "out" / "decode.onnx", load_external_data=False)
    pasts = [each for each in decode.graph.input if each.name.startswith("past")]
    assert all(each.type.tensor_type.elem_type == onnx.TensorProto.UINT8 for each in pasts)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--scheme", "int8_block64"), "scheme 'int8_block64'; allowed: int8_static16, int8_static8"),
        (("--layer", "lm_head=int8_block32"), "--layer: a static graph has one scheme"),
        (("--cache", "int8"), "--cache: "),
        (("--max-kl", "0.01"), "nothing to search"),
        (("--min-dim", "auto"), "times of this CPU say nothing about an NPU"),
        (("--prompt-length", "97"), "97 tokens; allowed: 2 to 96"),
        (("--prompt-length", "16"), "the one length that Qualcomm's compiler gets wrong"),
        (("--prompt-length", "24", "--cache-length", "20"), "20 tokens; allowed: 24 (the prompt) to 95"),
        (("--cache-length", "96"), "96 tokens; allowed: "),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_it_cannot_do_is_one_line(flags, words, made, tmp_path):
    source = made("gpt2")[0].parent / "model"
    assert words in refused("quantize", str(source), "--target", "npu", *flags, "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_others_cannot_do_with_it_is_one_line(made, tmp_path):
    folder, _ = made("gpt2")
    source = str(folder.parent / "model")
    line = refused("quantize", source, "--prompt-length", "24", "-o", str(tmp_path / "out"))
    assert "takes texts of any length" in line
    line = refused("generate", str(folder), "The king", "--max-new-tokens", "60")
    assert "up to 61 tokens together" in line and "--cache-length" in line
    assert "no provider 'npu'" in refused("generate", str(folder), "The king", "--provider", "npu")
    ran = quantkit("generate", str(folder), "The king", "--provider", "nv-tensorrt-rtx")
    assert ran.returncode == 1
    assert "'nv-tensorrt-rtx': not installed: pip install" in ran.stderr


def test_a_traced_model_has_no_such_graphs(tmp_path):
    build_tiny("BloomForCausalLM", FAMILIES["bloom"].tiny).save_pretrained(tmp_path / "model")
    line = refused("quantize", str(tmp_path / "model"), *TINY, "-o", str(tmp_path / "out"))
    assert "BloomForCausalLM is traced" in line and "fused decoder" in line


@pytest.mark.qnn
@pytest.mark.skipif(not plugin_devices(PROVIDERS["qnn"]), reason=f"no QNN plugin: {PROVIDERS['qnn'].install}")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_both_graphs_run_whole_on_qnn(name, made, tmp_path):
    """Fallback to the CPU is disabled, so a session that starts runs all of its graph there."""
    folder = tmp_path / "out"
    shutil.copytree(made(name)[0], folder)
    npu, cpu = (open_static_decoder(folder, provider=each, threads=1) for each in ("qnn", "cpu"))
    ids = np.random.default_rng(7).integers(1, 4096, 20)
    logits = []
    for decoder in (npu, cpu):
        row = StaticRow(decoder=decoder, prompt=ids[:12])
        first = row.read()
        logits.append(np.concatenate([first, *(row.step(int(token)) for token in ids[12:])]))
    assert 0 < error(*logits).relative < 0.04  # by hand: up to 1.0% for GPT-2, 1.7% for Llama


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "increase", "kl"), [("int8_static16", 0.01, 1e-4), ("int8_static8", 0.05, 0.03)]
)
def test_the_bundled_model_stays_within_its_bars(scheme, increase, kl, tmp_path):
    (tmp_path / "quick.yaml").write_text(
        "measure: {threads: 1, max_tokens: 4000, latency: false, memory: false}"
    )
    arguments = ("--recipe", str(tmp_path / "quick.yaml"), "-o", str(tmp_path / "out"), "--json")
    ran = quantkit("quantize", "demo", "--target", "npu", "--scheme", scheme, *arguments)
    assert ran.returncode == 0, ran.stderr
    accuracy = json.loads(ran.stdout)["accuracy"]
    assert abs(accuracy["perplexity"]["increase"]) < increase
    assert 1e-6 < accuracy["kl_divergence"] < kl
    if scheme == "int8_static16":
        assert equal_continuations(tmp_path / "out", prompts=20, length=32, count=64) >= 13


def equal_continuations(folder: Path, *, prompts: int, length: int, count: int) -> int:
    """How many texts go on as the float model's do, greedily; prompts are spread over the held-out text."""
    ids = np.array(open_text(DEMO).encode((DEMO / "evaluation.txt").read_text(encoding="utf-8")))
    rows = [ids[start:][:length] for start in np.arange(prompts) * (len(ids) // prompts)]
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    decoder = open_static_decoder(folder, threads=1)
    equal = 0
    for row in rows:
        with torch.inference_mode():
            whole = model.generate(
                torch.from_numpy(row[None]), max_new_tokens=count, do_sample=False, eos_token_id=-1
            )
        made = [step[0] for step in generate(decoder, [row.tolist()], max_new_tokens=count)]
        equal += whole[0, length:].tolist() == made
    return equal
