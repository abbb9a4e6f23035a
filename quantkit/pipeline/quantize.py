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
from quantkit.evaluation.measure import environment, measure
from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.model_map import to_json
from quantkit.model.weights.open import open_weights, with_weights
from quantkit.pipeline.artifact import MANIFEST, hash_files, new_artifact
from quantkit.pipeline.export import Exported, write_companions, write_reference
from quantkit.pipeline.prepare import discard, prepare, searches, tokens_for
from quantkit.pipeline.resolve import Opened, job_of, open_model
from quantkit.pipeline.search import Sensitivity, sensitivities, units_of
from quantkit.pipeline.write import layer_losses, write, write_within_budget
from quantkit.plan.formats import DEFAULT_SCHEMES
from quantkit.plan.plan import Plan
from quantkit.plan.targets import TARGETS
from quantkit.progress import Progress
from quantkit.recipe import RECIPE_FILE, Recipe, dump_recipe
from quantkit.report.document import Report, Size, kept_projections
from quantkit.report.quantization import quantization_page, report_json
from quantkit.report.tables import to_markdown

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

    @property
    def misses_budget(self) -> bool:
        """Whether a budget was given and could not be held."""
        return self.report.search is not None and not self.report.search.holds


def run(
    recipe: Recipe,
    *,
    output: Path | None = None,
    force: bool = False,
    keeps_checkpoint: bool = False,
    trust_remote_code: bool = False,
    statistics: Path | None = None,
    resumes: bool = True,
    quiet: bool = False,
) -> Finished:
    """Quantize, export, check, measure and report; the output appears only when all of it is done."""
    progress = Progress(quiet=quiet)
    opened = open_model(recipe, progress, trust_remote_code=trust_remote_code)
    recipe = opened.recipe
    folder = output or Path(f"{opened.source.name.replace('/', '--')}-{recipe.scheme}")
    with new_artifact(folder, force=force) as partial:
        job = job_of(opened, progress, folder=statistics, resumes=resumes)
        prepared = prepare(job, opened.model_map, opened.weights)
        write_companions(opened.source, opened.model_map, partial, target_name=recipe.target)
        if searches(recipe):
            written = write_within_budget(job, prepared, opened, partial, keeps_checkpoint=keeps_checkpoint)
        else:
            written = write(job, prepared, opened, partial, recipe.layers, keeps_checkpoint=keeps_checkpoint)
        recipe = written.recipe
        text = dump_recipe(recipe)
        (partial / RECIPE_FILE).write_text(text, encoding="utf-8")
        measured = measure(written.subject, progress=progress, known=written.accuracy)
        exported = written.subject.exported
        report = Report(
            model=opened.model_map.name,
            scheme=recipe.scheme,
            target=recipe.target,
            min_dim=written.plan.min_dim,
            projections=written.plan.projections,
            matrices=written.plan.matrices,
            parameters=written.plan.parameters,
            formula=written.plan.formula,
            kept=kept_projections(written.plan),
            size=Size(
                source_bytes=opened.weights.source_bytes(),
                planned_bytes=exported.planned_bytes,
                artifact_bytes=exported.num_bytes,
                reference_bytes=measured.reference_bytes,
            ),
            environment=environment(),
            accuracy=measured.accuracy,
            similarity=measured.similarity,
            latency=measured.latency,
            memory=measured.memory,
            placement=(measured.placement,) if measured.placement else (),
            has_random_weights=recipe.random_weights,
            notes=(*opened.model_map.notes, *opened.notes, *prepared.notes, *measured.notes),
            recipe_sha256=hashlib.sha256(text.encode()).hexdigest(),
            seconds={name: round(seconds, 3) for name, seconds in progress.seconds.items()},
            fit=recipe.fit,
            transforms=tuple(recipe.transforms),
            layer_losses=layer_losses(exported.contents, written.losses, written.search),
            smoothing=prepared.smoothing,
            search=written.search,
            shape_times=opened.shape_times,
        )
        _write_reports(partial, report)
        _write_manifest(partial, written.plan, exported, recipe)
    discard(prepared)
    return Finished(folder=folder, report=report)


def sensitivity(recipe: Recipe, *, resumes: bool = True, quiet: bool = False) -> tuple[Opened, Sensitivity]:
    """The loss of every product alone, in every format that a search would try."""
    progress = Progress(quiet=quiet)
    opened = open_model(recipe, progress)
    job = job_of(opened, progress, resumes=resumes)
    prepared = prepare(job, opened.model_map, opened.weights)
    windows = tokens_for(job, prepared.model_map)
    found = sensitivities(job, prepared, units_of(prepared.model_map, opened.plan), windows)
    discard(prepared)
    return opened, found


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
        **({"static": recipe.static.model_dump()} if TARGETS[recipe.target].is_static else {}),
        "opset": exported.placement.opset,
        "ir_version": exported.placement.ir_version,
        "integer_operators": exported.placement.integer_operators,
        "plan": to_json(plan),
        "files": hash_files(folder),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
