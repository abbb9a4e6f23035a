"""Before weights are rounded: what calibration saw, and a model changed so that rounding costs it less.

Transforms come first, in the recipe's order, each calibrated on the model that the ones before it left; then
the changed model is calibrated once more for what the fit and the formats want. Nothing is run that nobody
asked for: plain rounding with ranges found at run time needs no calibration at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.model.load import Source
from quantkit.model.model_map import Layer, ModelMap
from quantkit.model.weights.open import make_fast_tokenizer
from quantkit.model.weights.tensors import TensorSource
from quantkit.model.weights.torch_model import torch_model
from quantkit.pipeline.artifact import claim
from quantkit.plan.formats import AUTO, FLOAT, Format, scheme
from quantkit.plan.plan import Plan
from quantkit.plan.select import check_patterns, choose
from quantkit.progress import Progress
from quantkit.quantization.calibration import (
    StatisticsFile,
    calibration_tokens,
    collect,
    context_length,
    quick_peaks,
)
from quantkit.quantization.calibration.output_weights import weigh, weighed, with_gradients
from quantkit.quantization.grid import decode_all
from quantkit.quantization.layout import Evidence
from quantkit.quantization.rounding import QUANTIZERS
from quantkit.quantization.rounding.apply import Evidences
from quantkit.quantization.rounding.rtn import round_to_nearest
from quantkit.quantization.simulate import rounding_of
from quantkit.quantization.transforms import TRANSFORMS, Transform
from quantkit.quantization.transforms.alpha import Smoothing, search_alpha
from quantkit.quantization.transforms.smoothquant import Rule, smoothable
from quantkit.quantization.transforms.spaces import spaces_of
from quantkit.recipe import Recipe
from quantkit.runtime.machine.throughput import cache_folder
from quantkit.runtime.tokenizer import TOKENIZER_FILE, open_text

Ints = NDArray[np.int64]
SEARCHED_ROWS = 256  # of a space's input, for the strength of smoothing
BATCH = 4  # windows that run at once
QUICK_WINDOWS, QUICK_LENGTH = 2, 128  # of the pass that only looks for outliers


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A model ready to be rounded."""

    model_map: ModelMap
    weights: TensorSource
    evidence: Evidences = lambda _: None
    smoothing: tuple[Smoothing, ...] = ()
    notes: tuple[str, ...] = ()
    key: str = ""  # of the weights and of all that was seen
    unused: tuple[Path, ...] = ()  # statistics that nobody asked to keep


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What preparing needs to know."""

    recipe: Recipe
    source: Source
    formats: Mapping[str, Format]  # of every projection
    planned: frozenset[str]
    progress: Progress
    folder: Path | None = None  # where statistics are kept; without one in the cache, until the work is done
    resumes: bool = True


def searches(recipe: Recipe) -> bool:
    """Whether a budget was given; some of the calibration text is then left for measuring."""
    return recipe.budget.max_ppl_increase is not None or recipe.budget.max_kl is not None


def planned(recipe: Recipe, model_map: ModelMap) -> Plan:
    """The plan of a recipe; what it leaves in float is excluded."""
    own = recipe.layers
    check_patterns(model_map, tuple(own), "layer")
    for name in own.values():
        if name != FLOAT:
            scheme(name)
    assert isinstance(recipe.select.min_dim, int), "'auto' is measured before"
    return choose(
        model_map,
        min_dim=recipe.select.min_dim,
        include=recipe.select.include,
        exclude=[*recipe.select.exclude, *(each for each, name in own.items() if name == FLOAT)],
    )


def prepare(job: Job, model_map: ModelMap, weights: TensorSource) -> Prepared:
    """Transform, then collect what rounding wants."""
    assert job.recipe.transforms != AUTO, "decided when the model was opened"
    unknown = [name for name in job.recipe.transforms if name not in TRANSFORMS]
    if unknown:
        raise InputError(f"'{unknown[0]}'", where="transforms", allowed=", ".join(TRANSFORMS))
    made = Prepared(model_map=model_map, weights=weights)
    for number, name in enumerate(job.recipe.transforms):
        made = _transform(job, made, name, TRANSFORMS[name], number)
    wanted = wants_of(job, model_map)
    if not wanted:
        return made
    seen = _calibrate(job, made, wanted, f"{len(job.recipe.transforms)}-fit")
    notes = [
        f"calibration never reached '{name}': it is rounded plainly"
        for name in seen.unreached
        if any(name == layer.matrix for layer in model_map.layers)
    ]
    made = replace(
        made,
        evidence=lambda layer: _read(seen, layer),
        notes=(*made.notes, *notes),
        key=seen.key,
        unused=(*made.unused, *([] if job.folder else [seen.folder])),
    )
    return _with_gradients(job, made)


def _with_gradients(job: Job, made: Prepared) -> Prepared:
    """What rounding errors of outputs do to predictions, where the fit makes use of it."""
    model_map = made.model_map
    layers = weighed(job.recipe, job.planned, model_map)
    if not layers:
        return made
    folder = _statistics_folder(job, made, f"{len(job.recipe.transforms)}-gradients")
    if not job.resumes:
        shutil.rmtree(folder, ignore_errors=True)
    tokens = _statistic_tokens(job, model_map)
    found = weigh(
        job.source,
        model_map,
        made.weights,
        layers,
        tokens,
        recipe=job.recipe,
        folder=folder,
        progress=job.progress,
    )
    made = replace(made, unused=(*made.unused, *([] if job.folder else [folder])))
    if isinstance(found, str):
        return replace(made, notes=(*made.notes, f"GPTQ weighs all outputs the same: {found}"))
    return replace(made, evidence=with_gradients(made.evidence, found), key=f"{made.key} {found.key}")


def discard(prepared: Prepared) -> None:
    """Remove statistics that nobody asked to keep."""
    for folder in prepared.unused:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others of this model may lie beside it
            folder.parent.rmdir()


def wants_of(job: Job, model_map: ModelMap) -> dict[str, frozenset[str]]:
    """The statistics that each planned matrix needs; those that need none are left out."""
    wanted: dict[str, frozenset[str]] = {}
    for layer in model_map.layers:
        if layer.name not in job.planned:
            continue
        wants = QUANTIZERS[job.recipe.fit].wants
        if job.formats[layer.name].is_static:
            wants |= {"range", "histogram"}
        if job.recipe.bias_correction:
            wants |= {"mean"}
        if wants:
            wanted[layer.matrix] = wanted.get(layer.matrix, frozenset()) | wants
    return wanted


def _read(seen: StatisticsFile, layer: Layer) -> Evidence | None:
    if layer.matrix not in seen.wanted or layer.matrix in seen.unreached:
        return None
    return seen.read(layer.matrix)


def _transform(job: Job, made: Prepared, name: str, row: Transform, number: int) -> Prepared:
    options: dict[str, Any] = {"seed": job.recipe.seed, "unties_head": job.recipe.unties_head}
    found: tuple[Smoothing, ...] = ()
    unused, notes = made.unused, made.notes
    if name == "smoothquant" and job.recipe.smoothing == "quick":
        options["statistics"], notes = _quick_statistics(job, made)
    elif row.needs:
        matrices = {layer.matrix for layer in made.model_map.layers if layer.name in job.planned}
        wanted = dict.fromkeys(matrices, frozenset({*row.needs, "sample"}))
        seen = _calibrate(job, made, wanted, f"{number}-{name}")
        unused = (*unused, *([] if job.folder else [seen.folder]))
        options |= _strengths(job, made, name, row, seen)
        found = options.pop("found")
    with job.progress.stage(name):
        model_map, weights = row.apply(made.model_map, made.weights, **options)
    return replace(
        made,
        model_map=model_map,
        weights=weights,
        smoothing=(*made.smoothing, *found),
        unused=unused,
        notes=notes,
    )


def _quick_statistics(job: Job, made: Prepared) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """(peaks of one pass over a few windows, notes); one block's weights are in memory at a time."""
    model_map, notes = made.model_map, made.notes
    context = context_length(model_map) or QUICK_LENGTH
    size = {"windows": QUICK_WINDOWS, "length": min(QUICK_LENGTH, context)}
    try:
        tokens = tokens_for(job, model_map, **size)
    except InputError as error:
        if job.recipe.calibration.text:
            raise
        tokens = random_tokens(job, model_map, **size)
        notes = (*notes, f"outliers were looked for on random tokens: {error}")
    matrices = {layer.matrix for layer in model_map.layers if layer.name in job.planned}
    with job.progress.stage("outliers", total=int(tokens.size), unit="tokens") as count:
        module = torch_model(job.source, model_map, made.weights, streams=True)
        peaks = quick_peaks(module, model_map, tokens, matrices)
        count(int(tokens.size))
    return dict(peaks), notes


