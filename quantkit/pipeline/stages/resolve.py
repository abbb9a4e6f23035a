"""From a recipe to a mapped and planned model, and a recipe in which nothing is left open.

Everything that can be refused is refused here, before a weight is read: a size that picks nothing, a
transform that an architecture cannot take, a budget on a model that predicts no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.errors import InputError, not_one_of
from quantkit.model.architectures.latents import keep_latents
from quantkit.model.companions import PREPROCESSOR_FILE, has_preprocessor, has_tokenizer
from quantkit.model.inspect import inspect_source
from quantkit.model.load import Source, open_source
from quantkit.model.model_map import ModelMap, Role
from quantkit.model.weights.open import open_weights, with_weights
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.stages.export import kind_of, projection_formats, require_exportable, require_tensors
from quantkit.pipeline.stages.min_dim import with_measured_sizes
from quantkit.pipeline.stages.preflight import (
    require_exact_sums,
    require_padding,
    require_readable_examples,
    require_tokenizer,
)
from quantkit.pipeline.stages.static_recipe import settle_static, static_notes
from quantkit.plan.formats import AUTO, DEFAULT_SCHEMES, FLOAT, SCHEMES, scheme
from quantkit.plan.min_dim import ShapeTime
from quantkit.plan.plan import Plan
from quantkit.plan.select import check_patterns, choose
from quantkit.plan.targets import TARGETS, Target, multiplies
from quantkit.progress import Progress
from quantkit.quantization.layout import Contents, contents_of
from quantkit.quantization.projections import is_transposed, weight_name
from quantkit.quantization.rounding.kept import fits, groups_of
from quantkit.quantization.transforms import TRANSFORMS
from quantkit.quantization.transforms.smoothquant import smoothable
from quantkit.recipe import Recipe, override
from quantkit.runtime.machine.facts import read_cpu
from quantkit.workers.record import Workers

BITS_OF_CODES = 4
NO_TOKENIZER = (
    "the checkpoint has no tokenizer: the artifact reads token ids alone, and accuracy is not measured"
)


NO_PREPROCESSOR = (
    f"the checkpoint has no {PREPROCESSOR_FILE}: the artifact reads pixels alone, and accuracy is not "
    "measured"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A model, and the recipe with every choice made that the model decides."""

    recipe: Recipe
    source: Source
    kind: str  # of the export: "decoder", "encoder", "encoder_decoder" or "traced"
    model_map: ModelMap
    weights: TensorSource
    plan: Plan
    contents: Contents  # of the checkpoint, before transforms
    progress: Progress
    statistics: Path | None = None  # folder that keeps calibration statistics; None: the cache, until the end
    resumes: bool = True  # continue with the statistics of an interrupted run
    workers: Workers | None = None  # for calibration and rounding; None: this process
    shape_times: tuple[ShapeTime, ...] = ()
    notes: tuple[str, ...] = ()


