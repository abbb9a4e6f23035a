"""Sentence embeddings as a user has them: quantize, encode, Python, and the packaged runner say the same."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from commands import quantkit, refused
from exporting import error
from sentences import reference, save_sentence_model

import quantkit as api
from quantkit.runtime.sentence import batches

pytestmark = pytest.mark.once

STEPS = ((8, True, "Tanh"), "Normalize")
PROMPTS = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
OPTIONS = ("--min-dim", "1", "--scheme", "int8_block32", "--no-eval")
TEXTS = ("The king is dead.", "What is a queen?", "word " * 60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(the original, the artifact)"""
    folder = tmp_path_factory.mktemp("sentence")
    save_sentence_model(folder / "model", ("mean",), STEPS, settings=PROMPTS)
    done = quantkit("quantize", str(folder / "model"), *OPTIONS, "-o", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    return folder / "model", folder / "out"


def test_vectors_are_those_of_the_original(folders):
    """Texts behind the default prompt, cut at 32 tokens, each with its own length."""
    model, out = folders
    artifact = api.load(out)
    vectors = artifact.encode(TEXTS)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = np.array([artifact.tokenizer.encode("find: " + text)[:32]])
        expected = reference(model, ids, np.ones_like(ids), ("mean",), STEPS)[0]
        assert error(vector, expected).relative < 0.05
        assert error(vector, artifact.session.vectors(ids)[0]).relative < 1e-5
    assert len(artifact.tokenizer.encode("find: " + TEXTS[2])) > 32
    assert np.abs(artifact.encode(TEXTS, prompt="document") - vectors).max() > 1e-3


def test_the_command_the_file_and_the_package_say_the_same(folders, tmp_path, monkeypatch):
    _, out = folders
    vectors = api.load(out).encode(TEXTS)
    done = quantkit("encode", str(out), *TEXTS, "--json", "-o", str(tmp_path / "v.npy"))
    document = json.loads(done.stdout)
    assert document["dimensions"] == 8
    np.testing.assert_array_equal(np.array(document["vectors"], np.float32), vectors)
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), vectors)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS[:2]) + "\n\n"))
    lines = quantkit("encode", str(out), "-").stdout.splitlines()
    assert [line.partition(": ")[2] for line in lines] == list(TEXTS[:2])
    assert all("8 numbers, length 1.000" in line for line in lines)
    assert quantkit("package", str(out), "-o", str(tmp_path / "packed")).returncode == 0
    command = [sys.executable, str(tmp_path / "packed" / "run.py"), *TEXTS, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    packed = [json.loads(line)["vector"] for line in ran.stdout.splitlines()]
    assert error(np.array(packed), vectors).relative < 1e-5


def test_what_is_refused(folders, tmp_path):
    _, out = folders
    assert "'qery'; allowed: document, query" in refused("encode", str(out), "a", "--prompt", "qery")
    assert "a file that ends in .npy" in refused("encode", str(out), "a", "-o", str(tmp_path / "v.txt"))
    decoder = tmp_path / "decoder"
    assert quantkit("quantize", "demo", "--no-eval", "-o", str(decoder)).returncode == 0
    assert "a decoder gives no vectors" in refused("encode", str(decoder), "a")


@pytest.mark.parametrize("lengths", [(), (5,), (1, 4096, 9, 9), (7,) * 200, tuple(range(1, 600))])
def test_a_batch_has_each_text_once_and_bounded_padding(lengths):
    found = list(batches(lengths))
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    for batch in found:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or (len(batch) <= 64 and len(batch) * longest <= 4096)
