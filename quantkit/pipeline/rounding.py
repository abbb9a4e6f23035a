"""A prepared model rounded and exported: the one way in which a recipe or a search becomes a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.pipeline.export import Exported, write_model
from quantkit.pipeline.export_static import window_length, write_static
from quantkit.pipeline.prepare import Job, Prepared, planned, tokens_for
from quantkit.plan.targets import TARGETS
from quantkit.quantization.rounding.errors import Sums
from quantkit.recipe import override


def export_options(job: Job) -> dict[str, Any]:
    """What a file has in common with its twin in float32."""
    return {
        "scheme_name": job.recipe.scheme,
        "target_name": job.recipe.target,
        "single_file_bytes": job.recipe.single_file_mb << 20,
        "original": None if job.recipe.random_weights else job.source.folder,
    }


def round_and_export(
    job: Job,
    prepared: Prepared,
    layers: Mapping[str, str],
    folder: Path,
    *,
    keeps_checkpoint: bool = False,
    losses: dict[str, Sums] | None = None,
    count: Callable[[int], None] = lambda _: None,
) -> Exported:
    """`layers` are the schemes of their own that projections have, "float" among them."""
    recipe = override(job.recipe, {"layers": dict(layers)})
    options: dict[str, Any] = {
        "fit": recipe.fit,
        "keeps_checkpoint": keeps_checkpoint,
        "adds_biases": recipe.bias_correction,
        "evidence": prepared.evidence,
        "losses": losses,
        "count": count,
    }
    if TARGETS[recipe.target].is_static:
        return _static(job, prepared, folder, **options)
    return write_model(
        prepared.model_map,
        planned(recipe, prepared.model_map),
        prepared.weights,
        folder,
        layers=recipe.layers,
        **options,
        **export_options(job),
    )


def _static(job: Job, prepared: Prepared, folder: Path, **options: Any) -> Exported:
    """For a target of fixed shapes: values get their ranges from as many tokens as calibration reads."""
    recipe, model_map = job.recipe, prepared.model_map
    if recipe.layers:
        raise InputError("one scheme serves all of a static graph", where=f"--target {recipe.target}")
    length = window_length(recipe, model_map)
    number = -(-recipe.calibration.windows * recipe.calibration.length // length)
    return write_static(
        model_map,
        planned(recipe, model_map),
        prepared.weights,
        folder,
        windows=tokens_for(job, model_map, windows=number, length=length),
        sizes=recipe.static,
        scheme_name=recipe.scheme,
        target_name=recipe.target,
        **options,
    )
