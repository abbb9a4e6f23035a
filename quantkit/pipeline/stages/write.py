"""A prepared model rounded and exported: the one way in which a recipe or a search becomes a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quantkit.errors import InputError
from quantkit.evaluation.measurements import Accuracy
from quantkit.export.fused.int8_cache import CACHE_FORMATS, CachePeaks, rewrite, widen
from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights, with_weights
from quantkit.pipeline.stages.calibration_text import calibration_windows
from quantkit.pipeline.stages.export import (
    NOTHING,
    Exported,
    ExportJob,
    export_dynamic,
    export_float,
    write_companions,
)
from quantkit.pipeline.stages.export_static import export_static
from quantkit.pipeline.stages.prepare import Prepared
from quantkit.pipeline.stages.resolve import Resolved, plan_of
from quantkit.pipeline.stages.static_recipe import window_length
from quantkit.plan.formats import DEFAULT_SCHEMES
from quantkit.plan.plan import Plan
from quantkit.plan.select import choose
from quantkit.plan.targets import TARGETS
from quantkit.quantization.layout import Contents
from quantkit.quantization.rounding.errors import LayerLoss, Sums
from quantkit.quantization.search import SearchResult
from quantkit.recipe import Recipe, override
from quantkit.runtime.decoder import cached_values, open_decoder

FLOAT_TARGET, FLOAT_SCHEME = "openvino", "int8_channel"  # fixed shapes, floats between operators
CACHE_WINDOWS = 8  # of calibration text; cache ranges settle soon, as every position counts
Layers = Mapping[str, str]  # pattern -> a scheme of its own, or "float"


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Files that run, and the recipe that makes them again."""

    prepared: Prepared
    recipe: Recipe
    plan: Plan
    exported: Exported
    search: SearchResult | None = None
    accuracy: Accuracy | None = None  # of a search's verdict, on the text of the final measurement


def write(prepared: Prepared, folder: Path, layers: Layers, *, keeps_checkpoint: bool = False) -> Written:
    """Round and export with progress, then quantize the KV cache as the recipe says."""
    resolved = prepared.resolved
    num_weights = sum(layer.num_weights for layer in prepared.model_map.at_inference.layers)
    with resolved.progress.stage("quantize and export", total=num_weights, unit="weights") as count:
        job = export_job(prepared, layers, keeps_checkpoint=keeps_checkpoint)
        exported = export(job, folder, count=count)
    quantize_cache(resolved, prepared, exported)
    recipe = override(resolved.recipe, {"layers": dict(layers)})
    return Written(prepared=prepared, recipe=recipe, plan=job.plan, exported=exported)


def export(job: ExportJob, folder: Path, *, count: Callable[[int], None] = lambda _: None) -> Exported:
    return (export_static if job.profile.is_static else export_dynamic)(job, folder, count=count)