def resolve(
    recipe: Recipe,
    progress: Progress,
    *,
    source: Source | None = None,
    statistics: Path | None = None,
    resumes: bool = True,
    trust_remote_code: bool = False,
) -> Resolved:
    """Map and plan the model; refuse everything that can be refused before any work."""
    name = recipe.model or ""
    source = source or open_source(name, trust_remote_code=trust_remote_code)
    source = with_weights(source, random_weights=recipe.random_weights)
    model_map = inspect_source(source)
    if recipe.keep_latent:
        model_map = _with_latents(recipe, model_map, source)
    kind = kind_of(model_map, TARGETS[recipe.target])
    require_tokenizer(source, model_map)
    require_padding(source, model_map)
    model_map = with_pooling(model_map, kind, TARGETS[recipe.target])
    weights = open_weights(source, model_map, random_weights=recipe.random_weights, seed=recipe.seed)
    recipe = for_stored_codes(recipe, model_map, weights)
    recipe = with_defaults(settle_static(recipe, model_map, kind), model_map, kind)
    shape_times: tuple[ShapeTime, ...] = ()
    notes: tuple[str, ...] = ()
    if recipe.select.min_dim == AUTO:
        recipe, shape_times, notes = with_measured_sizes(recipe, model_map, kind, progress)
    plan = plan_of(recipe, model_map)
    if not plan.projections.quantized:
        raise InputError(
            f"no projection of {plan.projections.total} is picked at min_dim {plan.min_dim}",
            where=name,
            next_step="; ".join(notes) or f"'quantkit inspect {name}' lists their sizes; lower --min-dim",
        )
    require_possible(recipe, model_map, kind)
    formats = projection_formats(model_map, recipe.scheme, recipe.target, recipe.layers)
    require_exact_sums(model_map, plan, formats, recipe.target, saturates=read_cpu().saturates)
    require_exportable(model_map, kind, recipe.target, None if recipe.random_weights else source.folder)
    contents = contents_of(model_map, plan, formats)
    require_tensors(contents, weights, name)
    reads = NO_PREPROCESSOR if model_map.picture else NO_TOKENIZER
    if source.folder and not (has_preprocessor(source) if model_map.picture else has_tokenizer(source)):
        notes = (*notes, reads)
        progress.say(f"note: {reads}")
    require_readable_examples(recipe, source, model_map)
    return Resolved(
        recipe=recipe,
        source=source,
        kind=kind,
        model_map=model_map,
        weights=weights,
        plan=plan,
        contents=contents,
        progress=progress,
        statistics=statistics,
        resumes=resumes,
        shape_times=shape_times,
        notes=(*notes, *static_notes(recipe, plan)),
    )


def with_pooling(model_map: ModelMap, kind: str, target: Target) -> ModelMap:
    """The map without the pooling of its folder, and with a note, where the graph will not have it."""
    if model_map.sentence is None or (kind == "encoder" and not target.is_static):
        return model_map
    graph = "a graph of fixed shapes" if target.is_static else f"a {kind} graph"
    note = f"pooling and normalization are left out: {graph} has outputs of tokens alone"
    return replace(model_map, sentence=None, notes=(*model_map.notes, note))


def plan_of(recipe: Recipe, model_map: ModelMap, layers: Mapping[str, str] | None = None) -> Plan:
    """The plan of a recipe; projections whose own scheme is "float" are excluded."""
    layers = recipe.layers if layers is None else layers
    check_patterns(model_map, tuple(layers), "layer")
    for scheme_name in layers.values():
        if scheme_name != FLOAT:
            scheme(scheme_name)
    assert isinstance(recipe.select.min_dim, int), "'auto' is measured before"
    left_float = [pattern for pattern, scheme_name in layers.items() if scheme_name == FLOAT]
    return choose(
        model_map,
        min_dim=recipe.select.min_dim,
        include=recipe.select.include,
        exclude=[*recipe.select.exclude, *left_float],
    )


def with_defaults(recipe: Recipe, model_map: ModelMap, kind: str) -> Recipe:
    """The recipe with scheme, fit and transforms in place of "auto"."""
    if recipe.scheme == AUTO:
        recipe = override(recipe, {"scheme": default_scheme(kind, TARGETS[recipe.target])})
    if recipe.fit == AUTO:
        recipe = override(recipe, {"fit": default_fit(recipe)})
    if recipe.transforms == AUTO:
        is_smoothed = smooths_by_default(recipe, model_map, kind)
        smoothing = {"transforms": ["smoothquant"], "smoothing": "quick"}
        recipe = override(recipe, smoothing if is_smoothed else {"transforms": []})
    return recipe


def for_stored_codes(recipe: Recipe, model_map: ModelMap, weights: TensorSource) -> Recipe:
    """The recipe with defaults that keep the 4-bit codes of a quantized original.

    A transform would change the weights, and calibration has nothing to choose.
    """
    layers = [layer for layer in model_map.at_inference.layers if layer.role is not Role.LM_HEAD]
    stored = [groups_of(weights, weight_name(layer)) for layer in layers if not is_transposed(layer)]
    found = [groups for groups in stored if groups and groups.bits == BITS_OF_CODES]
    if TARGETS[recipe.target].is_static or 2 * len(found) <= len(layers):
        return recipe
    if recipe.scheme == AUTO:
        zeros = "_zeros" if any(groups.zeros_OG is not None for groups in found) else ""
        names = (f"int4_block{block}{zeros}" for block in (128, 64, 32))
        name = next((name for name in names if all(fits(g, SCHEMES[name].body.grid) for g in found)), None)
        if name is None or not multiplies(TARGETS[recipe.target], SCHEMES[name].body):
            return recipe
        recipe = override(recipe, {"scheme": name})
    if not all(fits(groups, scheme(recipe.scheme).body.grid) for groups in found) or recipe.searches:
        return recipe
    changes = {"fit": "rtn", "transforms": []}
    return override(recipe, {key: value for key, value in changes.items() if getattr(recipe, key) == AUTO})


