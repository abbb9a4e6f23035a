"""The plan: which projections are quantized, with a reason for each."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.model.model_map import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """One projection: quantized or not, and the reason."""

    name: str
    role: Role
    in_features: int
    out_features: int
    matrix: str
    quantized: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """A total and its quantized part."""

    total: int
    quantized: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FormulaCheck:
    """The published counting formula beside the counted projections; `differences` explains every gap."""

    attention_per_block: int
    ffn_per_block: int
    num_blocks: int
    num_outputs: int
    predicted: int
    walked: int
    agrees: bool
    differences: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The rule, every projection of a model under it, and the counts."""

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