def export_job(prepared: Prepared, layers: Layers, *, keeps_checkpoint: bool = False) -> ExportJob:
    """The export of a prepared model, with schemes of their own for some projections."""
    resolved, recipe = prepared.resolved, prepared.resolved.recipe
    job = ExportJob(
        model_map=prepared.model_map,
        plan=prepared.plan if layers == recipe.layers else plan_of(recipe, prepared.model_map, layers),
        weights=prepared.weights,
        scheme=recipe.scheme,
        target=recipe.target,
        fit=recipe.fit,
        layers=layers,
        adds_biases=recipe.bias_correction,
        statistics=prepared.statistics,
        original=None if recipe.random_weights else resolved.source.folder,
        single_file_bytes=recipe.single_file_mb << 20,
        keeps_checkpoint=keeps_checkpoint,
        static=recipe.static,
        workers=resolved.workers,
    )
    if not TARGETS[recipe.target].is_static:
        return job
    if layers:
        raise InputError("a static graph has one scheme", where=f"--target {recipe.target}")
    length = window_length(recipe, resolved.kind)
    number = -(-recipe.calibration.windows * recipe.calibration.length // length)
    windows_NT = calibration_windows(
        recipe, resolved.source, prepared.model_map, windows=number, length=length
    )
    return replace(job, windows_NT=windows_NT)


def write_float(
    resolved: Resolved, folder: Path, *, count: Callable[[int], None] = lambda _: None
) -> Exported:
    """The original model as the same graph in float32."""
    job = ExportJob(
        model_map=resolved.model_map,
        plan=resolved.plan,
        weights=resolved.weights,
        scheme=resolved.recipe.scheme,
        original=None if resolved.recipe.random_weights else resolved.source.folder,
        single_file_bytes=resolved.recipe.single_file_mb << 20,
    )
    return export_float(job, folder, count=count)


def write_float_static(written: Written, folder: Path) -> Exported:
    """The original model as float graphs of the artifact's fixed shapes."""
    resolved = written.prepared.resolved
    job = ExportJob(
        model_map=resolved.model_map,
        plan=choose(resolved.model_map, min_dim=NOTHING),
        weights=resolved.weights,
        scheme=FLOAT_SCHEME,
        target=FLOAT_TARGET,
        static=written.recipe.static,
        windows_NT=np.empty((0, 0), np.int64),  # floats need no ranges
    )
    return export_static(job, folder)


def write_float_model(model: str, folder: Path, *, random_weights: bool = False) -> None:
    """The original as a fused float32 graph with its tokenizer, to be run like an artifact."""
    source = with_weights(open_source(model), random_weights=random_weights)
    model_map = inspect_source(source)
    job = ExportJob(
        model_map=model_map,
        plan=choose(model_map),
        weights=open_weights(source, model_map, random_weights=random_weights),
        scheme=DEFAULT_SCHEMES["decoder"],
        original=None if random_weights else source.folder,
    )
    export_float(job, folder)
    write_companions(source, model_map, folder)


def quantize_cache(resolved: Resolved, prepared: Prepared, exported: Exported) -> None:
    """Rewrite the exported graph with an integer KV cache, if the recipe says so.

    The ranges are those of the keys and values that the exported graph itself computes on calibration text,
    so rounding of weights and inputs is included.
    """
    name, model_map = resolved.recipe.cache, prepared.model_map
    if CACHE_FORMATS[name].bits is None:
        return
    windows_NT = calibration_windows(resolved.recipe, resolved.source, model_map)[:CACHE_WINDOWS]
    peaks: dict[str, CachePeaks] = {}
    decoder = open_decoder(exported.folder)
    with resolved.progress.stage("ranges of the cache", total=int(windows_NT.size), unit="tokens") as count:
        for window_T in windows_NT:
            values = cached_values(decoder, window_T[None])
            for number, block in enumerate(model_map.blocks):
                peaks[block.name] = widen(
                    peaks.get(block.name),
                    values[2 * number],
                    values[2 * number + 1],
                    where=block.name,
                    rotary_dim=block.attentions[0].rotary_dim,
                    is_interleaved=block.attentions[0].rope_interleaved,
                )
            count(window_T.size)
    del decoder
    rewrite(exported.paths[0], [peaks[block.name] for block in model_map.blocks], cache_format=name)


def layer_losses(
    contents: Contents, losses: Mapping[str, Sums], search: SearchResult | None
) -> tuple[LayerLoss, ...]:
    """The rounding error of each pack, in the order of the model; with a search, its KL divergence too."""
    units = {unit.name: unit for unit in search.units} if search else {}
    chosen = dict(search.chosen.choices) if search else {}
    layer_losses = []
    for pack in contents.packs:
        if pack.name not in losses or pack.format is None:
            continue
        sums, unit = losses[pack.name], units.get(pack.name)
        options = unit.options if unit else ()
        alone = [option.loss for option in options if option.format == chosen.get(pack.name)]
        layer_losses.append(
            LayerLoss(
                name=pack.name,
                layers=tuple(layer.name for layer in pack.layers),
                format=pack.format.described,
                weight_error=sums.weights.error,
                plain_weight_error=sums.weights.plain_error,
                output_error=sums.outputs.error if sums.outputs.values else None,
                plain_output_error=sums.outputs.plain_error if sums.outputs.values else None,
                plain_share=sums.num_plain / sums.num_rows,
                kl_divergence=alone[0] if alone else None,
            )
        )
    return tuple(layer_losses)
