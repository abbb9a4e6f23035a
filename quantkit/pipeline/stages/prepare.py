"""Before rounding: transforms that make rounding cost less, and the statistics that the fit needs.

Transforms are applied in the recipe's order, each calibrated on the model that the ones before it left; then
the transformed model is calibrated once more for the fit and the formats. Rounding to nearest with ranges
found at run time needs no calibration, so none is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.model.examples import are_pictures
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.model.weights.torch_model import torch_model
from quantkit.pipeline.folder import HELD, claim
from quantkit.pipeline.stages.calibration_text import (
    calibration_windows,
    random_windows,
    statistics_windows,
)
from quantkit.pipeline.stages.export import float_bytes, projection_formats
from quantkit.pipeline.stages.resolve import Resolved, plan_of
from quantkit.plan.formats import SCHEMES, Format
from quantkit.plan.plan import Plan
from quantkit.quantization.calibration.output_weights import WithGradients, weigh_outputs, weighed_layers
from quantkit.quantization.calibration.passes import collect
from quantkit.quantization.calibration.quick import WithPeaks, quick_magnitudes
from quantkit.quantization.calibration.statistics import FIELDS, StatisticsOf, no_statistics
from quantkit.quantization.calibration.store import MatrixStatistics, StatisticsFile
from quantkit.quantization.rounding import FITS
from quantkit.quantization.transforms import TRANSFORMS, Transform
from quantkit.quantization.transforms.alpha import Smoothing
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.strengths import search_strengths
from quantkit.runtime.machine.cache import cache_folder
from quantkit.runtime.machine.disk import OTHER_CACHE, writing

FEWEST_TOKENS = 64  # that an expert must meet for a fit
HELD_BYTES = 4 << 30  # of float32 weights; those of a larger model are read block by block
BATCH_TOKENS, MOST_WINDOWS = 1024, 4  # that run at once
QUICK_WINDOWS, QUICK_LENGTH = 2, 128  # of the pass that looks for outliers
OUTLIER_WINDOWS = 8  # of the same pass where a format singles out columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A resolved model after its transforms, ready to be rounded."""

    resolved: Resolved
    model_map: ModelMap
    weights: TensorSource
    plan: Plan
    formats: Mapping[str, Format]
    statistics: StatisticsOf = no_statistics
    smoothing: tuple[Smoothing, ...] = ()
    notes: tuple[str, ...] = ()
    key: str = ""  # identifies the weights and the statistics
    unused: tuple[Path, ...] = field(default=())  # statistics folders to remove when the work is done

    @property
    def planned(self) -> frozenset[str]:
        return frozenset(layer.name for layer in self.plan.layers if layer.quantized)


def prepare(resolved: Resolved) -> Prepared:
    """Apply the transforms, then collect the statistics that rounding needs."""
    recipe = resolved.recipe
    prepared = unprepared(resolved)
    for number, name in enumerate(recipe.transforms):
        prepared = _transform(prepared, name, TRANSFORMS[name], number)
    if prepared.model_map is not resolved.model_map:  # a transform may untie the head
        prepared = replace(prepared, plan=plan_of(recipe, prepared.model_map))
    needs = statistics_needs(prepared)
    if not needs:
        return _with_peaks(prepared)
    file, prepared = _calibrate(prepared, needs, f"{len(recipe.transforms)}-fit")
    rare = _rare_experts(prepared, file)
    experts = {layer.matrix for layer in resolved.model_map.layers if layer.expert is not None}
    notes = [
        f"calibration never reached '{name}': it is rounded to nearest"
        for name in file.unreached
        if name not in experts and any(name == layer.matrix for layer in resolved.model_map.layers)
    ]
    prepared = replace(
        prepared,
        statistics=MatrixStatistics(file=file, left_out=frozenset(rare)),
        notes=(*prepared.notes, *notes, *_rare_note(rare)),
        key=file.key,
    )
    return _with_peaks(_with_output_gradients(prepared))


