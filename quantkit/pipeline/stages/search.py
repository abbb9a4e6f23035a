"""Search within a budget: formats are chosen pack by pack, each candidate is exported and measured.

The table of sensitivities orders the candidates. A candidate is judged by its exported file in the real
runtime, on calibration windows that no statistic and no sensitivity came from. The verdict on the chosen
model uses the text of the final measurement, which the search never reads; if it fails, the search continues
with less of the budget, until a model holds it or no more may be measured.

Within a target size the candidates are the most accurate configuration by the table and the largest single
format; the more accurate of the two is written. A limit of loss beside it is judged on that model.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Logits, measure_accuracy
from quantkit.evaluation.artifact import open_artifact, open_measured
from quantkit.evaluation.measure import accuracy_of
from quantkit.evaluation.measurements import Accuracy
from quantkit.evaluation.reference import transformers_reference
from quantkit.model.model_map import ModelMap, Role
from quantkit.model.reference import reference_logits
from quantkit.model.weights.torch_model import torch_model
from quantkit.pipeline.stages.calibration_text import Tokens, calibration_windows, held_back
from quantkit.pipeline.stages.export import companion_bytes, expected_bytes, kind_of
from quantkit.pipeline.stages.min_dim import pack_times
from quantkit.pipeline.stages.prepare import Prepared, discard, prepare, unprepared
from quantkit.pipeline.stages.resolve import Resolved, resolve
from quantkit.pipeline.stages.write import Written, export, export_job, write
from quantkit.plan.formats import AUTO, FLOAT, in_blocks
from quantkit.plan.plan import Plan
from quantkit.progress import Progress
from quantkit.quantization.layout import Pack, contents_of
from quantkit.quantization.search import (
    Budget,
    Candidate,
    Choice,
    Loss,
    PackOptions,
    Search,
    SearchResult,
    bytes_of,
    line_of,
    most_accurate_within,
    uniform,
)
from quantkit.quantization.sensitivity import format_named, measure_sensitivity
from quantkit.recipe import Budget as RecipeBudget
from quantkit.recipe import Recipe, override, target_bytes
from quantkit.runtime.machine.cache import cache_folder

SEARCHED = ("int8_block32", "int8_block128", "int4_block32", "int4_block64", "int4_block128")
TABLE_TOKENS = 1024  # on which every pack and format is tried
REMEMBERED_BYTES = 1 << 30  # of the original's logits, on disk
MARGIN = 0.9  # share of what a failed verdict leaves of the budget
Sensitivity = tuple[PackOptions, ...]
Times = Callable[[Pack, str], float]  # pack, format name -> microseconds a token


def write_within_budget(prepared: Prepared, folder: Path, *, keeps_checkpoint: bool) -> Written:
    """Write the cheapest model that holds the budget on text that the search never read.

    With a target size, write the most accurate model that fits.
    """
    resolved = prepared.resolved
    trials = folder / ".trials"
    search = start_search(prepared, trials)
    budget, tightened, verdicts = search.table.budget, 1.0, list[Loss]()
    accuracy = None
    while True:
        candidate = search.propose(tightened=tightened)
        layers = {**resolved.recipe.layers, **search.formats_of(candidate)}
        written = write(prepared, folder, layers, keeps_checkpoint=keeps_checkpoint)
        if search.exceeds(written):
            continue
        if not budget.limits_loss:
            break
        accuracy = _verdict(written, folder)
        verdicts.append(loss_of(accuracy))
        share, promised = budget.share(verdicts[-1]), budget.share(candidate.loss)
        is_last = budget.max_bytes is not None or promised > tightened or search.left <= len(verdicts)
        if share <= 1 or is_last:
            break
        tightened = min(tightened, promised) / share * MARGIN
    shutil.rmtree(trials, ignore_errors=True)
    decided = {"budget": RecipeBudget().model_dump(), "calibration.leave_out": search.left_out}
    return replace(
        written,
        recipe=override(written.recipe, decided),
        search=search.result(candidate, verdicts),
        accuracy=accuracy,
    )


def _verdict(written: Written, folder: Path) -> Accuracy:
    resolved = written.prepared.resolved
    artifact = open_artifact(folder, written.recipe)
    accuracy = accuracy_of(artifact, transformers_reference(resolved.source), [], resolved.progress)
    if not isinstance(accuracy, Accuracy):
        raise InputError(
            "no accuracy can be measured, so no budget can be held",
            where=resolved.model_map.name,
            next_step="a tokenizer beside the weights, or --text, is what is missing",
        )
    return accuracy


@dataclass(kw_only=True, slots=True)
class RunningSearch:
    """A search that goes on after a failed verdict."""

    prepared: Prepared
    table: Search
    left_out: int  # windows of the calibration text that it measures on
    num_beside: float = 0.0  # bytes of the artifact beside the searched packs

    def propose(self, *, tightened: float = 1.0) -> Candidate:
        """The cheapest candidate within this part of the budget, or the most accurate one."""
        resolved = self.prepared.resolved
        if self.table.budget.max_bytes is not None:
            with resolved.progress.stage("search"):
                return self._largest(self.table.budget.max_bytes)
        with resolved.progress.stage("search", total=self.table.limit, unit="configurations") as count:
            before = len(self.table.tried)
            for name in searched_formats(resolved.recipe):
                choices = uniform(self.table.packs, name)
                if choices:
                    self.table.measure(choices, f"all {name}")
            self.table.bisect(tightened=tightened)
            count(len(self.table.tried) - before)
        return self.table.best(tightened=tightened) or self.table.most_accurate()

    def _largest(self, max_bytes: int) -> Candidate:
        """The most accurate candidate whose files fit."""
        packs = self.table.packs
        choices = most_accurate_within(packs, max_bytes - self.num_beside) or line_of(packs)[-1]
        while (excess := self.expected_bytes(choices) - max_bytes) > 0 and choices != line_of(packs)[-1]:
            self.num_beside += excess
            choices = most_accurate_within(packs, max_bytes - self.num_beside) or line_of(packs)[-1]
        candidates = [self.table.measure(choices, "the target size")]
        uniforms = {name: uniform(packs, name) for name in searched_formats(self.prepared.resolved.recipe)}
        fitting = {
            name: bytes_of(packs, chosen)
            for name, chosen in uniforms.items()
            if chosen and bytes_of(packs, chosen) <= max_bytes - self.num_beside
        }
        if fitting:
            name = max(fitting, key=lambda name: fitting[name])
            candidates.append(self.table.measure(uniforms[name] or {}, f"all {name}"))
        return min(filter(None, candidates), key=lambda candidate: candidate.loss.kl_divergence)

    def expected_bytes(self, choices: Mapping[str, str]) -> int:
        """Bytes of the artifact of a configuration: graph, weights and companions."""
        return artifact_bytes(self.prepared, self.table.packs, choices)

    def exceeds(self, written: Written) -> bool:
        """Whether the files are larger than the target size; the next proposal is smaller by the excess."""
        resolved, max_bytes = self.prepared.resolved, self.table.budget.max_bytes
        if max_bytes is None:
            return False
        beside = companion_bytes(resolved.source, resolved.model_map, resolved.recipe.target)
        excess = written.exported.num_bytes + beside - max_bytes
        self.num_beside += max(excess, 0)
        return excess > 0

    @property
    def left(self) -> int:
        """Models that may still be exported and measured."""
        return self.table.limit - len(self.table.tried)

    def formats_of(self, candidate: Candidate) -> dict[str, str]:
        """The scheme of every projection, "float" included."""
        chosen = dict(candidate.choices)
        return {layer: chosen[unit.name] for unit in self.table.packs for layer in unit.layers}

    def result(self, candidate: Candidate, verdicts: Sequence[Loss]) -> SearchResult:
        return SearchResult(
            max_ppl_increase=self.table.budget.max_ppl_increase,
            max_kl=self.table.budget.max_kl,
            max_bytes=self.table.budget.max_bytes,
            prefer=self.prepared.resolved.recipe.budget.prefer,
            units=tuple(self.table.packs),
            candidates=tuple(self.table.tried.values()),
            chosen=candidate,
            verdicts=tuple(verdicts),
            holds=self.table.budget.holds(verdicts[-1]) if verdicts else not self.table.budget.limits_loss,
        )


def start_search(prepared: Prepared, folder: Path) -> RunningSearch:
    """Measure the table of sensitivities and prices; `folder` holds trial exports."""
    resolved, recipe = prepared.resolved, prepared.resolved.recipe
    windows_NT = calibration_windows(recipe, resolved.source, prepared.model_map)
    left_out = held_back(len(windows_NT))
    searched_NT = windows_NT[-left_out:]
    packs = searched_packs(prepared.model_map, resolved.plan)
    options = sensitivities(prepared, packs, windows_NT)
    times = pack_times(recipe, packs, searched_formats(recipe), resolved.progress)
    by_time = recipe.budget.prefer == "speed"
    priced = tuple(
        _priced(unit, pack, times, by_time=by_time) for unit, pack in zip(options, packs, strict=True)
    )
    original = _on_disk(reference_logits(resolved.source), folder / "logits", searched_NT, prepared.model_map)

    def evaluate(choices: Mapping[str, str]) -> Loss:
        trial = folder / "candidate"
        shutil.rmtree(trial, ignore_errors=True)
        trial.mkdir(parents=True)
        chosen = {layer: choices[unit.name] for unit in options for layer in unit.layers}
        export(export_job(prepared, {**recipe.layers, **chosen}), trial)
        session = open_measured(trial)
        loss = loss_on(original, session.logits, searched_NT)
        del session
        shutil.rmtree(trial, ignore_errors=True)
        return loss

    limits = Budget(
        max_ppl_increase=recipe.budget.max_ppl_increase,
        max_kl=recipe.budget.max_kl,
        max_bytes=max_bytes_of(resolved),
    )
    table = Search(packs=priced, evaluate=evaluate, budget=limits, limit=recipe.budget.evaluations, tried={})
    smallest = line_of(priced)[-1]
    beside = (
        artifact_bytes(prepared, priced, smallest) - bytes_of(priced, smallest) if limits.max_bytes else 0.0
    )
    return RunningSearch(prepared=prepared, table=table, left_out=left_out, num_beside=beside)


def max_bytes_of(resolved: Resolved) -> int | None:
    """The target size in bytes."""
    size = resolved.recipe.budget.target_size
    return None if size is None else target_bytes(size, resolved.weights.source_bytes())


def artifact_bytes(prepared: Prepared, packs: Sequence[PackOptions], choices: Mapping[str, str]) -> int:
    """Bytes of graph, weights and companions of a configuration."""
    resolved = prepared.resolved
    layers = {layer: choices[pack.name] for pack in packs for layer in pack.layers}
    beside = companion_bytes(resolved.source, resolved.model_map, resolved.recipe.target)
    return expected_bytes(export_job(prepared, {**resolved.recipe.layers, **layers})) + beside


def smallest_bytes(prepared: Prepared) -> int:
    """Bytes of the artifact with every pack in its smallest format."""
    names = searched_formats(prepared.resolved.recipe)
    packs = tuple(
        PackOptions(
            name=pack.name,
            layers=tuple(layer.name for layer in pack.layers),
            options=tuple(Choice(format=name, loss=0.0, cost=pack_bytes(pack, name)) for name in names),
        )
        for pack in searched_packs(prepared.model_map, prepared.plan)
    )
    return artifact_bytes(prepared, packs, line_of(packs)[-1])


def require_target_size(resolved: Resolved) -> None:
    """Refuse a target size that the smallest formats exceed."""
    max_bytes = max_bytes_of(resolved)
    if max_bytes is None:
        return
    smallest = smallest_bytes(unprepared(resolved))
    if smallest > max_bytes:
        raise InputError(
            f"{max_bytes / 1e6:,.2f} MB; the smallest formats take {smallest / 1e6:,.2f} MB, "
            "graph, tokenizer and configs included",
            where="--target-size",
            allowed=f"{math.ceil(smallest / 1e4) / 100:.2f}MB or more",
            next_step="a larger size, or a smaller --min-dim",
        )


def sensitivity(recipe: Recipe, *, resumes: bool = True, quiet: bool = False) -> tuple[Resolved, Sensitivity]:
    """The loss of every pack alone, in every format that a search would try."""
    resolved = resolve(recipe, Progress(quiet=quiet), resumes=resumes)
    prepared = prepare(resolved)
    windows_NT = calibration_windows(resolved.recipe, resolved.source, prepared.model_map)
    table = sensitivities(prepared, searched_packs(prepared.model_map, resolved.plan), windows_NT)
    discard(prepared)
    return resolved, table


def searched_packs(model_map: ModelMap, plan: Plan) -> tuple[Pack, ...]:
    """The planned packs, without latents: no logit reads these, so no search can price them."""
    packs_attention = kind_of(model_map) != "traced"
    contents = contents_of(model_map, plan, in_blocks(128), packs_attention=packs_attention)
    return tuple(pack for pack in contents.packs if pack.grid and pack.layers[0].role is not Role.FFN_LATENT)


def sensitivities(prepared: Prepared, packs: Sequence[Pack], windows_NT: Tokens) -> Sensitivity:
    """The table of sensitivities on windows that no candidate is measured on; cached in a file."""
    resolved, recipe = prepared.resolved, prepared.resolved.recipe
    windows_NT = windows_NT[: len(windows_NT) - held_back(len(windows_NT))]
    tokens_NT = windows_NT[: max(1, TABLE_TOKENS // windows_NT.shape[1])]
    names = searched_formats(recipe)
    key = f"{_identity(resolved)} {prepared.key} {recipe.transforms} {recipe.seed}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    cache = cache_folder() / "sensitivity" / f"{prepared.model_map.name.replace('/', '--')}-{digest}.json"
    if not resolved.resumes:
        cache.unlink(missing_ok=True)
    with resolved.progress.stage("sensitivity", total=len(packs) * len(names), unit="trials") as count:
        build = partial(torch_model, resolved.source, prepared.model_map, prepared.weights)
        return measure_sensitivity(
            None if resolved.workers else build(),
            prepared.model_map,
            packs,
            names,
            tokens_NT,
            fit=recipe.fit,
            statistics=prepared.statistics,
            cache=cache,
            key=key,
            progress=count,
            workers=resolved.workers,
            rebuild=build if resolved.workers else None,
        )


def searched_formats(recipe: Recipe) -> tuple[str, ...]:
    """The formats that every pack is tried in; the recipe's own scheme is one of them."""
    return tuple(dict.fromkeys([*([] if recipe.scheme == AUTO else [recipe.scheme]), *SEARCHED]))


