"""Heads of any size: fused where the attention operator runs them, static graphs always, else traced."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import quantize
from exporting import NOTHING, build_tiny, error, export
from static_graphs import TARGET

from quantkit.errors import InputError
from quantkit.export.fused.decoder import why_not_fused
from quantkit.export.static.decoder import emit_static
from quantkit.export.static.operators import StaticShape
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.pipeline.stages.export import kind_of, require_exportable
from quantkit.plan.targets import TARGETS
from quantkit.runtime.session import open_session
from quantkit.runtime.static_decoder import open_raw, run_prompt

IDS = np.random.default_rng(0).integers(3, 60, (1, 9))
SIZES = {
    "gpt2": lambda size: {"n_embd": 2 * size, "n_head": 2},
    "llama": lambda size: {"hidden_size": 2 * size, "num_attention_heads": 2, "num_key_value_heads": 1},
    "gpt_neox": lambda size: {"hidden_size": 2 * size, "num_attention_heads": 2},
    "qwen3": lambda size: {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": size},
    "gemma3": lambda size: {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": size},
}


def build(family, size, **options):
    sizes = {**FAMILIES[family].tiny, **SIZES[family](size), **options}
    return build_tiny(FAMILIES[family].tiny_class, sizes)


def logits_of(model):
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(IDS)).logits.numpy()


@pytest.mark.parametrize("size", [8, 16, 24, 40])
@pytest.mark.parametrize("family", list(SIZES))
def test_heads_that_are_fused_run(family, size, tmp_path):
    model = build(family, size)
    assert why_not_fused(map_module(model, name="tiny")) is None
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    session = open_session(tmp_path / "out", threads=1)
    wanted = logits_of(model)
    assert error(session.logits(IDS), wanted).relative < 1e-5
    batch = session.begin(IDS[:, :8].tolist(), 1)
    assert error(batch.read(), wanted[:, 7]).relative < 1e-5
    assert error(batch.step(IDS[:, 8], [0]), wanted[:, 8]).relative < 1e-5


@pytest.mark.parametrize("size", [size for size in range(1, 41) if size % 8])
def test_other_heads_are_traced(size):
    model_map = map_module(build("gpt2", size), name="tiny")
    assert kind_of(model_map) == "traced"
    assert kind_of(model_map, TARGETS["npu"]) == "decoder"
    with pytest.raises(InputError, match=f"heads of {size} are no multiple of 8"):
        require_exportable(model_map, "traced", "gpu", None)


@pytest.mark.parametrize(("family", "size"), [("gpt2", 5), ("llama", 20), ("qwen3", 12)])
def test_other_heads_run_in_static_graphs(family, size, tmp_path):
    model = build(family, size)
    made = quantize(model, tmp_path, min_dim=NOTHING)
    graph = emit_static(
        made.map, made.contents, made.checkpoint, shape=StaticShape(tokens=9), target=TARGET, metadata={}
    )
    session = open_raw(graph.SerializeToString(), tmp_path, threads=1)
    assert error(run_prompt(session, IDS[0])[0], logits_of(model)[0]).relative < 1e-5


def test_a_rotation_of_nothing_is_traced():
    model_map = map_module(build("gpt_neox", 16, rotary_pct=0.01), name="tiny")
    assert "rotates no part" in why_not_fused(model_map)
    assert kind_of(model_map, TARGETS["npu"]) == "traced"