def _rare_experts(prepared: Prepared, file: StatisticsFile) -> dict[str, int]:
    """The tokens of each expert's matrix that came to too few to say how it is best rounded."""
    tokens = file.tokens_by_matrix()
    return {
        layer.matrix: tokens[layer.matrix]
        for layer in prepared.resolved.model_map.layers
        if layer.expert is not None
        and tokens.get(layer.matrix, FEWEST_TOKENS) < FEWEST_TOKENS
        and not prepared.formats[layer.name].is_static  # its range is needed
    }


def _rare_note(rare: Mapping[str, int]) -> Iterator[str]:
    experts = {matrix.rpartition(".")[0]: tokens for matrix, tokens in rare.items()}
    if experts:
        names = ", ".join(f"{name} ({tokens})" for name, tokens in experts.items())
        yield (
            f"{len(experts)} experts met fewer than {FEWEST_TOKENS} tokens of the calibration text and are "
            f"rounded to nearest: {names}"
        )


def unprepared(resolved: Resolved) -> Prepared:
    """The model before its transforms, without statistics."""
    recipe = resolved.recipe
    return Prepared(
        resolved=resolved,
        model_map=resolved.model_map,
        weights=resolved.weights,
        plan=resolved.plan,
        formats=projection_formats(resolved.model_map, recipe.scheme, recipe.target, recipe.layers),
    )


def discard(prepared: Prepared) -> None:
    """Remove the statistics that are not to be kept."""
    for folder in prepared.unused:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # statistics of other runs may lie beside it
            folder.parent.rmdir()


def statistics_needs(prepared: Prepared) -> dict[str, frozenset[str]]:
    """The statistics that each planned matrix needs; a matrix that needs none has no entry."""
    recipe = prepared.resolved.recipe
    needs: dict[str, frozenset[str]] = {}
    for layer in prepared.resolved.model_map.layers:
        if layer.name not in prepared.planned:
            continue
        layer_needs = FITS[recipe.fit].statistics
        if layer_needs:
            layer_needs |= {"held_out"}  # compares the fit with plain rounding
        if prepared.formats[layer.name].is_static:
            layer_needs |= {"range", "histogram"}
        if recipe.bias_correction:
            layer_needs |= {"mean"}
        if layer_needs:
            needs[layer.matrix] = needs.get(layer.matrix, frozenset()) | layer_needs
    return needs


def takes_outliers(prepared: Prepared) -> bool:
    """Whether a format has outlier columns, or a search may choose one that has."""
    is_searched = bool(SCHEMES[prepared.resolved.recipe.scheme].body.outliers)
    return is_searched or any(prepared.formats[name].outliers for name in prepared.planned)


def _with_peaks(prepared: Prepared) -> Prepared:
    """Add peaks of inputs where formats have outlier columns; one pass over a few windows gives them."""
    if not takes_outliers(prepared):
        return prepared
    magnitudes, notes = _quick_magnitudes(prepared, takes_means=False)
    digest = hashlib.sha256(b"".join(magnitudes[name].tobytes() for name in sorted(magnitudes))).hexdigest()
    statistics = WithPeaks(statistics=prepared.statistics, peaks=magnitudes)
    return replace(
        prepared, statistics=statistics, notes=(*prepared.notes, *notes), key=f"{prepared.key} {digest}"
    )


