"""Holding an accuracy budget: formats chosen layer by layer, each configuration exported and run.

The table of losses orders the choices; what decides is the exported file in the real runtime, on windows of
text that no statistic and no table was taken from. The text of the final verdict is seen by none of this.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.evaluation.accuracy import Logits, measure_accuracy
from quantkit.evaluation.measurements import Accuracy
from quantkit.evaluation.models import open_measured
from quantkit.model.model_map import ModelMap, Role
from quantkit.model.weights.open import reference_logits
from quantkit.model.weights.torch_model import torch_model
from quantkit.pipeline.export import kind_of
from quantkit.pipeline.min_dim import unit_times
from quantkit.pipeline.prepare import Job, Prepared, held_back, tokens_for
from quantkit.pipeline.rounding import round_and_export
from quantkit.plan.formats import AUTO, FLOAT, in_blocks
from quantkit.plan.plan import Plan
from quantkit.quantization.layout import Pack, contents_of
from quantkit.quantization.search import Budget, Candidate, Loss, Search, SearchResult, UnitOptions, uniform
from quantkit.quantization.sensitivity import format_named, measure_sensitivity
from quantkit.recipe import Recipe
from quantkit.runtime.machine.throughput import cache_folder

SEARCHED = ("int8_block32", "int8_block128", "int4_block32", "int4_block64", "int4_block128")
TABLE_TOKENS = 1024  # that every unit and format is tried on
REMEMBERED_BYTES = 1 << 30  # of the original's logits, on disk
Sensitivity = tuple[UnitOptions, ...]
Times = Callable[[Pack, str], float]  # unit, format name -> microseconds a token


def budget_of(recipe: Recipe) -> Budget:
    """The recipe's limits."""
    return Budget(max_ppl_increase=recipe.budget.max_ppl_increase, max_kl=recipe.budget.max_kl)


@dataclass(kw_only=True, slots=True)
class Seeker:
    """A search under way; kept, so that a failed verdict can go on from what is known."""

    job: Job
    search: Search
    left_out: int  # windows of the calibration text that it measures on

    def propose(self, *, tightened: float = 1.0) -> Candidate:
        """The cheapest that holds this part of the budget, or the most accurate there is."""
        total = self.search.limit
        with self.job.progress.stage("search", total=total, unit="configurations") as count:
            before = len(self.search.tried)
            for name in searched_formats(self.job.recipe):
                choices = uniform(self.search.units, name)
                if choices:
                    self.search.measure(choices, f"all {name}")
            self.search.bisect(tightened=tightened)
            count(len(self.search.tried) - before)
        return self.search.best(tightened=tightened) or self.search.most_accurate()

    @property
    def left(self) -> int:
        """Models that may still be exported and measured."""
        return self.search.limit - len(self.search.tried)

    def formats_of(self, candidate: Candidate) -> dict[str, str]:
        """The scheme of every projection; "float" for those that stay as they are."""
        chosen = dict(candidate.choices)
        return {layer: chosen[unit.name] for unit in self.search.units for layer in unit.layers}

    def result(self, candidate: Candidate, verdicts: Sequence[Loss]) -> SearchResult:
        """What the report says of the search."""
        return SearchResult(
            max_ppl_increase=self.search.budget.max_ppl_increase,
            max_kl=self.search.budget.max_kl,
            prefer=self.job.recipe.budget.prefer,
            units=tuple(self.search.units),
            candidates=tuple(self.search.tried.values()),
            chosen=candidate,
            verdicts=tuple(verdicts),
            holds=self.search.budget.holds(verdicts[-1]) if verdicts else False,
        )


def seek(job: Job, prepared: Prepared, plan: Plan, folder: Path) -> Seeker:
    """Measure the table of losses, and be ready to search."""
    windows = tokens_for(job, prepared.model_map)
    left_out = held_back(len(windows))
    searched = windows[-left_out:]
    units = units_of(prepared.model_map, plan)
    options = sensitivities(job, prepared, units, windows)
    times = unit_times(job.recipe, units, searched_formats(job.recipe), job.progress)
    by_time = job.recipe.budget.prefer == "speed"
    priced = tuple(
        _priced(unit, pack, times, by_time=by_time) for unit, pack in zip(options, units, strict=True)
    )
    original = _remembering(reference_logits(job.source), folder / "logits", searched, prepared.model_map)

    def evaluate(choices: Mapping[str, str]) -> Loss:
        made = folder / "candidate"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        chosen = {layer: choices[unit.name] for unit in options for layer in unit.layers}
        round_and_export(job, prepared, {**job.recipe.layers, **chosen}, made)
        model = open_measured(made)
        loss = loss_on(original, model.logits, searched)
        del model
        shutil.rmtree(made, ignore_errors=True)
        return loss

    search = Search(
        units=priced,
        evaluate=evaluate,
        budget=budget_of(job.recipe),
        limit=job.recipe.budget.evaluations,
        tried={},
    )
    return Seeker(job=job, search=search, left_out=left_out)


