"""`--target openvino`: integers in weights alone, floats between operators; run by OpenVINO itself.

The tests marked `slow` make an environment with the onnxruntime-openvino wheel, as the benchmark does, or
take the one that it made; they are skipped where that cannot be had.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from commands import quantkit, refused
from exporting import error
from test_bench_kinds import RECIPE, STATIC, bench, made
from transformers import AutoModelForCausalLM

from quantkit.runtime.static_decoder import StaticRow, open_static_decoder, run_prompt

pytestmark = pytest.mark.once

IDS = np.random.default_rng(0).integers(1, 60, 20)
GIVEN = 8


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def artifact(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return made(folder, request.param, "--target", "openvino", "--fit", "rtn", recipe=RECIPE + STATIC)


def graphs(folder):
    return [onnx.load(folder / name) for name in ("prompt.onnx", "decode.onnx")]


def test_weights_are_integers_and_all_else_is_float(artifact):
    planned = json.loads((artifact / "manifest.json").read_text())["plan"]["layers"]
    for model in graphs(artifact):
        kinds = {node.op_type for node in model.graph.node}
        assert "QuantizeLinear" not in kinds and {each.domain for each in model.opset_import} == {""}
        tensors = {each.name: each for each in model.graph.initializer}
        dequantized = {
            node.output[0]: tensors[node.input[0]]
            for node in model.graph.node
            if node.op_type == "DequantizeLinear"
        }
        products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
        weights = [dequantized[node.input[1]] for node in products if node.input[1] in dequantized]
        assert {each.data_type for each in weights} == {onnx.TensorProto.INT8}
        count = sum(int(np.prod(each.dims)) for each in weights)
        assert count == sum(each["in_features"] * each["out_features"] for each in planned)
        sizes = [
            dim
            for each in (*model.graph.input, *model.graph.output)
            for dim in each.type.tensor_type.shape.dim
        ]
        assert all(dim.HasField("dim_value") for dim in sizes)


def test_both_graphs_are_the_model_whose_weights_are_rounded(artifact):
    """The oracle: transformers with every picked weight rounded by row, in float64 and numpy alone."""
    model = AutoModelForCausalLM.from_pretrained(artifact.parent / "model").eval()
    if model.config.tie_word_embeddings:  # the head is rounded and the table is not
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for layer in json.loads((artifact / "manifest.json").read_text())["plan"]["layers"]:
        module = model.get_submodule(layer["name"].split("[")[0])
        is_turned = type(module).__name__ == "Conv1D"
        weight = module.weight.detach().double().numpy()
        weight_OI = weight.T if is_turned else weight
        scale = (np.abs(weight_OI).max(axis=1, keepdims=True) / 127).astype(np.float32).astype(np.float64)
        rounded = np.clip(np.rint(weight_OI / scale), -127, 127) * scale
        module.weight.data = torch.from_numpy(rounded.T if is_turned else rounded).float()
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(IDS[None])).logits[0].numpy()
    decoder = open_static_decoder(artifact, threads=1)
    row = StaticRow(decoder=decoder, prompt=IDS[:GIVEN])
    logits = row.read()
    stepped = np.concatenate([logits, *(row.step(int(token)) for token in IDS[GIVEN:])])
    found = error(stepped, wanted[GIVEN - 1 :])
    # A weight midway between two codes may go either way, so a few differ by one step.
    assert found.relative < 2e-3, found
    assert error(run_prompt(decoder.prompt, IDS[:GIVEN])[0][-1:], wanted[GIVEN - 1 : GIVEN]).relative < 2e-3


def test_other_schemes_are_refused_and_it_answers(artifact, tmp_path):
    source = str(artifact.parent / "model")
    said = refused(
        "quantize", source, "--target", "openvino", "--scheme", "int8_block32", "-o", str(tmp_path / "a")
    )
    assert "scheme 'int8_block32'" in said and "allowed: int8_channel" in said
    ran = quantkit("generate", str(artifact), "The king", "--max-new-tokens", "4", "--threads", "1")
    assert ran.returncode == 0, ran.stderr


def test_an_encoder_has_one_graph_of_it(tmp_path):
    folder = made(
        tmp_path, "bert", "--target", "openvino", head="BertModel", recipe=RECIPE + "static: {prompt: 12}\n"
    )
    (model,) = (onnx.load(path) for path in folder.glob("*.onnx"))
    assert "QuantizeLinear" not in {node.op_type for node in model.graph.node}
    (row,) = bench(folder, "--provider", "cpu", "--strict", "--threads", "1")
    assert row["outcome"] == "ran" and row["accuracy"]["lowest_cosine"] > 0.999


@pytest.fixture(scope="module")
def openvino() -> str:
    """The interpreter of an environment with OpenVINO's wheel."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    try:
        from bench_providers import cache_folder, interpreter

        return interpreter("openvino", cache_folder() / "peers")
    except (subprocess.CalledProcessError, OSError) as failure:
        pytest.skip(f"onnxruntime-openvino cannot be installed here: {failure}")
    finally:
        sys.path.pop(0)


@pytest.mark.slow
def test_openvino_runs_all_of_it(artifact, openvino):
    (row,) = bench(artifact, "--provider", f"openvino@{openvino}", "--strict", "--threads", "1")
    assert row["outcome"] == "ran"
    assert (row["placement"]["node_fraction"], row["placement"]["mac_fraction"]) == (1, 1)
    assert row["accuracy"]["max_relative_logit_error"] < 0.05


@pytest.mark.slow
def test_openvino_is_faster_than_the_cpu_in_float(openvino, tmp_path, monkeypatch):
    """The bundled model; fractions of a millisecond decide, so the best of three counts on both sides."""
    from bench_providers import make

    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    make("demo", "float32", tmp_path / "float32", [])
    made_for = quantkit("quantize", "demo", "--target", "openvino", "--no-eval", "-o", str(tmp_path / "out"))
    assert made_for.returncode == 0, made_for.stderr
    best = {}
    for name, folder, provider in (
        ("float32", tmp_path / "float32", "cpu"),
        ("openvino", tmp_path / "out", f"openvino@{openvino}"),
    ):
        rows = [
            bench(folder, "--provider", provider, "--threads", "1", "--decode", "16")[0] for _ in range(3)
        ]
        best[name] = {phase: min(row[phase]["lowest_ms"] for row in rows) for phase in ("prefill", "decode")}
    assert best["openvino"]["prefill"] < best["float32"]["prefill"]
    assert best["openvino"]["decode"] < best["float32"]["decode"]
