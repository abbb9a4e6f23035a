"""The main job on one screen: a recipe in, a verified artifact and its report out.

Recipe -> weights -> map -> plan -> checkpoint -> model.onnx -> measured beside the original -> report
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import quantkit
from quantkit.artifact import MANIFEST, hash_files, new_artifact
from quantkit.errors import InputError
from quantkit.measurements import Report, Size, kept_projections
from quantkit.measuring import Subject, environment, measure, read_text
from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.weight_source import open_weights, with_weights
from quantkit.plan import choose
from quantkit.recipe import Recipe, dump_recipe, override
from quantkit.records import Plan, to_json
from quantkit.report.progress import Progress
from quantkit.report.quantization import quantization_page, report_json
from quantkit.report.tables import to_markdown
from quantkit.schemes import AUTO, DEFAULT_SCHEMES
from quantkit.stages import Exported, kind_of, write_companions, write_model, write_reference

RECIPE_FILE = "recipe.yaml"
HASHED_PACKAGES = ("quantkit-onnx", "torch", "transformers", "onnx", "onnxruntime", "numpy", "safetensors")
FLOAT_OPTIONS: dict[str, Any] = {
    "scheme_name": DEFAULT_SCHEMES["decoder"],
    "fit": "rtn",
    "target_name": "cpu",
    "single_file_bytes": 64 << 20,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A written artifact."""

    folder: Path
    report: Report


def run(
    recipe: Recipe,
    *,
    output: Path | None = None,
    force: bool = False,
    keeps_checkpoint: bool = False,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Finished:
    """Quantize, export, check, measure and report; the output appears only when all of it is done."""
    assert recipe.model is not None
    source = open_source(recipe.model, trust_remote_code=trust_remote_code)
    source = with_weights(source, random_weights=recipe.random_weights)
    model_map = inspect_source(source)
    plan = choose(
        model_map,
        min_dim=recipe.select.min_dim,
        include=recipe.select.include,
        exclude=recipe.select.exclude,
    )
    if not plan.projections.quantized:
        raise InputError(
            f"no projection of {plan.projections.total} is picked at min_dim {plan.min_dim}",
            where=recipe.model,
            next_step=f"'quantkit inspect {recipe.model}' lists their sizes; lower --min-dim",
        )
    weights = open_weights(source, model_map, random_weights=recipe.random_weights, seed=recipe.seed)
    if recipe.scheme == AUTO:
        recipe = override(recipe, {"scheme": DEFAULT_SCHEMES[kind_of(model_map)]})
    if recipe.measure.accuracy:
        read_text(recipe.measure)  # a text that cannot be read is better said now than after the work
    folder = output or Path(f"{source.name.replace('/', '--')}-{recipe.scheme}")
    progress = Progress(quiet=quiet)
    options: dict[str, Any] = {
        "scheme_name": recipe.scheme,
        "fit": recipe.fit,
        "target_name": recipe.target,
        "single_file_bytes": recipe.single_file_mb << 20,
        "original": None if recipe.random_weights else source.folder,
    }
    with new_artifact(folder, force=force) as partial:
        num_weights = sum(layer.num_weights for layer in model_map.layers)
        with progress.stage("quantize and export", total=num_weights, unit="weights") as count:
            exported = write_model(
                model_map, plan, weights, partial, keeps_checkpoint=keeps_checkpoint, count=count, **options
            )
        write_companions(source, model_map, partial)
        text = dump_recipe(recipe)
        (partial / RECIPE_FILE).write_text(text, encoding="utf-8")
        subject = Subject(
            exported=exported,
            model_map=model_map,
            source=source,
            weights=weights,
            recipe=recipe,
            options=options,
        )
        measured = measure(subject, progress=progress)
        report = Report(
            model=model_map.name,
            scheme=recipe.scheme,
            target=recipe.target,
            min_dim=plan.min_dim,
            projections=plan.projections,
            matrices=plan.matrices,
            parameters=plan.parameters,
            formula=plan.formula,
            kept=kept_projections(plan),
            size=Size(
                source_bytes=weights.source_bytes(),
                planned_bytes=exported.planned_bytes,
                artifact_bytes=exported.num_bytes,
                reference_bytes=measured.reference_bytes,
            ),
            environment=environment(),
            accuracy=measured.accuracy,
            similarity=measured.similarity,
            latency=measured.latency,
            memory=measured.memory,
            placement=(measured.placement,),
            has_random_weights=recipe.random_weights,
            notes=(*model_map.notes, *measured.notes),
            recipe_sha256=hashlib.sha256(text.encode()).hexdigest(),
            seconds={name: round(seconds, 3) for name, seconds in progress.seconds.items()},
        )
        _write_reports(partial, report)
        _write_manifest(partial, plan, exported, recipe)
    return Finished(folder=folder, report=report)


def write_float(model: str, folder: Path) -> None:
    """The original as a fused float32 graph with its tokenizer, for running beside an artifact."""
    source = with_weights(open_source(model), random_weights=False)
    model_map = inspect_source(source)
    weights = open_weights(source, model_map, random_weights=False)
    write_reference(model_map, weights, folder, original=source.folder, **FLOAT_OPTIONS)
    write_companions(source, model_map, folder)


def _write_reports(folder: Path, report: Report) -> None:
    document = report_json(report)
    (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(to_markdown(quantization_page(document)), encoding="utf-8")


def _write_manifest(folder: Path, plan: Plan, exported: Exported, recipe: Recipe) -> None:
    """What the folder holds and what made it; written last, so its presence says that the folder is whole."""
    manifest = {
        "quantkit": quantkit.__version__,
        "versions": {name: version(name) for name in HASHED_PACKAGES},
        "target": recipe.target,
        "scheme": recipe.scheme,
        "opset": exported.placement.opset,
        "ir_version": exported.placement.ir_version,
        "integer_operators": exported.placement.integer_operators,
        "plan": to_json(plan),
        "files": hash_files(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
