"""The report of one quantized model, as a record.

What was not measured is None here and absent from report.json: a zero would read as a result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quantkit.evaluation.measurements import Accuracy, Environment, Latency, Memory, Similarity
from quantkit.plan.min_dim import ShapeTime
from quantkit.plan.plan import Count, FormulaCheck, Plan
from quantkit.quantization.rounding.errors import LayerLoss
from quantkit.quantization.search import SearchResult
from quantkit.quantization.transforms.alpha import Smoothing
from quantkit.runtime.providers.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Bytes on disk; graph and weights, without tokenizer files."""

    source_bytes: int  # the checkpoint that was quantized, as it is stored
    planned_bytes: int  # tensors that the plan foretells
    artifact_bytes: int
    reference_bytes: int | None = None  # the float graph that the artifact is timed against

    @property
    def ratio(self) -> float:
        """Artifact over source."""
        return self.artifact_bytes / self.source_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Projections that stay float for one reason."""

    role: str
    reason: str
    count: int


def kept_projections(plan: Plan) -> tuple[Kept, ...]:
    """What a plan leaves as it was, one entry for each role and reason, in the order of the walk."""
    counts = Counter((str(layer.role), layer.reason) for layer in plan.layers if not layer.quantized)
    return tuple(Kept(role=role, reason=reason, count=count) for (role, reason), count in counts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that is known of one quantized model."""

    model: str
    scheme: str
    target: str
    min_dim: int
    projections: Count
    matrices: Count
    parameters: Count
    formula: FormulaCheck
    kept: tuple[Kept, ...]
    size: Size
    environment: Environment
    accuracy: Accuracy | None = None
    similarity: Similarity | None = None  # in place of accuracy, for an encoder
    latency: tuple[Latency, ...] = ()
    memory: Memory | None = None
    placement: tuple[Placement, ...] = ()
    has_random_weights: bool = False
    recipe_sha256: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    notes: tuple[str, ...] = ()  # what could not be measured, and why
    fit: str = "rtn"
    transforms: tuple[str, ...] = ()
    layer_losses: tuple[LayerLoss, ...] = ()
    smoothing: tuple[Smoothing, ...] = ()
    search: SearchResult | None = None
    shape_times: tuple[ShapeTime, ...] = ()  # where sizes were chosen by measuring

    @property
    def holds_budget(self) -> bool:
        """Whether the artifact keeps the budget of its search; True without a search."""
        return self.search is None or self.search.holds
