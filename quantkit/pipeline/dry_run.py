"""A dry run: what `quantize` would do, its files, minutes and memory. No weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from quantkit.export.probes import format_name
from quantkit.pipeline.estimate import Sizes, StageEstimate, estimate
from quantkit.pipeline.options import Options, with_options
from quantkit.pipeline.quantize import Run, recipe_of, resolved_run
from quantkit.pipeline.rates import measure_rates
from quantkit.pipeline.stages.export import companion_bytes, expected_bytes
from quantkit.pipeline.stages.export_static import expected_static_bytes
from quantkit.pipeline.stages.prepare import unprepared
from quantkit.pipeline.stages.resolve import Resolved
from quantkit.pipeline.stages.write import export_job
from quantkit.plan.plan import Count, FormulaCheck, LayerPlan
from quantkit.plan.targets import TARGETS
from quantkit.progress import Progress
from quantkit.quantization.transforms.smoothquant import smoothed_map
from quantkit.recipe import Recipe
from quantkit.report.document import Kept, kept_projections

TRACED = "a traced graph comes on top of these bytes and minutes: its operators are known once it is traced"
SEARCHED = "these bytes are the scheme's: a search within a budget chooses other formats"
UNESTIMATED = "minutes and peak memory of a search depend on what it finds: it measures up to {} models"
UNTIED = "these bytes are with a tied head: a transform that unties it stores a second table"


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRun:
    """The decisions of a run, the bytes of its files, and estimates of its minutes and memory."""

    model: str
    output: str
    kind: str
    scheme: str
    target: str
    fit: str
    transforms: tuple[str, ...]
    cache: str
    min_dim: int
    projections: Count
    matrices: Count
    parameters: Count
    formula: FormulaCheck
    layers: tuple[LayerPlan, ...]
    formats: Mapping[str, int]  # projections by format
    kept: tuple[Kept, ...]
    source_bytes: int
    model_bytes: int  # graphs and weights
    companion_bytes: int  # tokenizer and configs; reports and manifest are not counted
    stages: tuple[StageEstimate, ...]  # of the run; empty where a search decides them
    peak_bytes: int | None  # resident memory of the process
    minutes: float | None
    notes: tuple[str, ...]


def dry_run(
    model: str | Path | None = None,
    *,
    recipe: Recipe | str | Path | None = None,
    output: str | Path | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    quiet: bool = True,
    **options: Unpack[Options],
) -> DryRun:
    """What `quantize` would do with these arguments; it refuses what `quantize` refuses before its work.

    Minutes and peak memory are estimates for this machine at its present speed, which takes two seconds to
    measure; they leave out the import of the libraries.

    Args:
        model: A folder, a well-known or Hub name, or "demo"; None takes the model that the recipe names.
        recipe: A recipe or the path of a recipe file; options override it.
        output: The artifact folder, which is not written.
        force: Whether an older artifact may be replaced.
        trust_remote_code: Run code that ships with the checkpoint.
        quiet: Write no progress to stderr.
        **options: Keys of the recipe, see `Options`.

    >>> forecast = dry_run("demo")
    >>> forecast.projections
    Count(total=37, quantized=37)
    """
    settings = Run(
        output=Path(output) if output else None, force=force, trust_remote_code=trust_remote_code, quiet=quiet
    )
    decided = with_options(recipe_of(recipe), options)
    decided = decided.model_copy(update={"model": str(model)}) if model else decided
    resolved, folder = resolved_run(decided, settings, Progress(quiet=quiet))
    decided, plan, model_map = resolved.recipe, resolved.plan, resolved.model_map
    sizes = sizes_of(resolved)
    chosen = sizes.job.formats
    notes = {
        TRACED: resolved.kind == "traced",
        SEARCHED: decided.searches,
        UNESTIMATED.format(decided.budget.evaluations): decided.searches,
        UNTIED: decided.unties_head and bool(decided.transforms) and model_map.has_tied_head,
    }
    stages: tuple[StageEstimate, ...] = ()
    if not decided.searches:
        stages = estimate(sizes, measure_rates(*_typical_shape(plan.layers)))
    return DryRun(
        model=model_map.name,
        output=str(folder),
        kind=resolved.kind,
        scheme=decided.scheme,
        target=decided.target,
        fit=decided.fit,
        transforms=tuple(decided.transforms),
        cache=decided.cache,
        min_dim=plan.min_dim,
        projections=plan.projections,
        matrices=plan.matrices,
        parameters=plan.parameters,
        formula=plan.formula,
        layers=plan.layers,
        formats=dict(
            Counter(format_name(chosen[layer.name], layer.role) for layer in plan.layers if layer.quantized)
        ),
        kept=kept_projections(plan),
        source_bytes=resolved.weights.source_bytes(),
        model_bytes=sizes.model_bytes,
        companion_bytes=companion_bytes(resolved.source, model_map, decided.target),
        stages=stages,
        peak_bytes=max((stage.peak_bytes for stage in stages), default=None),
        minutes=minutes_of(stages),
        notes=(*model_map.notes, *resolved.notes, *_true(notes)),
    )


def sizes_of(resolved: Resolved) -> Sizes:
    """The sizes of a run that its stages share."""
    prepared = unprepared(resolved)
    if {"smoothquant", "awq"} & {*resolved.recipe.transforms}:
        prepared = replace(prepared, model_map=smoothed_map(resolved.model_map, resolved.weights))
    job = export_job(prepared, resolved.recipe.layers)
    is_static = TARGETS[resolved.recipe.target].is_static
    model_bytes = (expected_static_bytes if is_static else expected_bytes)(job)
    return Sizes(prepared=prepared, job=job, model_bytes=model_bytes)


def in_new_process(forecast: DryRun, start_seconds: float) -> DryRun:
    """The forecast of a command, which imports its libraries before its first stage."""
    if not forecast.stages:
        return forecast
    start = StageEstimate(name="start", seconds=start_seconds, peak_bytes=0)
    stages = (start, *forecast.stages)
    return replace(forecast, stages=stages, minutes=minutes_of(stages))


def minutes_of(stages: Sequence[StageEstimate]) -> float | None:
    return sum(stage.seconds for stage in stages) / 60 if stages else None


def _typical_shape(layers: Sequence[LayerPlan]) -> tuple[int, int]:
    """The shape of the projections that hold the most weights together, most of the products' time."""
    weights = Counter[tuple[int, int]]()
    for layer in layers:
        weights[layer.in_features, layer.out_features] += layer.in_features * layer.out_features
    return max(weights, key=lambda shape: weights[shape])


def _true(notes: Mapping[str, bool]) -> Sequence[str]:
    return [note for note, applies in notes.items() if applies]
