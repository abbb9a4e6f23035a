"""The float graph beside transformers: right for every family, wrong where one fact is wrong."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from exporting import build_tiny, export, slow_unless_of_a_kind

from quantkit import quantize
from quantkit.evaluation.float_error import check_prompts, float_error
from quantkit.evaluation.reference import transformers_reference
from quantkit.evaluation.verdict import FLOAT_ERROR
from quantkit.export.traced.trace import why_not_trace
from quantkit.model.families import FAMILIES
from quantkit.model.load import open_source
from quantkit.pipeline.stages import write

pytestmark = pytest.mark.once
TRACED = ("bloom", "t5", "quantkit_one_wide")  # each takes seconds
QUICK = {"accuracy": False, "latency": False, "memory": False, "min_dim": 1, "transforms": []}
STATIC = {
    "target": "npu",
    "prompt_length": 6,
    "fit": "rtn",
    "calibration_windows": 2,
    "calibration_length": 12,
}


def save_tiny(family: str, folder, **sizes) -> str:
    row = FAMILIES[family]
    build_tiny(row.tiny_class, {**row.tiny, **sizes}).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=slow_unless_of_a_kind(name)) for name in FAMILIES if name not in TRACED],
)
def test_float_graphs_of_every_family_equal_transformers_without_eval(family, tmp_path):
    blocks = {"scheme": "int8_block32"} if family == "albert" else {}  # exact on every processor
    report = quantize(
        save_tiny(family, tmp_path / "model"), output=tmp_path / "out", **QUICK, **blocks
    ).report
    assert report.float_error is not None
    assert report.float_error.largest_error < 1e-5
    assert report.judgement is None and report.is_sound


@pytest.mark.skipif(bool(why_not_trace()), reason="optimum-onnx does not run beside this transformers")
@pytest.mark.parametrize("family", ["t5", "bloom"])
def test_traced_graphs_are_compared_too(family, tmp_path):
    report = quantize(save_tiny(family, tmp_path / "model"), output=tmp_path / "out", **QUICK).report
    assert report.float_error is not None
    assert report.float_error.largest_error < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_graphs_of_fixed_shapes_are_compared_in_their_own_form(family, tmp_path, monkeypatch):
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(3, 29, 200))
    model, options = save_tiny(family, tmp_path / "model"), {**QUICK, **STATIC, "calibration_text": str(ids)}
    report = quantize(model, output=tmp_path / "right", **options).report
    assert report.float_error is not None
    assert report.float_error.largest_error < 1e-5
    written = write.export_static

    def with_wrong_norms(job, folder, **arguments):
        norms = tuple(dataclasses.replace(norm, epsilon=norm.epsilon + 0.1) for norm in job.model_map.norms)
        model_map = dataclasses.replace(job.model_map, norms=norms)
        return written(dataclasses.replace(job, model_map=model_map), folder, **arguments)

    monkeypatch.setattr(write, "export_static", with_wrong_norms)
    report = quantize(model, output=tmp_path / "wrong", **options).report
    assert report.judgement is not None and not report.is_sound


@pytest.mark.parametrize(
    ("family", "change"),
    [
        pytest.param("llama", {"rope_theta": 100.0}, id="rotation"),
        pytest.param("llama", {"rms_norm_eps": 0.1}, id="epsilon"),
        pytest.param("mistral", {"sliding_window": 3}, id="window"),
        pytest.param("gemma2", {"attn_logit_softcapping": 1.0}, id="softcap"),
        pytest.param("gemma2", {"query_pre_attn_scalar": 3}, id="scale"),
        pytest.param("gpt2", {"activation_function": "relu"}, id="activation"),
        pytest.param("bert", {"layer_norm_eps": 0.1}, id="encoder"),
    ],
)
def test_one_wrong_fact_is_beyond_the_limit(family, change, tmp_path):
    folder = save_tiny(family, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", min_dim=1 << 62)
    config = json.loads((tmp_path / "model/config.json").read_text())
    prompts = check_prompts(config, vocab_size=config["vocab_size"], num_parameters=1, most_tokens=20)
    right = float_error(tmp_path / "out", transformers_reference(open_source(folder)), prompts, pad_id=0)
    assert right.largest_error < 1e-5
    if "rope_theta" in change and "rope_parameters" in config:  # where transformers 5 keeps it
        change = {"rope_parameters": {**config["rope_parameters"], **change}}
    (tmp_path / "model/config.json").write_text(json.dumps({**config, **change}))
    wrong = float_error(tmp_path / "out", transformers_reference(open_source(folder)), prompts, pad_id=0)
    assert wrong.largest_error > FLOAT_ERROR.broken


def test_a_cache_that_is_read_at_other_places_is_found(tmp_path, monkeypatch):
    folder = save_tiny("llama", tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", min_dim=1 << 62)
    from quantkit.runtime.decoder import DecoderBatch, step

    monkeypatch.setattr(
        DecoderBatch, "read", lambda self: step(self.state, self.ids, np.ones_like(self.mask))
    )
    config = json.loads((tmp_path / "model/config.json").read_text())
    prompts = check_prompts(config, vocab_size=config["vocab_size"], num_parameters=1, most_tokens=20)
    found = float_error(tmp_path / "out", transformers_reference(open_source(folder)), prompts, pad_id=0)
    assert found.largest_error > FLOAT_ERROR.broken


def test_padding_that_is_read_is_found(tmp_path, monkeypatch):
    folder = save_tiny("bert", tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", min_dim=1 << 62)
    from quantkit.evaluation import float_error as module
    from quantkit.runtime.encoder import encode

    monkeypatch.setattr(module, "encode", lambda session, ids, mask: encode(session, ids))
    config = json.loads((tmp_path / "model/config.json").read_text())
    prompts = check_prompts(config, vocab_size=config["vocab_size"], num_parameters=1, most_tokens=20)
    found = float_error(tmp_path / "out", transformers_reference(open_source(folder)), prompts, pad_id=0)
    assert found.largest_error > FLOAT_ERROR.broken


def test_prompts_have_no_special_tokens():
    config = {"pad_token_id": 3, "eos_token_id": [4], "bos_token_id": None}
    short, long = check_prompts(config, vocab_size=6, num_parameters=1, most_tokens=200)
    assert (len(short), len(long)) == (5, 198)
    assert set(long) == {0, 1, 2, 4, 5}
    short, long = check_prompts(config, vocab_size=6, num_parameters=10**10, most_tokens=4000)
    assert len(long) == 32
    short, long = check_prompts(config, vocab_size=6, num_parameters=1, most_tokens=2)
    assert len(short) == len(long) == 1
