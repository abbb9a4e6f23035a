"""An artifact of an FP8 checkpoint is that of the float checkpoint which it means, whichever way it goes."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from scaled import checkpoints
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from quantkit import quantize
from quantkit.export.traced.trace import why_not_trace

DEMO = Path(str(resources.files("quantkit") / "assets" / "demo"))
SIZES = {"vocab_size": 4096, "hidden_size": 40}
LLAMA = {"intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 5}
WAYS = {
    "fused": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, **LLAMA, max_position_embeddings=64),
        {"transforms": []},
    ),
    "calibrated": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, **LLAMA, max_position_embeddings=64),
        {"transforms": ["smoothquant"], "fit": "gptq", "calibration_windows": 2, "calibration_length": 32},
    ),
    "traced": (BloomForCausalLM, BloomConfig(**SIZES, n_layer=2, n_head=5), {}),
}


def tensors(artifact: Path) -> dict[str, np.ndarray]:
    graph = onnx.load(artifact / "model.onnx").graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


@pytest.mark.parametrize("way", WAYS)
def test_the_artifact_is_that_of_the_dequantized_checkpoint(way, tmp_path):
    if way == "traced" and why_not_trace():
        pytest.skip("optimum-onnx does not run here")
    cls, config, options = WAYS[way]
    artifacts = []
    for folder in checkpoints(tmp_path, "deepseek and qwen", cls, config):
        shutil.copyfile(DEMO / "tokenizer.json", folder / "tokenizer.json")
        out = tmp_path / folder.parent.name / "out"
        quantize(folder, output=out, min_dim=1, latency=False, memory=False, accuracy=False, **options)
        artifacts.append(out)
    scaled, plain = map(tensors, artifacts)
    assert scaled.keys() == plain.keys()
    assert all(np.array_equal(scaled[name], plain[name]) for name in plain)
    assert "quantization_config" not in json.loads((artifacts[0] / "config.json").read_text())
    assert "the original is quantized (fp8)" in (artifacts[0] / "report.md").read_text()