def _strengths(job: Job, made: Prepared, name: str, row: Transform, seen: StatisticsFile) -> dict[str, Any]:
    """How strongly to smooth each space, by the error of what its readers give."""
    (need,) = row.needs
    rule: Rule = "awq" if name == "awq" else "smoothquant"
    evidence = {matrix: seen.read(matrix) for matrix in seen.wanted if matrix not in seen.unreached}
    field = {"peak": "peak_I", "mean_magnitude": "mean_magnitude_I"}[need]
    statistics = {matrix: getattr(each, field) for matrix, each in evidence.items()}
    names = set(smoothable(made.model_map, unties_head=job.recipe.unties_head))
    spaces = [space for space in spaces_of(made.model_map) if space.name in names]
    layers = {layer.name: layer for layer in made.model_map.layers}
    found = []
    with job.progress.stage(f"{name}: strengths", total=len(spaces), unit="spaces") as count:
        for space in spaces:
            readers = [layers[each] for each in space.readers if each in job.planned]
            sample = (
                evidence[readers[0].matrix].sample_TI if readers and readers[0].matrix in evidence else None
            )
            if readers and sample is not None and len(readers) == len(space.readers):
                choice = search_alpha(
                    made.model_map,
                    made.weights,
                    space,
                    sample_TI=sample[:SEARCHED_ROWS],
                    statistics=statistics,
                    rule=rule,
                    round_inputs=_rounding_inputs(job.formats[readers[0].name], readers[0]),
                    round_weights=_rounding_weights(job.formats[readers[0].name]),
                )
                if choice:
                    found.append(
                        Smoothing(
                            space=space.name,
                            transform=name,
                            alpha=choice.alpha,
                            error=choice.error,
                            plain_error=choice.plain_error,
                        )
                    )
            count(1)
    alphas = {each.space: each.alpha for each in found}
    return {"statistics": statistics, "alpha": alphas, "found": tuple(found)}