def _with_output_gradients(prepared: Prepared) -> Prepared:
    """Add the second moments of output gradients, where the fit weighs output errors by them."""
    resolved, recipe = prepared.resolved, prepared.resolved.recipe
    calibration = recipe.calibration
    layers = weighed_layers(
        prepared.model_map, prepared.planned, fit=recipe.fit, num_windows=calibration.gradient_windows
    )
    if not layers:
        return prepared
    folder, prepared = _statistics_folder(prepared, f"{len(recipe.transforms)}-gradients")
    windows_NT = statistics_windows(recipe, resolved.source, prepared.model_map)
    with _writing_at(folder, resolved):
        gradients = weigh_outputs(
            resolved.source,
            prepared.model_map,
            prepared.weights,
            layers,
            windows_NT,
            num_windows=calibration.gradient_windows,
            seed=calibration.seed,
            folder=folder,
            progress=resolved.progress,
        )
    if isinstance(gradients, str):
        return replace(prepared, notes=(*prepared.notes, f"GPTQ weighs all outputs the same: {gradients}"))
    return replace(
        prepared,
        statistics=WithGradients(inputs=prepared.statistics, gradients=gradients),
        key=f"{prepared.key} {gradients.key}",
    )


def _transform(prepared: Prepared, name: str, row: Transform, number: int) -> Prepared:
    recipe = prepared.resolved.recipe
    settings = TransformSettings(seed=recipe.seed, unties_head=recipe.unties_head)
    if name == "smoothquant" and recipe.smoothing == "quick":
        magnitudes, notes = _smoothing_magnitudes(prepared)
        settings = replace(settings, statistics=magnitudes)
        prepared = replace(prepared, notes=(*prepared.notes, *notes))
    elif row.statistic:
        matrices = {layer.matrix for layer in prepared.model_map.layers if layer.name in prepared.planned}
        needs = dict.fromkeys(matrices, frozenset({row.statistic, "sample"}))
        file, prepared = _calibrate(prepared, needs, f"{number}-{name}")
        statistics = {matrix: file.read(matrix) for matrix in file.requested if matrix not in file.unreached}
        scaled_by = {matrix: getattr(record, FIELDS[row.statistic]) for matrix, record in statistics.items()}
        smoothing = search_strengths(
            prepared.model_map,
            prepared.weights,
            transform=name,
            formats={layer: prepared.formats[layer] for layer in prepared.planned},
            statistics=statistics,
            scaled_by=scaled_by,
            unties_head=recipe.unties_head,
            progress=prepared.resolved.progress,
        )
        alphas = {choice.space: choice.alpha for choice in smoothing}
        settings = replace(settings, statistics=scaled_by, alpha=alphas)
        prepared = replace(prepared, smoothing=(*prepared.smoothing, *smoothing))
    with prepared.resolved.progress.stage(name):
        model_map, weights = row.apply(prepared.model_map, prepared.weights, settings)
    return replace(prepared, model_map=model_map, weights=weights)


def _smoothing_magnitudes(prepared: Prepared) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """A scale for each block is found token by token, so means count: a few tokens with extreme activations
    decide peaks. Peaks count where one scale serves all tokens.
    """
    body = SCHEMES[prepared.resolved.recipe.scheme].body
    return _quick_magnitudes(prepared, takes_means=body.activations == "block" and body.grid.bits == 8)


def _quick_magnitudes(
    prepared: Prepared, *, takes_means: bool
) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """(magnitudes of one pass over a few windows, notes); one block's weights are in memory at a time."""
    resolved, model_map = prepared.resolved, prepared.model_map
    recipe = resolved.recipe
    notes: tuple[str, ...] = ()
    length = min(QUICK_LENGTH, model_map.context or QUICK_LENGTH)
    windows = OUTLIER_WINDOWS if takes_outliers(prepared) else QUICK_WINDOWS
    try:
        windows_NT = calibration_windows(recipe, resolved.source, model_map, windows=windows, length=length)
    except InputError as error:
        if recipe.calibration.text:
            raise
        windows_NT = random_windows(recipe, model_map, windows=windows, length=length)
        examples = "pixels" if model_map.picture else "tokens"
        notes = (f"outliers were looked for on random {examples}: {error}",)
    matrices = {layer.matrix for layer in model_map.layers if layer.name in prepared.planned}
    unit = "pixels" if are_pictures(windows_NT) else "tokens"
    with resolved.progress.stage("outliers", total=int(windows_NT.size), unit=unit) as count:
        module = torch_model(resolved.source, model_map, prepared.weights, streams=True)
        magnitudes = quick_magnitudes(
            module,
            model_map,
            windows_NT,
            matrices,
            takes_means=takes_means,
        )
        count(int(windows_NT.size))
    return dict(magnitudes), notes


