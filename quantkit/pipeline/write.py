"""A prepared model rounded and exported: once as the recipe says, or as a search for a budget decides.

A search proposes, the artifact is written, and text that no search saw gives the verdict; where it fails, the
search goes on with less to spend, until a model holds or no more may be measured.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.errors import InputError
from quantkit.evaluation.measure import Subject, accuracy_of
from quantkit.evaluation.measurements import Accuracy
from quantkit.pipeline.caching import quantize_cache
from quantkit.pipeline.prepare import Job, Prepared, planned
from quantkit.pipeline.resolve import Opened
from quantkit.pipeline.rounding import export_options, round_and_export
from quantkit.pipeline.search import loss_of, seek
from quantkit.plan.plan import Plan
from quantkit.quantization.layout import Contents
from quantkit.quantization.rounding import PLAIN
from quantkit.quantization.rounding.errors import LayerLoss, Sums
from quantkit.quantization.search import Loss, SearchResult
from quantkit.recipe import Budget, Recipe, override

MARGIN = 0.9  # of what a failed verdict leaves to spend


def layer_losses(
    contents: Contents, losses: Mapping[str, Sums], search: SearchResult | None
) -> tuple[LayerLoss, ...]:
    """What rounding took from each product, in the order of the model."""
    tables = {unit.name: unit for unit in search.units} if search else {}
    chosen = dict(search.chosen.choices) if search else {}
    found = []
    for pack in contents.packs:
        if pack.name not in losses or pack.format is None:
            continue
        sums, unit = losses[pack.name], tables.get(pack.name)
        alone = [each.loss for each in unit.options if each.format == chosen.get(unit.name)] if unit else []
        grid = pack.format.grid
        found.append(
            LayerLoss(
                name=pack.name,
                layers=tuple(layer.name for layer in pack.layers),
                format=f"int{grid.bits} {f'block {grid.block}' if grid.block else 'channel'}, "
                f"inputs by {pack.format.activations}",
                weight_error=sums.weight_error,
                plain_weight_error=sums.plain_weight_error,
                output_error=sums.output_error,
                plain_output_error=sums.plain_output_error,
                kl_divergence=alone[0] if alone else None,
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A file that runs, and all that led to it."""

    subject: Subject
    plan: Plan
    losses: Mapping[str, Sums]
    search: SearchResult | None = None
    accuracy: Accuracy | None = None  # of the verdict: the same text, so it is not measured again

    @property
    def recipe(self) -> Recipe:
        """What makes this file again."""
        return self.subject.recipe


def write(
    job: Job,
    prepared: Prepared,
    opened: Opened,
    partial: Path,
    layers: Mapping[str, str],
    *,
    keeps_checkpoint: bool,
) -> Written:
    """Round and export; `layers` are the schemes of their own that projections have."""
    losses: dict[str, Sums] = {}
    num_weights = sum(layer.num_weights for layer in prepared.model_map.at_inference.layers)
    with job.progress.stage("quantize and export", total=num_weights, unit="weights") as count:
        exported = round_and_export(
            job, prepared, layers, partial, keeps_checkpoint=keeps_checkpoint, losses=losses, count=count
        )
    quantize_cache(job, prepared.model_map, exported)
    recipe = override(job.recipe, {"layers": dict(layers)})
    subject = Subject(
        exported=exported,
        model_map=opened.model_map,
        source=opened.source,
        weights=opened.weights,
        recipe=recipe,
        options={**export_options(job), "fit": PLAIN},
    )
    return Written(subject=subject, plan=planned(recipe, prepared.model_map), losses=losses)


def write_within_budget(
    job: Job, prepared: Prepared, opened: Opened, partial: Path, *, keeps_checkpoint: bool
) -> Written:
    """Search, write what was found, and let text that the search never saw decide; if it fails, go back."""
    trials = partial / ".trials"
    seeker = seek(job, prepared, opened.plan, trials)
    budget, tightened, verdicts = seeker.search.budget, 1.0, list[Loss]()
    while True:
        candidate = seeker.propose(tightened=tightened)
        layers = {**job.recipe.layers, **seeker.formats_of(candidate)}
        written = write(job, prepared, opened, partial, layers, keeps_checkpoint=keeps_checkpoint)
        found = _verdict(written.subject, job)
        verdicts.append(loss_of(found))
        share, promised = budget.share(verdicts[-1]), budget.share(candidate.loss)
        is_last = promised > tightened or seeker.left <= len(verdicts)
        if share <= 1 or is_last:
            break
        tightened = min(tightened, promised) / share * MARGIN
    shutil.rmtree(trials, ignore_errors=True)
    decided = {"budget": Budget().model_dump(), "calibration.leave_out": seeker.left_out}
    return replace(
        written,
        search=seeker.result(candidate, verdicts),
        subject=replace(written.subject, recipe=override(written.recipe, decided)),
        accuracy=found,
    )


def _verdict(subject: Subject, job: Job) -> Accuracy:
    """On the text of the final measurement, which no search saw."""
    found = accuracy_of(subject, progress=job.progress)
    if found is None:
        raise InputError(
            "no accuracy can be measured, so no budget can be held",
            where=subject.model_map.name,
            next_step="a tokenizer beside the weights, or --text, is what is missing",
        )
    return found