def _rounding_inputs(chosen: Format, reader: Layer) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """What the runtime will do to the space's values."""
    if chosen.is_static:  # the range moves with the scales, so it is taken from the scaled sample itself
        chosen = replace(chosen, activations="tensor")
    rounding = rounding_of(chosen, reader.role, None)

    def round_inputs(x_TI: NDArray[Any]) -> NDArray[Any]:
        rounded: NDArray[Any] = rounding(torch.from_numpy(np.ascontiguousarray(x_TI))).numpy()
        return rounded

    return round_inputs


def _rounding_weights(chosen: Format) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """What plain rounding will do to the readers' weights."""

    def round_weights(rows_OI: NDArray[Any]) -> NDArray[Any]:
        rows = np.asarray(rows_OI, np.float32)
        return decode_all(round_to_nearest(rows, chosen.grid), rows.shape[1])

    return round_weights


def _calibrate(job: Job, made: Prepared, wanted: Mapping[str, frozenset[str]], step: str) -> StatisticsFile:
    """Run the text through the model as it is now, or take what an interrupted run has left."""
    tokens = _statistic_tokens(job, made.model_map)
    folder = _statistics_folder(job, made, step)
    if not job.resumes:
        shutil.rmtree(folder, ignore_errors=True)
    with job.progress.stage("calibration", total=int(tokens.size), unit="tokens") as count:
        module = torch_model(job.source, made.model_map, made.weights)
        blocks = [block.name for block in made.model_map.blocks]
        return collect(
            module,
            tokens,
            wanted=wanted,
            blocks=blocks,
            folder=folder,
            batch=BATCH,
            seed=job.recipe.calibration.seed,
            progress=count,
        )


def _statistic_tokens(job: Job, model_map: ModelMap) -> Ints:
    """The calibration windows without those that a search measures on."""
    tokens = tokens_for(job, model_map)
    left_out = held_back(len(tokens)) if searches(job.recipe) else job.recipe.calibration.leave_out
    return tokens[: max(1, len(tokens) - left_out)]


def _statistics_folder(job: Job, made: Prepared, step: str) -> Path:
    if job.folder:
        return job.folder / step
    place = str(job.source.folder) if job.source.folder else job.source.name
    settings = [place, job.recipe.model_dump(include={"calibration", "transforms", "fit", "select", "seed"})]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    name = f"{made.model_map.name.replace('/', '--')}-{digest}"
    return claim(cache_folder() / "statistics" / name, locks=cache_folder() / "locks") / step


def held_back(num_windows: int) -> int:
    """Windows of the calibration text that statistics do not see when a search needs them."""
    if num_windows < 2:
        raise InputError(
            "one calibration window is all there is",
            where="calibration",
            allowed="two or more when a budget is searched: one part to collect on, one to measure on",
            next_step="give a longer text, or ask for shorter windows",
        )
    return max(1, num_windows // 4)


def tokens_for(
    job: Job, model_map: ModelMap, *, windows: int | None = None, length: int | None = None
) -> Ints:
    """The calibration windows; random ids for random weights, which no text fits."""
    wanted = job.recipe.calibration
    context = context_length(model_map)
    length = length or wanted.length
    length = length if context is None else min(length, context)
    windows = windows or wanted.windows
    vocab_size = model_map.vocab_size or 0
    if job.recipe.random_weights:
        return random_tokens(job, model_map, windows=windows, length=length)
    with tempfile.TemporaryDirectory(prefix="quantkit-") as made:
        return calibration_tokens(
            encode=_encoder(job.source, Path(made)),
            vocab_size=vocab_size,
            source=Path(wanted.text).expanduser() if wanted.text else None,
            num_windows=windows,
            length=length,
            context=context,
            seed=wanted.seed,
        )


def random_tokens(job: Job, model_map: ModelMap, *, windows: int, length: int) -> Ints:
    """Ids of no text."""
    chances = np.random.default_rng(job.recipe.calibration.seed)
    return chances.integers(0, model_map.vocab_size or 1, (windows, length))


def _encoder(source: Source, made: Path) -> Callable[[str], list[int]]:
    """The checkpoint's tokenizer; asked for only when a text must be encoded."""

    def encode(text: str) -> list[int]:
        folder = source.folder
        if folder is None or not (folder / TOKENIZER_FILE).exists():
            if not make_fast_tokenizer(source, made):
                raise InputError(
                    "the checkpoint brings no tokenizer, so no text can be read",
                    where=source.name,
                    allowed="token ids in a .npy file",
                    next_step="--calibration-text IDS.npy",
                )
            folder = made
        return open_text(folder).encode(text)

    return encode
