"""From a recipe to a model that is mapped and planned, and a recipe in which nothing is left open.

Everything that can be refused is refused here, before a weight is read: a size that picks nothing, a
transform that an architecture cannot take, a budget on a model that predicts no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.evaluation.measure import read_text
from quantkit.model.architectures.latents import keep_latents
from quantkit.model.inspect import inspect_source
from quantkit.model.load import Source, open_source
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.open import open_weights, with_weights
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.export import formats_on, kind_of, require_tensors
from quantkit.pipeline.export_static import notes_of, settle
from quantkit.pipeline.min_dim import with_measured_sizes
from quantkit.pipeline.prepare import Job, planned, searches
from quantkit.plan.formats import AUTO, DEFAULT_SCHEMES, SCHEMES
from quantkit.plan.min_dim import ShapeTime
from quantkit.plan.plan import Plan
from quantkit.plan.targets import TARGETS
from quantkit.progress import Progress
from quantkit.quantization.layout import contents_of
from quantkit.quantization.transforms.smoothquant import smoothable
from quantkit.recipe import Recipe, override


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A model and the recipe with everything decided that the model decides."""

    recipe: Recipe
    source: Source
    model_map: ModelMap
    weights: TensorSource
    plan: Plan
    shape_times: tuple[ShapeTime, ...] = ()
    notes: tuple[str, ...] = ()


def open_model(recipe: Recipe, progress: Progress, *, trust_remote_code: bool = False) -> Opened:
    """Map and plan; whatever can be refused is refused here, before any work."""
    name = recipe.model or ""
    source = open_source(name, trust_remote_code=trust_remote_code)
    source = with_weights(source, random_weights=recipe.random_weights)
    model_map = inspect_source(source)
    if recipe.keep_latent:
        model_map = _with_latents(recipe, model_map, source)
    kind = kind_of(model_map)
    recipe = settle(recipe, model_map)
    if recipe.scheme == AUTO:
        recipe = override(recipe, {"scheme": DEFAULT_SCHEMES[kind]})
    if recipe.fit == AUTO:
        recipe = override(recipe, {"fit": default_fit(recipe)})
    if recipe.transforms == AUTO:
        recipe = override(recipe, default_transforms(recipe, model_map, kind))
    times: tuple[ShapeTime, ...] = ()
    notes: tuple[str, ...] = ()
    if recipe.select.min_dim == AUTO:
        recipe, times, notes = with_measured_sizes(
            recipe, model_map, progress, packs_attention=kind != "traced", generates=kind == "decoder"
        )
    plan = planned(recipe, model_map)
    if not plan.projections.quantized:
        raise InputError(
            f"no projection of {plan.projections.total} is picked at min_dim {plan.min_dim}",
            where=name,
            next_step="; ".join(notes) or f"'quantkit inspect {name}' lists their sizes; lower --min-dim",
        )
    changed = [name for name in ("transforms", "bias_correction") if getattr(recipe, name)]
    if kind == "traced" and changed:
        raise InputError(
            f"{changed[0]} changes weights, and {model_map.architecture} is traced with those it has",
            where=name,
            next_step=f"leave out {changed[0]}",
        )
    if searches(recipe) and (kind != "decoder" or recipe.random_weights):
        raise InputError(
            "a budget of perplexity or KL divergence needs a decoder with real weights",
            where=name,
            next_step="leave the budget out, and look at the similarity that the report gives",
        )
    weights = open_weights(source, model_map, random_weights=recipe.random_weights, seed=recipe.seed)
    formats = formats_on(model_map, recipe.scheme, recipe.target, recipe.layers)
    require_tensors(contents_of(model_map, plan, formats), weights, name)
    if recipe.measure.accuracy:
        read_text(recipe.measure)  # a text that cannot be read is better said now than after the work
    return Opened(
        recipe=recipe,
        source=source,
        model_map=model_map,
        weights=weights,
        plan=plan,
        shape_times=times,
        notes=(*notes, *notes_of(recipe, plan)),
    )


def _with_latents(recipe: Recipe, model_map: ModelMap, source: Source) -> ModelMap:
    """The model with what training alone runs kept as outputs."""
    if TARGETS[recipe.target].is_static:
        raise InputError(
            "static graphs have no output for latents",
            where="--keep-latent",
            next_step=f"leave it out, or --target {recipe.target}",
        )
    weights = open_weights(source, model_map, random_weights=recipe.random_weights, seed=recipe.seed)
    return keep_latents(model_map, weights)


def default_transforms(recipe: Recipe, model_map: ModelMap, kind: str) -> dict[str, Any]:
    """Outlier channels spoil the scales of whole blocks, and looking for them takes a second or two."""
    is_smoothed = kind == "decoder" and not recipe.random_weights and bool(smoothable(model_map))
    return {"transforms": ["smoothquant"], "smoothing": "quick"} if is_smoothed else {"transforms": []}


def default_fit(recipe: Recipe) -> str:
    """Plain rounding is enough for 8 bits; 4 bits, and a search that may choose them, want the best fit.

    So do static decoders: behind values of 16 bits, rounded weights are nearly all that they lose.
    """
    row = SCHEMES[recipe.scheme].body
    is_static = recipe.static.cache is not None and not recipe.random_weights
    return "rtn" if row.grid.bits >= 8 and not searches(recipe) and not is_static else "gptq"


def job_of(opened: Opened, progress: Progress, *, folder: Path | None = None, resumes: bool = True) -> Job:
    """What preparing it needs to know."""
    return Job(
        recipe=opened.recipe,
        source=opened.source,
        formats=formats_on(
            opened.model_map, opened.recipe.scheme, opened.recipe.target, opened.recipe.layers
        ),
        planned=frozenset(layer.name for layer in opened.plan.layers if layer.quantized),
        progress=progress,
        folder=folder,
        resumes=resumes,
    )