def default_scheme(kind: str, target: Target) -> str:
    """The scheme of this kind of export; that of decoders where the target lacks the kind's operator."""
    name = DEFAULT_SCHEMES[kind]
    return name if multiplies(target, SCHEMES[name].body) else DEFAULT_SCHEMES["decoder"]


def default_fit(recipe: Recipe) -> str:
    """Rounding to nearest is enough for 8 bits; 4 bits, and a search that may choose them, need GPTQ.

    Static decoders need it too: between 16-bit values, rounded weights are nearly all of their loss.
    """
    is_static = recipe.static.cache is not None and not recipe.random_weights
    bits = SCHEMES[recipe.scheme].body.grid.bits
    return "rtn" if bits >= 8 and not recipe.searches and not is_static else "gptq"


def smooths_by_default(recipe: Recipe, model_map: ModelMap, kind: str) -> bool:
    """Quick smoothing: outlier channels spoil the scales of whole blocks, and of whole tokens.

    An encoder's inputs take a `Mul` more for it, which buys nothing between values of 16 bits (docs/log.md).
    """
    kinds = ("decoder",) if TARGETS[recipe.target].is_static else ("decoder", "encoder", "encoder_decoder")
    return kind in kinds and not recipe.random_weights and bool(smoothable(model_map))


def require_possible(recipe: Recipe, model_map: ModelMap, kind: str) -> None:
    """Refuse options that this kind of model cannot take."""
    unknown = [name for name in recipe.transforms if name not in TRANSFORMS]
    if unknown:
        raise not_one_of(unknown[0], TRANSFORMS, where="transforms")
    changes = [name for name in ("transforms", "bias_correction") if getattr(recipe, name)]
    if kind == "traced" and changes:
        raise InputError(
            f"{changes[0]} changes weights, and {model_map.architecture} is traced with its original ones",
            where=recipe.model or "",
            next_step=f"leave out {changes[0]}",
        )
    target = TARGETS[recipe.target]
    for name in (recipe.scheme, *recipe.layers.values()):
        if name != FLOAT and not multiplies(target, scheme(name).body):
            allowed = (other for other, row in SCHEMES.items() if multiplies(target, row.body))
            raise InputError(
                f"it has no operator for products of '{name}'",
                where=f"--target {recipe.target}",
                allowed=", ".join(allowed),
                next_step="leave --scheme out, or choose another target",
            )
    if recipe.cache != "float32" and (kind != "decoder" or TARGETS[recipe.target].is_static):
        raise InputError(
            f"its cache is not one that can be {recipe.cache}",
            where=recipe.model or "",
            allowed="a decoder that is written as a fused graph",
            next_step="leave --cache out",
        )
    if recipe.searches and (kind != "decoder" or recipe.random_weights):
        raise InputError(
            "a budget of perplexity, KL divergence or size needs a decoder with real weights",
            where=recipe.model or "",
            next_step="leave the budget out, and look at the similarity that the report gives",
        )
    if recipe.budget.target_size is not None and recipe.budget.prefer == "speed":
        raise InputError(
            "a target size and a preference for speed contradict each other",
            where="--target-size",
            next_step="leave --prefer out",
        )


def _with_latents(recipe: Recipe, model_map: ModelMap, source: Source) -> ModelMap:
    """The model with the latents that training alone computes kept as outputs."""
    if TARGETS[recipe.target].is_static:
        raise InputError(
            "static graphs have no output for latents",
            where="--keep-latent",
            next_step=f"leave it out, or --target {recipe.target}",
        )
    weights = open_weights(source, model_map, random_weights=recipe.random_weights, seed=recipe.seed)
    return keep_latents(model_map, weights)
