"""The plan: which projections are quantized under which rule, with a reason for each."""

from __future__ import annotations

import dataclasses

from quantkit.model.model_map import Role


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What is done to one projection, and why."""

    name: str
    role: Role
    in_features: int
    out_features: int
    matrix: str
    quantized: bool
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """How many of how many."""

    total: int
    quantized: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FormulaCheck:
    """The published counting formula beside the walk; `differences` explains every gap in words."""

    attention_per_block: int
    ffn_per_block: int
    num_blocks: int
    num_outputs: int
    predicted: int
    walked: int
    agrees: bool
    differences: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which projections are quantized under which rule."""

    model: str
    min_dim: int
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    layers: tuple[LayerPlan, ...]
    projections: Count
    matrices: Count
    parameters: Count
    formula: FormulaCheck
    warnings: tuple[str, ...]
