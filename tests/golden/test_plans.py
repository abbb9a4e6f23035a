"""Golden plans: what the rule picks for every built-in config, kept as JSON that a person can read.

To accept an intended change: UPDATE_GOLDEN=1 pytest tests/golden
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from quantkit.model.inspect import inspect
from quantkit.model.load import known_names
from quantkit.model.model_map import to_json
from quantkit.plan.select import choose

PLANS = Path(__file__).parent / "plans"
MIN_DIM = 768
OFTEN = (
    "bert-base-uncased",
    "gemma-3-270m",
    "gpt2",
    "llama-3.2-1b",
    "opt-125m",
    "t5-small",
)  # others are slow


def compact(name: str) -> dict:
    """The plan with blocks folded: one line for each kind of projection, and how many there are."""
    model = inspect(name)
    plan = choose(model, min_dim=MIN_DIM)
    rows = Counter(
        f"{re.sub(r'[.][0-9]+[.]', '.*.', layer.name)}: {layer.role} {layer.in_features} -> "
        f"{layer.out_features}, {'INT8' if planned.quantized else 'left'}: {planned.reason}"
        for layer, planned in zip(model.layers, plan.layers, strict=True)
    )
    return {
        "model": name,
        "family": model.family,
        "num_parameters": model.num_parameters,
        "min_dim": MIN_DIM,
        "projections": to_json(plan.projections),
        "matrices": to_json(plan.matrices),
        "parameters": to_json(plan.parameters),
        "formula": to_json(plan.formula),
        "layers": [f"{count} x {row}" for row, count in rows.items()],
        "blocks": [f"{count} x {row}" for row, count in Counter(_describe(b) for b in model.blocks).items()],
        "warnings": list(plan.warnings),
        "notes": list(model.notes),
    }


def _describe(block) -> str:
    facts = to_json(block)
    return json.dumps({key: value for key, value in facts.items() if key not in ("name", "index")})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in known_names()]
)
def test_plan_is_as_kept(name):
    path = PLANS / f"{name}.json"
    observed = compact(name)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(observed, indent=1) + "\n")
    assert observed == json.loads(path.read_text())


def test_no_plan_is_left_over():
    assert {path.stem for path in PLANS.glob("*.json")} == set(known_names())
