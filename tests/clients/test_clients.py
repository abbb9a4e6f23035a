"""The same file in other people's runtimes: greedy tokens equal to our own.

optimum feeds whole caches and pads prompts on the left; onnxruntime-genai binds its own buffers and wants
one position of logits from a prompt. Both are the real libraries.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from exporting import build_tiny, export

from quantkit.export.genai import CONFIG_FILE, MODEL_TYPES
from quantkit.model.families import FAMILIES
from quantkit.runtime.decoder import open_decoder
from quantkit.runtime.generate import generate

NEW = 10
PROMPTS = [[1, 5, 9, 20, 33], [7, 8, 9]]
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "eos_token_id": 0}
SIZES = {
    "gpt2": {"eos_token_id": 0, "bos_token_id": 0},
    "opt": {"eos_token_id": 0},
    "gpt_neox": {"eos_token_id": 0, "hidden_size": 256, "rotary_pct": 0.25},
    # optimum-onnx 0.1 takes every head of these two for a head of keys, so it runs them only ungrouped.
    "gemma2": {**WIDE, "num_key_value_heads": 4},
    "phi3": {**WIDE, "num_key_value_heads": 4},
}

try:
    from optimum.onnxruntime import ORTModelForCausalLM
except ImportError as error:
    ORTModelForCausalLM, why_no_optimum = None, str(error)
else:
    why_no_optimum = ""


@pytest.fixture(scope="module", params=sorted(MODEL_TYPES))
def artifact(request, tmp_path_factory):
    """A tiny INT8 artifact of each architecture that onnxruntime-genai knows, and our own greedy tokens."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    row = FAMILIES[name]
    model = build_tiny(row.tiny_class, {**row.tiny, **SIZES.get(name, WIDE)})
    model.save_pretrained(folder / "model")
    export(folder / "model", folder / "out", scheme="int8_block32")
    steps = generate(open_decoder(folder / "out", threads=1), PROMPTS, max_new_tokens=NEW)
    return folder / "out", [list(row) for row in zip(*steps, strict=True)]


@pytest.mark.skipif(bool(why_no_optimum), reason=f"optimum's runtime does not import here: {why_no_optimum}")
def test_optimum_generates_the_same_tokens(artifact):
    folder, ours = artifact
    model = ORTModelForCausalLM.from_pretrained(folder)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(torch.tensor(PROMPTS[:1]), **options)
    assert alone[0, len(PROMPTS[0]) :].tolist() == ours[0]
    missing = len(PROMPTS[0]) - len(PROMPTS[1])
    ids = torch.tensor([PROMPTS[0], [0] * missing + PROMPTS[1]])
    mask = torch.ones_like(ids)
    mask[1, :missing] = 0
    batch = model.generate(ids, attention_mask=mask, **options)
    assert batch[:, len(PROMPTS[0]) :].tolist() == ours


def test_onnxruntime_genai_generates_the_same_tokens(artifact):
    genai = pytest.importorskip(
        "onnxruntime_genai", reason="onnxruntime-genai has no wheel for this platform"
    )
    folder, ours = artifact
    # Its search stops at the end token, which these random models may well say; ours ran on past it.
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config["model"]["context_length"] == open_decoder(folder, threads=1).context
    for prompt, expected in zip(PROMPTS, ours, strict=True):
        params = genai.GeneratorParams(model := genai.Model(str(folder)))
        params.set_search_options(max_length=len(prompt) + NEW, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array([prompt], np.int32))
        made = []
        while not generator.is_done():
            generator.generate_next_token()
            made.append(int(generator.get_next_tokens()[0]))
        end = config["model"]["eos_token_id"]
        wanted = expected[: expected.index(end) + 1] if end in expected else expected
        assert made == wanted
