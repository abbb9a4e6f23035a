"""The Python API on real artifacts: what it returns is what the command prints and what files hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch
from exporting import build_tiny, error

import quantkit
from quantkit.errors import InputError
from quantkit.evaluation.measurements import Accuracy
from quantkit.model.families import FAMILIES
from quantkit.recipe import Measure, Recipe

pytestmark = pytest.mark.once
QUICK = Measure(max_tokens=700, seconds=1.0, threads=1)
OFF = {"accuracy": False, "latency": False, "memory": False}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "demo"
    return quantkit.quantize(recipe=Recipe(model="demo", measure=QUICK), output=folder)


def test_the_report_on_disk_is_the_record_in_memory(artifact):
    assert quantkit.load(artifact.folder).report == artifact.report
    assert artifact.report.projections.quantized == 37
    assert artifact.report.latency[0].prefill_reference is not None


def test_text_is_what_the_command_prints(artifact):
    text = artifact.generate("The king", max_new_tokens=8)
    command = [sys.executable, "-m", "quantkit.cli", "generate", str(artifact.folder), "The king"]
    printed = subprocess.run(
        [*command, "--max-new-tokens", "8"], capture_output=True, text=True, check=True
    ).stdout
    assert printed == f"The king{text}\n"
    assert artifact.generate(["The king", "And he"], max_new_tokens=8)[0] == text


def test_logits_predict_the_text(artifact):
    ids = artifact.tokenizer.encode("The king")
    (first,) = next(artifact.stream_tokens(["The king"], max_new_tokens=1))
    logits = artifact.logits(ids)
    assert logits.shape == (1, len(ids), artifact.session.vocab_size)
    assert int(logits[0, -1].argmax()) == first


def test_evaluation_repeats_the_report(artifact):
    result = artifact.evaluate().result
    assert isinstance(result, Accuracy)
    assert result == artifact.report.accuracy


def test_an_encoder_encodes_as_the_original(tmp_path):
    row = FAMILIES["bert"]
    model = build_tiny(row.tiny_class, row.tiny)
    model.save_pretrained(tmp_path / "model")
    ids = [5, 9, 11, 23]
    vocabulary = {"[UNK]": 0, **{f"w{number}": number for number in range(1, 61)}}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    artifact = quantkit.quantize(tmp_path / "model", output=tmp_path / "out", min_dim=1, **OFF)
    (vector,) = artifact.encode(" ".join(f"w{number}" for number in ids))
    with torch.inference_mode():
        outputs = model(input_ids=torch.tensor([ids]))
    expected = (outputs.logits if "logits" in outputs else outputs[0])[0].mean(0).numpy()
    assert error(vector, expected).relative < 0.05
    assert np.abs(vector - expected).max() > 0, "the artifact is quantized"


def test_a_live_module_is_its_checkpoint(tmp_path, monkeypatch):
    """Equal graph bytes from a module in memory and from its folder; the module keeps its weights."""
    monkeypatch.chdir(tmp_path)
    row = FAMILIES["llama"]
    build_tiny(row.tiny_class, row.tiny).save_pretrained("model")
    module = type(build_tiny(row.tiny_class, row.tiny)).from_pretrained("model")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    live = quantkit.quantize(module, output="live", min_dim=1, transforms=[], **OFF)
    disk = quantkit.quantize("model", output="disk", min_dim=1, transforms=[], **OFF)
    assert (live.folder / "model.onnx").read_bytes() == (disk.folder / "model.onnx").read_bytes()
    assert live.recipe == disk.recipe
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_a_live_module_larger_than_the_temporary_disk_is_refused(tmp_path, monkeypatch):
    row = FAMILIES["llama"]
    full = namedtuple("Disk", "total used free")(10**12, 10**12, 1000)
    monkeypatch.setattr("quantkit.runtime.machine.disk.shutil.disk_usage", lambda _: full)
    with pytest.raises(InputError, match="the model's copy needs") as refused:
        quantkit.quantize(build_tiny(row.tiny_class, row.tiny), output=tmp_path / "out", min_dim=1, **OFF)
    assert "TMPDIR" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_texts_for_calibration_make_a_recipe_that_runs_again(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    texts = ["The king went up to the house of the lord. " * 40, "And they said unto him. " * 60]
    options = {"scheme": "int8_static16", "calibration_windows": 2, "calibration_length": 32, **OFF}
    first = quantkit.quantize("demo", calibration=texts, output=tmp_path / "a", **options)
    again = quantkit.quantize(recipe=tmp_path / "a" / "recipe.yaml", output=tmp_path / "b")
    assert first.recipe.calibration.text is not None
    assert (tmp_path / "a" / "model.onnx").read_bytes() == (again.folder / "model.onnx").read_bytes()


@pytest.mark.parametrize("wrong", [{"windows": 8}, [["a text"]], [7]])
def test_calibration_that_is_no_text_is_refused(wrong, tmp_path):
    with pytest.raises(quantkit.InputError, match="and not texts"):
        quantkit.quantize("demo", calibration=wrong, output=tmp_path / "out", **OFF)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_input_has_four_parts_and_leaves_nothing(tmp_path):
    with pytest.raises(quantkit.InputError) as raised:
        quantkit.quantize("demo", output=tmp_path / "out", scheme="int3")
    assert "int8_block64" in str(raised.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(quantkit.InputError) as raised:
        quantkit.load(tmp_path)
    assert raised.value.where == str(tmp_path)
    assert raised.value.allowed
    assert raised.value.next_step
