"""Experts that few calibration tokens met are rounded to nearest, and the report names them."""

from __future__ import annotations

import re

import numpy as np
import torch
from exporting import build_tiny

from quantkit.model.families import FAMILIES
from quantkit.pipeline.stages.prepare import FEWEST_TOKENS, prepare
from quantkit.pipeline.stages.resolve import resolve
from quantkit.progress import Progress
from quantkit.recipe import Calibration, Recipe, Select

LENGTH = 48


def test_experts_that_met_few_tokens_are_named_and_have_no_statistics(tmp_path):
    row = FAMILIES["mixtral"]
    model = build_tiny(row.tiny_class, dict(row.tiny))
    model.save_pretrained(tmp_path / "model")
    ids = np.random.default_rng(0).integers(1, 60, (2, LENGTH // 2))
    np.save(tmp_path / "ids.npy", ids)
    recipe = Recipe(
        model=str(tmp_path / "model"),
        select=Select(min_dim=1),
        fit="gptq",
        calibration=Calibration(text=str(tmp_path / "ids.npy"), windows=2, length=LENGTH // 2),
    )
    with torch.no_grad():
        prepared = prepare(resolve(recipe, Progress(quiet=True)))
    note = next(note for note in prepared.notes if "rounded to nearest" in note)
    met = re.findall(r"layers\.(\d)\.block_sparse_moe\.experts\.\d \((\d+)\)", note)
    assert len(met) == 6, "no expert of 48 tokens meets 64"
    for block in "01":
        assert sum(int(tokens) for number, tokens in met if number == block) == 2 * LENGTH < 2 * FEWEST_TOKENS
    for layer in prepared.model_map.layers:
        if layer.role.startswith("ffn"):
            assert prepared.statistics(layer) is None
        elif layer.role == "attention_query":
            assert prepared.statistics(layer).num_rows == LENGTH