def _identity(resolved: Resolved) -> str:
    """Names, sizes and times of the weight files: identifies weights without reading them."""
    folder, file = resolved.source.folder, resolved.source.file
    if folder is None:
        return f"{resolved.source.name} {resolved.recipe.seed}"
    files = [file] if file else sorted(folder.glob("*.safetensors"))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return f"{(file or folder).resolve()} {stats}"


def _priced(unit: PackOptions, pack: Pack, times: Times, *, by_time: bool) -> PackOptions:
    """The options with bytes, microseconds a token, and the one of the two that is minimized as cost."""
    options = []
    for choice in unit.options:
        size, time = pack_bytes(pack, choice.format), times(pack, choice.format)
        options.append(replace(choice, cost=time if by_time else size, num_bytes=size, microseconds=time))
    return replace(unit, options=tuple(options))


def pack_bytes(pack: Pack, name: str) -> float:
    """Bytes of a pack in a format."""
    rows, columns = pack.out_features, pack.in_features
    if name == FLOAT:
        return 4.0 * rows * columns
    return float(format_named(name, pack).num_bytes(rows, columns))


def loss_on(reference: Logits, quantized: Logits, windows_NT: Tokens) -> Loss:
    """The loss of a model on windows that are each read from their beginning."""
    length = windows_NT.shape[1]
    accuracy = measure_accuracy(
        reference=reference,
        quantized=quantized,
        token_ids=windows_NT.reshape(-1),
        window=length,
        stride=length,
        text="calibration text",
    )
    return loss_of(accuracy)


def loss_of(accuracy: Accuracy) -> Loss:
    """The part of an accuracy that a budget limits."""
    return Loss(
        ppl_increase=accuracy.increase,
        kl_divergence=accuracy.kl_divergence,
        top1_agreement=accuracy.top1_agreement,
    )


def _on_disk(original: Logits, folder: Path, windows_NT: Tokens, model_map: ModelMap) -> Logits:
    """The original's logits, from disk after the first time, where they fit there."""
    if 4 * windows_NT.size * (model_map.vocab_size or 0) > REMEMBERED_BYTES:
        return original
    folder.mkdir(parents=True, exist_ok=True)

    def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        path = folder / f"{hashlib.sha256(ids.tobytes()).hexdigest()[:24]}.npy"
        if not path.exists():
            np.save(path, original(ids))
        stored: NDArray[np.float32] = np.load(path)
        return stored

    return logits
