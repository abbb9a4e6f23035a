"""The smallest published size of each decoder family, with random weights: the float graph is the model.

A tiny config cannot show an overflow in a large sum, a wrong head size or a table that is too short. These
take gigabytes and minutes, so they are marked slow, and skip where memory is short.
"""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch
import transformers
from exporting import NOTHING, error, export
from stepping import one_by_one

from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.runtime.decoder import open_decoder

SIZES = {
    "gpt2": "gpt2",
    "opt": "opt-125m",
    "gpt_neox": "pythia-160m",
    "llama": "llama-3.2-1b",
    "mistral": "mistral-7b",
    "qwen2": "qwen2.5-0.5b",
    "qwen3": "qwen3-0.6b",
    "gemma": "gemma-2b",
    "gemma2": "gemma-2-2b",
    "gemma3": "gemma-3-270m",
    "phi3": "phi-3-mini",
}
COPIES = 2.6  # of the float model in memory at once: transformers' and onnxruntime's, and room
PROMPT, LENGTH = 24, 32


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES.values(), ids=list(SIZES))
def test_the_float_graph_of_a_published_size(name, tmp_path):
    model_map = inspect(name)
    needed = 4 * model_map.num_parameters * COPIES
    if needed > psutil.virtual_memory().available:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of memory")
    source = open_source(name)
    torch.manual_seed(0)
    model_class = getattr(transformers, source.config["architectures"][0])
    config = model_class.config_class(**source.config)
    config.dtype = torch.float32
    model = model_class(config).float().eval()
    model.save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(0).integers(10, model_map.vocab_size - 10, (2, LENGTH))
    mask = np.ones_like(ids)
    mask[1, :7] = 0
    with torch.inference_mode():
        wanted = model(torch.from_numpy(ids[:1])).logits.numpy()
        shorter = model(torch.from_numpy(ids[1:, 7:])).logits.numpy()
    del model
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    decoder = open_decoder(tmp_path / "out")
    made = decoder.logits(ids, mask)
    steps = one_by_one(decoder, ids[:1], prompt=PROMPT)
    assert error(made[:1], wanted).relative < 1e-4
    assert error(made[1:, 7:], shorter).relative < 1e-4
    assert error(steps, wanted[:, PROMPT - 1 :]).relative < 1e-4
