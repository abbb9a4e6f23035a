"""Packages for a device: whole, checked, and run with nothing but onnxruntime, tokenizers and numpy."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import quantkit, refused
from exporting import build_tiny, error
from tokenizers import Tokenizer

from quantkit.errors import InputError
from quantkit.pipeline.package import DEVICE, MANIFEST, RUNNER, STATIC_RUNNER, pack
from quantkit.runtime.encoder import encode, open_encoder
from quantkit.runtime.providers.table import PROVIDERS, plugin_devices

pytestmark = pytest.mark.once

PROMPTS = ("Once upon a time", "Now is the winter of our discontent made", "O")
DEMO = Path(__file__).parents[2] / "quantkit" / "assets" / "demo"
RUNNER_NEEDS = {"onnxruntime", "tokenizers", "numpy"}
HAS_QNN = bool(plugin_devices(PROVIDERS["qnn"]))
GRAPH_LENGTH, CACHE_LENGTH = 12, 40


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact") / "demo"
    made = quantkit("quantize", "demo", "--no-eval", "-o", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


def tiny_checkpoint(folder: Path, class_name: str, sizes: dict) -> Path:
    """A random model for the tokenizer of the bundled one."""
    build_tiny(class_name, {"vocab_size": 4096, **sizes}).save_pretrained(folder)
    shutil.copyfile(DEMO / "tokenizer.json", folder / "tokenizer.json")
    return folder


@pytest.fixture(scope="module")
def npu_artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("npu")
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    source = tiny_checkpoint(folder / "model", "GPT2LMHeadModel", sizes)
    lengths = ("--prompt-length", str(GRAPH_LENGTH), "--cache-length", str(CACHE_LENGTH))
    options = ("--min-dim", "1", "--target", "npu", *lengths, "--fit", "rtn", "--transform", "none")
    made = quantkit("quantize", str(source), *options, "--no-eval", "-o", str(folder / "artifact"))
    assert made.returncode == 0, made.stderr
    return folder / "artifact"


@pytest.fixture(scope="module")
def npu_package(npu_artifact, tmp_path_factory):
    folder = tmp_path_factory.mktemp("npu-package") / "packed"
    made = quantkit("package", str(npu_artifact), "--target", "npu", "-o", str(folder))
    assert made.returncode == 0, made.stderr
    assert "onnxruntime-qnn" in made.stdout
    return folder


@pytest.fixture(scope="module")
def package(artifact, tmp_path_factory):
    """The same as a folder, moved away from whatever it might still read."""
    folder = tmp_path_factory.mktemp("package") / "packed"
    made = quantkit("package", str(artifact), "-o", str(folder))
    assert made.returncode == 0, made.stderr
    return folder.rename(folder.with_name("moved"))


def run(folder: Path, *arguments: str, python: str = sys.executable):
    """The runner as a device starts it: by its path, so that no folder of this project is on the other."""
    command = [python, "-E", "-s", "-B", str(folder / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", check=False)


def continued(folder: Path, *arguments: str, **options):
    made = run(folder, *arguments, "--json", **options)
    assert made.returncode == 0, made.stderr
    return [json.loads(line) for line in made.stdout.splitlines()]


def expected(artifact: Path, prompt: str, *arguments: str):
    made = quantkit("generate", str(artifact), prompt, *arguments, "--json")
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)[0]


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("runner", [RUNNER, STATIC_RUNNER], ids=lambda path: path.stem)
def test_the_runner_is_short_and_imports_nothing_else(runner):
    imported, texts = set(), [path.read_text(encoding="utf-8") for path in (runner, DEVICE)]
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names - {"__future__"} == {*RUNNER_NEEDS, DEVICE.stem}
    assert len(texts[0].splitlines()) <= 60


def test_it_says_what_quantkit_says(artifact, package):
    lengths = set()
    made = continued(package, *PROMPTS, "--max-new-tokens", "40")
    for prompt, document in zip(PROMPTS, made, strict=True):
        wanted = expected(artifact, prompt, "--max-new-tokens", "40")
        assert document["tokens"] == wanted["tokens"]
        assert document["text"] == wanted["text"]
        lengths.add(len(document["tokens"]))
    assert max(lengths) == 40
    drawn = ("--max-new-tokens", "24", "--temperature", "0.9", "--seed", "7")
    (document,) = continued(package, PROMPTS[0], *drawn)
    assert document["tokens"] == expected(artifact, PROMPTS[0], *drawn)["tokens"] != made[0]["tokens"][:24]
    shown = run(package, PROMPTS[0], "--max-new-tokens", "40")
    assert shown.stdout == f"{PROMPTS[0]}{made[0]['text']}\n"
    assert shown.stderr == ""


def test_a_text_ends_where_the_model_ends_it(package, tmp_path):
    """The third token that it says is made the one that ends a text."""
    folder = shutil.copytree(package, tmp_path / "stops")
    (document,) = continued(folder, PROMPTS[1])
    ending = next(token for token in document["tokens"] if token not in document["tokens"][:2])
    for name, ids in (("config.json", -1), ("generation_config.json", [ending, 0])):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, "eos_token_id": ids}))
    (shorter,) = continued(folder, PROMPTS[1], "--no-check")
    assert shorter["tokens"] == document["tokens"][: document["tokens"].index(ending) + 1]


def test_more_than_the_context_is_one_line(package):
    made = run(package, "Once", "--max-new-tokens", "100000")
    assert made.returncode == 1
    assert "and 100000 new ones; allowed: 1 to " in made.stderr
    assert len(made.stderr.splitlines()) == 1


def test_what_lies_in_it(artifact, package):
    manifest = json.loads((package / MANIFEST).read_text())
    found = {path.name for path in package.iterdir()}
    assert found == {*manifest["files"], MANIFEST}
    assert {"model.onnx", "tokenizer.json", "config.json", "run.py", "README.md"} <= found
    assert {name: hash_of(package / name) for name in manifest["files"]} == manifest["files"]
    assert manifest["artifact_sha256"] == hash_of(artifact / MANIFEST)
    assert (manifest["kind"], manifest["model"], manifest["target"]) == ("decoder", "demo", "cpu")
    page = (package / "README.md").read_text()
    assert "$" not in page
    for words in (*found, "pip install onnxruntime tokenizers numpy", "onnxruntime-android", "win_arm64"):
        assert words in page
    for name in ("past_key_values.5.value", "logits", "int64"):
        assert name in page


def test_damage_after_packing_is_found_on_the_device(package, tmp_path):
    assert run(package, "--check").returncode == 0
    folder = shutil.copytree(package, tmp_path / "damaged")
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"e", b"f", 1))
    made = run(folder, "--check")
    assert made.returncode == 1
    assert made.stderr.startswith("tokenizer.json is not as it was packed")


def test_a_zip_holds_the_same_and_two_are_alike(artifact, package, tmp_path):
    made = [pack(artifact, tmp_path / name / "edge.zip").path for name in ("one", "two")]
    assert made[0].read_bytes() == made[1].read_bytes()
    with zipfile.ZipFile(made[0]) as archive:
        archive.extractall(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "edge"}
    for path in package.iterdir():
        assert hash_of(tmp_path / "edge" / path.name) == hash_of(path)
    assert [path.name for path in made[0].parent.iterdir()] == ["edge.zip"], "nothing is left beside it"
    assert made[0].stat().st_mode & 0o777 == (package / "run.py").stat().st_mode & 0o777


def test_weights_beside_the_graph_go_along(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: demo\nsingle_file_mb: 0\n")
    made = quantkit("quantize", "--recipe", str(recipe), "--no-eval", "-o", str(tmp_path / "demo"))
    assert made.returncode == 0, made.stderr
    packed = pack(tmp_path / "demo", tmp_path / "packed")
    assert "weights.safetensors" in packed.files
    assert "`weights.safetensors`" in (packed.path / "README.md").read_text()
    shutil.rmtree(tmp_path / "demo")
    (document,) = continued(packed.path, PROMPTS[0], "--max-new-tokens", "8")
    assert len(document["tokens"]) == 8


def test_an_encoder_gives_vectors(tmp_path):
    sizes = {"vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = build_tiny("BertModel", {**sizes, "intermediate_size": 128, "max_position_embeddings": 64})
    model.save_pretrained(tmp_path / "bert")
    shutil.copyfile(DEMO / "tokenizer.json", tmp_path / "bert" / "tokenizer.json")
    folder = tmp_path / "artifact"
    made = quantkit("quantize", str(tmp_path / "bert"), "--min-dim", "1", "--no-eval", "-o", str(folder))
    assert made.returncode == 0, made.stderr
    packed = pack(folder, tmp_path / "packed")
    assert packed.kind == "encoder"
    texts = ("Once upon a time", "there was a king of France")
    ran = run(packed.path, *texts)
    assert ran.returncode == 0, ran.stderr
    vectors = [json.loads(line)["vector"] for line in ran.stdout.splitlines()]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    too_long = run(packed.path, "king " * 100)
    assert (too_long.returncode, len(too_long.stderr.splitlines())) == (1, 1)
    assert "allowed: 1 to 64" in too_long.stderr
    for text, vector in zip(texts, vectors, strict=True):
        ids = np.array([tokenizer.encode(text).ids])
        wanted = encode(open_encoder(folder), ids)["last_hidden_state"][0].mean(axis=0)
        made = error(np.array(vector, np.float32), wanted)
        assert made.relative < 1e-5
        assert made.absolute < 1e-5 * np.abs(wanted).max()


def test_two_graphs_of_fixed_sizes_say_what_quantkit_says(npu_artifact, npu_package):
    """The second prompt is longer than its graph, and goes on token by token."""
    prompts = (*PROMPTS, "Now is the winter of our discontent made glorious summer by this sun of York")
    drawn = ("--max-new-tokens", "9", "--temperature", "0.9", "--seed", "7")
    lengths = set()
    for options in (("--max-new-tokens", "9"), drawn):
        made = continued(npu_package, *prompts, *options)
        for prompt, document in zip(prompts, made, strict=True):
            wanted = expected(npu_artifact, prompt, *options)
            assert (document["tokens"], document["text"]) == (wanted["tokens"], wanted["text"])
        tokenizer = Tokenizer.from_file(str(npu_package / "tokenizer.json"))
        lengths |= {len(tokenizer.encode(prompt).ids) for prompt in prompts}
    assert min(lengths) < GRAPH_LENGTH < max(lengths)


def test_what_lies_in_a_package_for_an_npu(npu_package):
    manifest = json.loads((npu_package / MANIFEST).read_text())
    assert {path.name for path in npu_package.iterdir()} == {*manifest["files"], MANIFEST}
    assert {name: hash_of(npu_package / name) for name in manifest["files"]} == manifest["files"]
    assert {"prompt.onnx", "decode.onnx", "weights.data", "run.py"} <= set(manifest["files"])
    assert (manifest["kind"], manifest["target"]) == ("decoder", "npu")
    page = (npu_package / "README.md").read_text()
    assert "$" not in page
    for words in (
        *manifest["files"],
        "--provider qnn",
        "Nothing compiled",
        "decode.onnx, in",
        "logit_position",
    ):
        assert words in page
    assert run(npu_package, "--check").returncode == 0


def test_what_a_package_for_an_npu_refuses(npu_package):
    made = run(npu_package, "Once", "--max-new-tokens", str(CACHE_LENGTH + 1))
    assert (made.returncode, len(made.stderr.splitlines())) == (1, 1)
    assert f"allowed: 1 to {CACHE_LENGTH + 1} together" in made.stderr
    if not HAS_QNN:
        made = run(npu_package, "Once", "--provider", "qnn")
        assert (made.returncode, len(made.stderr.splitlines())) == (1, 1)
        assert "pip install onnxruntime-qnn" in made.stderr


def test_the_target_is_held_to(npu_artifact, artifact, tmp_path):
    output = ("-o", str(tmp_path / "out"))
    assert "made for target 'npu'" in refused("package", str(npu_artifact), "--target", "cpu", *output)
    assert "made for target 'cpu'" in refused("package", str(artifact), "--target", "npu", *output)
    assert "no target 'tpu'" in refused("package", str(artifact), "--target", "tpu", *output)
    assert not (tmp_path / "out").exists()
    pack(artifact, tmp_path / "same", target="cpu-vnni")  # two names of one target


def test_a_compiled_form_goes_along_while_it_fits(npu_artifact, tmp_path):
    folder = shutil.copytree(npu_artifact, tmp_path / "artifact")
    (folder / "compiled").mkdir()
    context = folder / "compiled" / "prompt.qnn.onnx"
    context.write_bytes(b"a vendor's")
    digest = hashlib.sha256((folder / "prompt.onnx").read_bytes())
    digest.update(b"weights.data" + hashlib.sha256((folder / "weights.data").read_bytes()).digest())
    record = {"provider": "qnn", "provider_version": "2.7.0", "onnxruntime": "1.31.1", "device": "an NPU"}
    record |= {"model_sha256": digest.hexdigest(), "file_sha256": hash_of(context)}
    context.with_suffix(".json").write_text(json.dumps(record))
    packed = pack(folder, tmp_path / "packed")
    both = {"compiled/prompt.qnn.onnx", "compiled/prompt.qnn.json"}
    assert both < set(packed.files)
    assert packed.notes == ()
    assert (packed.path / "compiled" / "prompt.qnn.onnx").read_bytes() == b"a vendor's"
    assert "for the device `an NPU`" in (packed.path / "README.md").read_text()
    assert run(packed.path, "--check").returncode == 0
    with zipfile.ZipFile(pack(folder, tmp_path / "packed.zip").path) as archive:
        assert {f"packed/{name}" for name in both} < set(archive.namelist())
    context.write_bytes(b"another")
    packed = pack(folder, tmp_path / "stale")
    assert not both & set(packed.files)
    assert "prompt.qnn.onnx was left out" in packed.notes[0]


def test_an_encoder_of_one_length_gives_vectors(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    source = tiny_checkpoint(tmp_path / "bert", "BertModel", {**sizes, "max_position_embeddings": 32})
    folder = tmp_path / "artifact"
    options = ("--min-dim", "1", "--target", "npu", "--fit", "rtn", "--no-eval", "-o", str(folder))
    made = quantkit("quantize", str(source), *options)
    assert made.returncode == 0, made.stderr
    packed = pack(folder, tmp_path / "packed", target="npu")
    assert packed.kind == "encoder"
    texts = ("Once upon a time", "there was a king of France")
    ran = run(packed.path, *texts)
    assert ran.returncode == 0, ran.stderr
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, line in zip(texts, ran.stdout.splitlines(), strict=True):
        ids = np.array([tokenizer.encode(text).ids])
        wanted = encode(open_encoder(folder), ids)["last_hidden_state"][0].mean(axis=0)
        made = error(np.array(json.loads(line)["vector"], np.float32), wanted)
        assert made.relative < 1e-5
        assert made.absolute < 1e-5 * np.abs(wanted).max()
    too_long = run(packed.path, "king " * 100)
    assert (too_long.returncode, len(too_long.stderr.splitlines())) == (1, 1)
    assert "allowed: 1 to 32" in too_long.stderr


@pytest.mark.qnn
@pytest.mark.skipif(not HAS_QNN, reason=f"no QNN plugin: {PROVIDERS['qnn'].install}")
def test_on_the_npu_and_from_what_was_compiled_for_it(npu_artifact, tmp_path):
    folder = shutil.copytree(npu_artifact, tmp_path / "artifact")
    options = ("--max-new-tokens", "9", "--provider", "qnn")
    wanted = expected(folder, PROMPTS[0], *options)["tokens"]  # which compiles, and keeps what comes of it
    packed = pack(folder, tmp_path / "packed")
    assert "compiled/decode.qnn.onnx" in packed.files
    # Where the graphs themselves are gone, only their compiled forms can have answered.
    (packed.path / "weights.data").unlink()
    made = subprocess.run(
        [sys.executable, str(packed.path / "run.py"), PROMPTS[0], *options, "--json", "--no-check"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout.splitlines()[0])["tokens"] == wanted


def test_damage_is_named_and_nothing_is_written(artifact, tmp_path):
    folder = shutil.copytree(artifact, tmp_path / "damaged")
    data = bytearray((folder / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.onnx").write_bytes(data)
    (folder / "report.md").unlink()
    line = refused("package", str(folder), "-o", str(tmp_path / "out"))
    assert "model.onnx differs from the manifest" in line
    assert "report.md is missing" in line
    assert {path.name for path in tmp_path.iterdir()} == {"damaged"}


def test_an_output_that_exists(artifact, tmp_path):
    for name in ("out", "out.zip"):
        output = tmp_path / name
        pack(artifact, output)
        assert "--force" in refused("package", str(artifact), "-o", str(output))
        assert quantkit("package", str(artifact), "-o", str(output), "--force").returncode == 0
    foreign = tmp_path / "mine.zip"
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("letters.txt", "dear")
    before = foreign.read_bytes()
    assert "only replaces" in refused("package", str(artifact), "-o", str(foreign), "--force")
    assert foreign.read_bytes() == before
    assert "in the artifact" in refused("package", str(artifact), "-o", str(artifact), "--force")
    assert "in the artifact" in refused("package", str(artifact), "-o", str(artifact / "inside"))
    assert "in the artifact" in refused("package", str(artifact), "-o", str(artifact.parent), "--force")


def test_what_is_no_artifact(artifact, package, tmp_path):
    for folder, words in (
        (tmp_path / "nowhere", "No such file"),
        (tmp_path, "manifest.json: cannot be read"),
        (package, "a package already"),
    ):
        assert words in refused("package", str(folder), "-o", str(tmp_path / "out"))
    folder = shutil.copytree(artifact, tmp_path / "other")
    for content, words in (("[]", "not JSON"), ("{", "not JSON"), ('{"files": {"a": 1}}', "lists no files")):
        (folder / MANIFEST).write_text(content)
        with pytest.raises(InputError, match=words):
            pack(folder, tmp_path / "out")


def _relist(folder: Path, **extra: str) -> None:
    """The manifest as if the run had left the folder so."""
    manifest = json.loads((folder / MANIFEST).read_text())
    names = [path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
    manifest["files"] = {name: hash_of(folder / name) for name in names} | extra
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_what_the_runner_cannot_run(artifact, tmp_path):
    def changed(name: str) -> Path:
        return shutil.copytree(artifact, tmp_path / name)

    folder = changed("traced")
    model = onnx.load(folder / "model.onnx")
    (entry,) = model.metadata_props
    entry.value = json.dumps({**json.loads(entry.value), "kind": "traced"})
    onnx.save(model, folder / "model.onnx")
    _relist(folder)
    with pytest.raises(InputError, match="its cache grows"):
        pack(folder, tmp_path / "out")

    folder = changed("several")
    (folder / "model.onnx").rename(folder / "decoder_model.onnx")
    _relist(folder)
    with pytest.raises(InputError, match=r"decoder_model\.onnx"):
        pack(folder, tmp_path / "out")

    folder = changed("mute")
    (folder / "tokenizer.json").unlink()
    _relist(folder)
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        pack(folder, tmp_path / "out")

    folder = changed("reaching")
    (tmp_path / "secret").write_text("key")
    _relist(folder, **{"../secret": hash_of(tmp_path / "secret")})
    with pytest.raises(InputError, match="outside of the folder"):
        pack(folder, tmp_path / "out")

    folder = changed("climbing")
    (folder / "LICENSE").mkdir()
    (folder / "terms").write_text("terms")
    name = "LICENSE/../../climbing/terms"  # in the artifact a file, in a package a way out
    _relist(folder, **{name: hash_of(folder / "terms")})
    for output in ("out", "out.zip"):
        with pytest.raises(InputError, match="outside of the folder"):
            pack(folder, tmp_path / "deep" / output)
    assert not (tmp_path / "deep").exists()

    folder = changed("linked")
    (folder / "compiled").mkdir()
    for name in ("model.qnn.onnx", "model.qnn.json"):
        (folder / "compiled" / name).symlink_to(tmp_path / "secret")
    packed = pack(folder, tmp_path / "linked package")
    assert not (packed.path / "compiled").exists()

    folder = changed("no graph")
    (folder / "model.onnx").write_text("not a graph")
    _relist(folder)
    with pytest.raises(InputError, match="no ONNX file"):
        pack(folder, tmp_path / "out")


def test_a_license_goes_along(artifact, tmp_path):
    folder = shutil.copytree(artifact, tmp_path / "licensed")
    (folder / "LICENSE.txt").write_text("terms")
    _relist(folder)
    packed = pack(folder, tmp_path / "out")
    assert (packed.path / "LICENSE.txt").read_text() == "terms"
    assert "see LICENSE.txt" in (packed.path / "README.md").read_text()


@pytest.mark.slow
def test_in_a_bare_environment(artifact, package, npu_artifact, npu_package, tmp_path):
    """Neither torch nor transformers is there; pip needs a package index."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "bare")], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", *sorted(RUNNER_NEEDS)], capture_output=True, check=False
    )
    if installed.returncode:
        pytest.skip("pip reaches no package index")
    for absent in ("torch", "transformers", "onnx", "quantkit"):
        tried = subprocess.run([python, "-I", "-c", f"import {absent}"], capture_output=True, check=False)
        assert tried.returncode == 1
    (document,) = continued(package, PROMPTS[0], "--max-new-tokens", "64", python=python)
    assert document["tokens"] == expected(artifact, PROMPTS[0], "--max-new-tokens", "64")["tokens"]
    (document,) = continued(npu_package, PROMPTS[0], "--max-new-tokens", "20", python=python)
    assert document["tokens"] == expected(npu_artifact, PROMPTS[0], "--max-new-tokens", "20")["tokens"]
