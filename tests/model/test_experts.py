"""Experts in both layouts: a matrix for each projection of each expert, and all of a block in 3-D tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exporting import NOTHING, build_tiny, error, export
from safetensors.torch import load_file, save_file

from quantkit.model.experts import copy_with_separate_experts
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.runtime.decoder import open_decoder

IDS = np.random.default_rng(0).integers(1, 60, (1, 11))
PARTS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


def fuse(folder, names):
    """Rewrite a checkpoint in the other layout."""
    stored = load_file(folder / "model.safetensors")
    bases = {name.partition(".experts.")[0] for name in stored if ".experts." in name}
    for base in bases:
        parts = [[], [], []]
        for number in range(3):
            for part, name in zip(parts, names, strict=True):
                part.append(stored.pop(f"{base}.experts.{number}.{name}.weight"))
        gate_up = [torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)]
        stored[f"{base}.experts.gate_up_proj"] = torch.stack(gate_up)
        stored[f"{base}.experts.down_proj"] = torch.stack(parts[2])
    assert bases
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", PARTS)
def test_both_layouts_are_one_model(family, tmp_path):
    row = FAMILIES[family]
    model = build_tiny(row.tiny_class, dict(row.tiny))
    model.save_pretrained(tmp_path / "model")
    fuse(tmp_path / "model", PARTS[family])
    assert not [note for note in inspect(str(tmp_path / "model")).notes if "missing" in note]
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(IDS)).logits.numpy()
    assert error(open_decoder(tmp_path / "out", threads=1).logits(IDS), expected).relative < 1e-5


@pytest.mark.parametrize("family", PARTS)
def test_a_live_model_stays_as_it_is(family):
    row = FAMILIES[family]
    model = build_tiny(row.tiny_class, dict(row.tiny))
    names = list(model.state_dict())
    separate = copy_with_separate_experts(model)
    experts = [layer for layer in inspect(model).layers if layer.expert is not None]
    assert len(experts) == 2 * 3 * 3
    assert list(model.state_dict()) == names
    with torch.inference_mode():
        ids = torch.from_numpy(IDS)
        torch.testing.assert_close(separate(input_ids=ids).logits, model(input_ids=ids).logits)