def _calibrate(
    prepared: Prepared, needs: Mapping[str, frozenset[str]], step: str
) -> tuple[StatisticsFile, Prepared]:
    """Run the calibration text through the model as it is now, or reuse what an interrupted run left."""
    resolved, model_map = prepared.resolved, prepared.model_map
    tokens_NT = statistics_windows(resolved.recipe, resolved.source, model_map)
    unit = "pixels" if are_pictures(tokens_NT) else "tokens"
    folder, prepared = _statistics_folder(prepared, step)
    with (
        _writing_at(folder, resolved),
        resolved.progress.stage("calibration", total=int(tokens_NT.size), unit=unit) as count,
    ):
        model = partial(torch_model, resolved.source, model_map, prepared.weights)
        streamed = partial(model, streams=True, keeps_block=True)
        file = collect(
            streamed() if resolved.workers or streams_blocks(model_map) else model(),
            tokens_NT,
            requested=needs,
            blocks=[block.name for block in model_map.blocks],
            folder=folder,
            batch=batch_size(tokens_NT.shape[1]),
            seed=resolved.recipe.calibration.seed,
            progress=count,
            workers=resolved.workers,
            rebuild=streamed if resolved.workers else None,
        )
    return file, prepared


def streams_blocks(model_map: ModelMap) -> bool:
    """Whether calibration reads the weights block by block, each three times, instead of holding them."""
    return float_bytes(model_map) > HELD_BYTES


def batch_size(length: int) -> int:
    """Windows of this length that run at once; the first batch is run twice, since its calls are recorded."""
    return max(1, min(MOST_WINDOWS, BATCH_TOKENS // length))


def _writing_at(folder: Path, resolved: Resolved) -> contextlib.AbstractContextManager[None]:
    """Name the folder of statistics where its disk is full."""
    remedy = "free some space, or name a folder on another disk with --statistics"
    next_step = remedy if resolved.statistics else OTHER_CACHE
    return writing(folder, next_step=f"{next_step}; the same command goes on from here")


@contextlib.contextmanager
def resumable(resolved: Resolved) -> Iterator[None]:
    """Note at an interrupt that its statistics are kept, if there are any."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        folders = [resolved.statistics] if resolved.statistics else HELD
        if any(folder.is_dir() and any(folder.iterdir()) for folder in folders):
            stop.add_note("the same command goes on from the calibration that is done")
        raise


def _statistics_folder(prepared: Prepared, step: str) -> tuple[Path, Prepared]:
    """(the folder of a step's statistics, the record that removes it at the end unless it is the user's)."""
    resolved = prepared.resolved
    if resolved.statistics:
        folder = resolved.statistics / step
    else:
        folder = _cached_statistics(prepared) / step
        prepared = replace(prepared, unused=(*prepared.unused, folder))
    if not resolved.resumes:
        shutil.rmtree(folder, ignore_errors=True)
    return folder, prepared


def statistics_root(resolved: Resolved) -> Path:
    """The folder in which the statistics of a run lie, the user's or the cache's."""
    return resolved.statistics or cache_folder() / "statistics"


def _cached_statistics(prepared: Prepared) -> Path:
    """A folder of the cache for this model and these settings, locked while this process lives."""
    source, recipe = prepared.resolved.source, prepared.resolved.recipe
    place = str(source.file or source.folder or source.name)
    settings = [place, recipe.model_dump(include={"calibration", "transforms", "fit", "select", "seed"})]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    name = f"{prepared.model_map.name.replace('/', '--')}-{digest}"
    return claim(statistics_root(prepared.resolved) / name, locks=cache_folder() / "locks")
