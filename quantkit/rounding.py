"""A prepared model rounded and exported: the one way in which a recipe or a search becomes a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.preparation import Job, Prepared, planned
from quantkit.quantizers.losses import Sums
from quantkit.recipe import override
from quantkit.stages import Exported, write_model


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
    return write_model(
        prepared.model_map,
        planned(recipe, prepared.model_map),
        prepared.weights,
        folder,
        fit=recipe.fit,
        layers=recipe.layers,
        keeps_checkpoint=keeps_checkpoint,
        adds_biases=recipe.bias_correction,
        evidence=prepared.evidence,
        losses=losses,
        count=count,
        **export_options(job),
    )