def units_of(model_map: ModelMap, plan: Plan) -> tuple[Pack, ...]:
    """What is multiplied together among the planned projections."""
    packs_attention = kind_of(model_map) != "traced"
    contents = contents_of(model_map, plan, in_blocks(128), packs_attention=packs_attention)
    # No logit reads a latent, so no search can price it.
    return tuple(pack for pack in contents.packs if pack.grid and pack.layers[0].role is not Role.FFN_LATENT)


def sensitivities(
    job: Job, prepared: Prepared, units: Sequence[Pack], windows: NDArray[np.int64]
) -> Sensitivity:
    """The table of losses on windows that a search does not measure on, from a file where it is known."""
    seen = windows[: len(windows) - held_back(len(windows))]
    tokens = seen[: max(1, TABLE_TOKENS // seen.shape[1])]
    names = searched_formats(job.recipe)
    key = f"{identity_of(job)} {prepared.key} {job.recipe.transforms} {job.recipe.seed}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    cache = cache_folder() / "sensitivity" / f"{prepared.model_map.name.replace('/', '--')}-{digest}.json"
    if not job.resumes:
        cache.unlink(missing_ok=True)
    with job.progress.stage("sensitivity", total=len(units) * len(names), unit="trials") as count:
        module = torch_model(job.source, prepared.model_map, prepared.weights)
        return measure_sensitivity(
            module,
            prepared.model_map,
            units,
            names,
            tokens,
            fit=job.recipe.fit,
            evidence=prepared.evidence,
            cache=cache,
            key=key,
            progress=count,
        )


def searched_formats(recipe: Recipe) -> tuple[str, ...]:
    """The formats that every unit is tried in; the recipe's own scheme is one of them."""
    return tuple(dict.fromkeys([*([] if recipe.scheme == AUTO else [recipe.scheme]), *SEARCHED]))


def identity_of(job: Job) -> str:
    """What tells these weights from others, without reading them: files, sizes and times."""
    folder = job.source.folder
    if folder is None:
        return f"{job.source.name} {job.recipe.seed}"
    files = sorted(folder.glob("*.safetensors"))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{folder.resolve()} {stats}"


def _priced(unit: UnitOptions, pack: Pack, times: Times, *, by_time: bool) -> UnitOptions:
    """The same with bytes, microseconds a token, and the one of them that is to be made least."""
    options = []
    for choice in unit.options:
        size, time = bytes_of(pack, choice.format), times(pack, choice.format)
        options.append(replace(choice, cost=time if by_time else size, num_bytes=size, microseconds=time))
    return replace(unit, options=tuple(options))


def bytes_of(pack: Pack, name: str) -> float:
    """What a unit takes in a format."""
    rows, columns = pack.out_features, pack.in_features
    if name == FLOAT:
        return 4.0 * rows * columns
    return float(format_named(name, pack).grid.num_bytes(rows, columns))


def loss_on(reference: Logits, quantized: Logits, windows_BT: NDArray[np.int64]) -> Loss:
    """What a model loses on windows that are each read from their beginning."""
    length = windows_BT.shape[1]
    found = measure_accuracy(
        reference=reference,
        quantized=quantized,
        token_ids=windows_BT.reshape(-1),
        window=length,
        stride=length,
        text="calibration text",
    )
    return loss_of(found)


def loss_of(found: Accuracy) -> Loss:
    """What a budget is held against."""
    return Loss(
        ppl_increase=found.increase,
        kl_divergence=found.kl_divergence,
        top1_agreement=found.top1_agreement,
    )


def _remembering(
    original: Logits, folder: Path, windows_BT: NDArray[np.int64], model_map: ModelMap
) -> Logits:
    """The original's logits from disk after the first time, where they are not too many."""
    if 4 * windows_BT.size * (model_map.vocab_size or 0) > REMEMBERED_BYTES:
        return original
    folder.mkdir(parents=True, exist_ok=True)

    def logits(ids: NDArray[np.int64]) -> Any:
        path = folder / f"{hashlib.sha256(ids.tobytes()).hexdigest()[:24]}.npy"
        if not path.exists():
            np.save(path, original(ids))
        return np.load(path)

    return logits
