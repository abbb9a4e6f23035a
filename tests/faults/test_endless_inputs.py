"""Inputs that would never end, or are of no type that was meant; each is refused at once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from parsers import CORPUS

import quantkit
from quantkit.errors import InputError
from quantkit.quantization.calibration.tokens import calibration_tokens
from quantkit.recipe import load_recipe

pytestmark = pytest.mark.once
TIMEOUT = 120.0  # a hang never ends; a busy machine takes a while
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
from quantkit.cli import main
main()
"""
MODEL, ARTIFACT, HOST = (str(CORPUS / name) for name in ("model", "artifact", "host"))
FLAGS = {
    "recipe": ("quantize", MODEL, "--recipe", "{}"),
    "text": ("eval", ARTIFACT, "--text", "{}"),
    "quantize text": ("quantize", MODEL, "--min-dim", "1", "--text", "{}", "-o", "{out}"),
    "calibration text": (
        "quantize", MODEL, "--min-dim", "1", "--fit", "gptq", "--no-eval",
        "--calibration-text", "{}", "-o", "{out}",
    ),
    "device": ("inspect", MODEL, "--spec", "--device", "{}"),
    "key": ("protect", MODEL, "--min-dim", "1", "--key", "{}", "-o", "{out}"),
    "token": ("serve-host", HOST, "--port", "0", "--token-file", "{}"),
}  # fmt: skip
SUFFIXES = {"device": ".json"}


def refused(*arguments: str) -> str:
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{tests.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout[-500:] + done.stderr[-1500:]
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("quantkit: ")
    assert len(line) < 4000
    return line


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_flag_with_a_fifo_or_a_device(flag, kind, tmp_path):
    path = tmp_path / f"endless{SUFFIXES.get(flag, '')}"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    arguments = [part.format(path, out=tmp_path / "out") for part in FLAGS[flag]]
    assert "not a regular file" in refused(*arguments)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_checkpoint_with_a_fifo(file, tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / file).unlink()
    os.mkfifo(folder / file)
    assert "not a regular file" in refused("inspect", str(folder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(9)), "aliases"),
        ("seed: 1\nseed: 2", "the key 'seed' twice"),
        ("select: {min_dim: 1, min_dim: 2}", "the key 'min_dim' twice"),
        ("measure: {threads: 1000000}", r"measure\.threads"),
        ("[" * 5000 + "]" * 5000, "not YAML"),
        ("model: " + "x" * 200_000 + "\nseed: a", "seed"),
        ("seed: '" + "x" * 200_000 + "'", "seed"),
    ],
)
def test_recipes(text, words, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9},
        {"model_type": "gpt2", "architectures": None, "n_layer": 10**9},
        {"num_labels": 10**8},
        {"deep": "@deep@"},
        {"architectures": 2},
        {"max_position_embeddings": [64]},
        {"model_type": "mixtral", "architectures": None, "num_local_experts": 10**9},
    ],
    ids=str,
)
def test_configs(change, tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps({**config, **change}).replace('"@deep@"', "[" * 5000 + "]" * 5000)
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError) as caught:
        quantkit.inspect(folder)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize("shape", [(10**12,), (10**9, 10**9), (1,) * 40])
def test_headers_of_token_ids(shape, tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.zeros(1, np.int64))
    content = path.read_bytes()
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(300).encode() + b"\n"
    path.write_bytes(content[:8] + len(header).to_bytes(2, "little") + header + bytes(8))
    with pytest.raises(InputError, match=r"ids\.npy"):
        calibration_tokens(encode=lambda text: [], vocab_size=61, source=path)
