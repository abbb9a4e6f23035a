"""The report of a quantized model: the record, and report.json made from it.

A figure that was not measured is None in the record and absent from report.json: a zero would read as a
result. `eval` and `bench` write parts of the same JSON, under the same keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from quantkit.evaluation.accuracy import TextPerplexity
from quantkit.evaluation.measurements import (
    Accuracy,
    Environment,
    FloatError,
    Latency,
    Memory,
    Similarity,
    Timing,
)
from quantkit.evaluation.samples import Samples
from quantkit.evaluation.verdict import Judgement, is_broken
from quantkit.model.model_map import to_json
from quantkit.plan.cost.phases import MachineRoofline
from quantkit.plan.min_dim import ShapeTime
from quantkit.plan.plan import Count, FormulaCheck, Plan
from quantkit.quantization.rounding.errors import LayerLoss
from quantkit.quantization.rounding.pack_histograms import PackHistograms
from quantkit.quantization.search import SearchResult
from quantkit.report.alarms import alarms_of
from quantkit.runtime.providers.placement import Placement

if TYPE_CHECKING:  # it imports torch
    from quantkit.quantization.transforms.alpha import Smoothing

PROTOCOL = ("text", "num_tokens", "window", "stride")  # keys of an accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Bytes of one kind of weights."""

    name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Bytes on disk of graph and weights, without tokenizer files."""

    source_bytes: int  # the checkpoint that was quantized, as it is stored
    planned_bytes: int  # all tensors of the plan
    artifact_bytes: int
    reference_bytes: int | None = None  # the float graph that latency is compared with
    parts: tuple[Part, ...] = ()  # of the artifact; they add up to it


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Projections of one role that stay float for one reason."""

    role: str
    reason: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayer:
    """A projection of the artifact, with its place in the model."""

    name: str
    role: str
    in_features: int
    out_features: int
    reason: str
    block: str | None = None  # None outside of blocks
    format: str | None = None  # None: float


def kept_projections(plan: Plan) -> tuple[Kept, ...]:
    """Float projections of a plan: one entry for each role and reason, in the model's order."""
    counts = Counter((str(layer.role), layer.reason) for layer in plan.layers if not layer.quantized)
    return tuple(Kept(role=role, reason=reason, count=count) for (role, reason), count in counts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Plan, measurements and protocol of one quantized model."""

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
    float_error: FloatError | None = None
    judgement: Judgement | None = None  # None: accuracy was not measured, and the float graph is right
    latency: tuple[Latency, ...] = ()
    memory: Memory | None = None
    placement: tuple[Placement, ...] = ()
    has_random_weights: bool = False
    recipe_sha256: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    notes: tuple[str, ...] = ()  # measurements that were not possible, each with its reason
    failures: tuple[str, ...] = ()  # measurements that ended in an error, each with its reason
    fit: str = "rtn"
    transforms: tuple[str, ...] = ()
    layer_losses: tuple[LayerLoss, ...] = ()
    histograms: tuple[PackHistograms, ...] = ()  # of the packs with the largest errors
    roofline: MachineRoofline | None = None
    smoothing: tuple[Smoothing, ...] = ()
    search: SearchResult | None = None
    shape_times: tuple[ShapeTime, ...] = ()  # of `min_dim: auto`
    samples: Samples | None = None
    layers: tuple[PlannedLayer, ...] = ()
    kind: str | None = None  # how the model was exported
    recipe: str | None = None  # recipe.yaml
    files: dict[str, str] = field(default_factory=dict)  # name -> SHA-256, of all but reports and manifest

    @property
    def is_sound(self) -> bool:
        """Whether the artifact is not broken, and keeps the budget of its search if there was one."""
        return (self.search is None or self.search.holds) and not is_broken(self.judgement)


def report_json(report: Report) -> dict[str, Any]:
    """The content of report.json."""
    document = parts_json({entry.name: getattr(report, entry.name) for entry in fields(report)})
    return {**document, "alarms": list(alarms_of(document))}


def rerun_json(
    artifact: Mapping[str, Any], *, environment: Environment, notes: Sequence[str], **measured: Any
) -> dict[str, Any]:
    """JSON of a stage that ran again on an artifact: `measured` parts under the keys of report.json."""
    return parts_json({**artifact, **measured, "environment": environment, "notes": notes})


def evaluation_json(
    artifact: Mapping[str, Any],
    result: Accuracy | Similarity | TextPerplexity,
    *,
    is_meaningful: bool,
    judgement: Judgement | None,
    reference: str | None,
    environment: Environment,
    notes: Sequence[str],
) -> dict[str, Any]:
    """JSON of `quantkit eval`; without a reference, accuracy holds the perplexity alone."""
    key = "similarity" if isinstance(result, Similarity) else "accuracy"
    accuracy = {**_part(result), "is_meaningful": is_meaningful}
    return rerun_json(
        artifact,
        reference=reference,
        environment=environment,
        notes=notes,
        judgement=judgement,
        **{key: accuracy},
    )


def parts_json(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Records as JSON under their keys; None is left out at every depth."""
    document: dict[str, Any] = _without_none({key: _part(value) for key, value in parts.items()})
    return document


def _part(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_part(entry) for entry in value]
    return FORMS.get(type(value), to_json)(value)


def _size_json(size: Size) -> dict[str, Any]:
    return {**to_json(size), "ratio": size.artifact_bytes / size.source_bytes}


def _accuracy_json(accuracy: Accuracy) -> dict[str, Any]:
    """The record's fields, with perplexity and protocol as objects of their own."""
    fields = to_json(accuracy)
    protocol = {key: fields.pop(key) for key in PROTOCOL}
    reference, quantized = (_perplexity(name, fields.pop(name)) for name in ("reference", "quantized"))
    increase = {key: fields.pop(key) for key in ("increase", "increase_standard_error")}
    return {"perplexity": reference | quantized | increase, **fields, "protocol": protocol}


def _perplexity_json(measured: TextPerplexity) -> dict[str, Any]:
    fields = to_json(measured)
    return {
        "perplexity": _perplexity("quantized", fields["perplexity"]),
        "protocol": {key: fields[key] for key in PROTOCOL},
    }


def _perplexity(model: str, perplexity: Mapping[str, float]) -> dict[str, float]:
    return {model: perplexity["value"], f"{model}_standard_error": perplexity["standard_error"]}


def _latency_json(latency: Latency) -> dict[str, Any]:
    reference = _phases_json(latency.prefill_reference, latency.decode_reference)
    return {
        "provider": latency.provider,
        "reference": {"name": latency.reference, **reference} if reference else None,
        **_phases_json(latency.prefill, latency.decode),
        "floor_ms_per_token": latency.floor_ms_per_token,
        "threads": latency.threads,
        "batch": latency.batch,
        "prompt_length": latency.prompt_length,
        "num_decoded": latency.num_decoded,
        "num_warm_ups": latency.num_warm_ups,
    }


def _phases_json(prefill: Timing | None, decode: Timing | None) -> dict[str, Any]:
    """The medians under keys of their own, each followed by its whole timing."""
    phases: dict[str, Any] = {}
    if prefill:
        phases |= {"prefill_ms": prefill.median_ms, "prefill": to_json(prefill)}
    if decode:
        phases |= {"decode_ms_per_token": decode.median_ms, "decode": to_json(decode)}
    return phases


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


# Records whose JSON is not their fields one by one.
FORMS: Mapping[type, Callable[[Any], Any]] = {
    Size: _size_json,
    Accuracy: _accuracy_json,
    TextPerplexity: _perplexity_json,
    Latency: _latency_json,
}
