"""The main job on one screen: a recipe in, a verified artifact and its report out.

recipe -> resolved -> prepared -> written -> measured -> report
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from quantkit.errors import InputError
from quantkit.model.load import Source
from quantkit.pipeline.artifact import Artifact
from quantkit.pipeline.folder import new_artifact, require_apart, require_replaceable
from quantkit.pipeline.live_model import keep_texts, saved_model
from quantkit.pipeline.options import Options, with_options
from quantkit.pipeline.stages.documents import report_of, write_card, write_manifest, write_reports
from quantkit.pipeline.stages.export import write_companions
from quantkit.pipeline.stages.float_reference import float_twin, measure_written
from quantkit.pipeline.stages.preflight import require_space
from quantkit.pipeline.stages.prepare import discard, prepare, resumable, statistics_root
from quantkit.pipeline.stages.resolve import Resolved, resolve
from quantkit.pipeline.stages.search import require_target_size, write_within_budget
from quantkit.pipeline.stages.write import write
from quantkit.progress import Progress
from quantkit.recipe import RECIPE_FILE, Recipe, dump_recipe, load_recipe
from quantkit.workers.open import open_workers, require_engine
from quantkit.workers.record import IN_THIS_PROCESS, WorkerSettings

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Settings of a run that are no part of the recipe: they do not change the artifact."""

    output: Path | None = None  # None: MODEL-SCHEME in the working folder
    force: bool = False  # replace an older artifact
    keep_checkpoint: bool = False  # the quantized safetensors of a small model too
    trust_remote_code: bool = False
    statistics: Path | None = None  # a folder that keeps calibration statistics
    resume: bool = True  # continue with the statistics of an interrupted run
    workers: WorkerSettings = IN_THIS_PROCESS
    quiet: bool = False


def quantize(
    model: str | Path | nn.Module | None = None,
    tokenizer: Any = None,
    *,
    recipe: Recipe | str | Path | None = None,
    calibration: Sequence[str] | str | Path | None = None,
    output: str | Path | None = None,
    force: bool = False,
    keep_checkpoint: bool = False,
    trust_remote_code: bool = False,
    statistics: str | Path | None = None,
    resume: bool = True,
    workers: int | None = None,
    engine: str = "local",
    address: str | None = None,
    quiet: bool = True,
    **options: Unpack[Options],
) -> Artifact:
    """Quantize a model, export it to ONNX, check and measure it.

    Args:
        model: A folder, a well-known or Hub name, "demo", or a live transformers module, which is left as
            it is; None takes the model that the recipe names.
        tokenizer: The tokenizer of a live module; accuracy and calibration on text need it.
        recipe: A recipe or the path of a recipe file; options override it.
        calibration: Texts, or the path of a text file or of token ids in .npy.
        output: The artifact folder; MODEL-SCHEME in the working folder if not given.
        force: Replace an older artifact.
        keep_checkpoint: Keep the quantized safetensors of a small model too.
        trust_remote_code: Run code that ships with the checkpoint.
        statistics: A folder that keeps calibration statistics for other runs.
        resume: Continue with the statistics of an interrupted run.
        workers: Processes of one thread that calibrate and round; None computes in this process.
        engine: "local" or "ray", which starts the workers.
        address: HOST:PORT of a Ray cluster, or "auto"; None starts Ray on this machine.
        quiet: Write no progress to stderr.
        **options: Keys of the recipe, see `Options`; None leaves a key as it is.

    Returns:
        The artifact, open for generation, evaluation and benchmarks; `artifact.report` holds the results.

    Raises:
        InputError: The model, the recipe or an option is wrong; nothing is left behind.

    >>> artifact = quantize("demo", output=tmp_path / "demo", accuracy=False, latency=False, memory=False)
    >>> artifact.report.projections.quantized
    37
    """
    base = recipe_of(recipe)
    if isinstance(calibration, (str, Path)):
        options["calibration_text"] = str(calibration)
    elif calibration is not None:
        options["calibration_text"] = str(keep_texts(calibration))
    settings = Run(
        output=Path(output) if output else None,
        force=force,
        keep_checkpoint=keep_checkpoint,
        trust_remote_code=trust_remote_code,
        statistics=Path(statistics) if statistics else None,
        resume=resume,
        workers=WorkerSettings(number=workers, engine=engine, address=address),
        quiet=quiet,
    )
    recipe = with_options(base, options)
    if model is None or isinstance(model, (str, Path)):
        return run(recipe.model_copy(update={"model": str(model)}) if model else recipe, settings)
    with saved_model(model, tokenizer) as (source, name):
        return run(recipe.model_copy(update={"model": name}), settings, source=source)


def recipe_of(recipe: Recipe | str | Path | None) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(Path(recipe)) if recipe else Recipe()


def run(
    recipe: Recipe, settings: Run, *, source: Source | None = None, progress: Progress | None = None
) -> Artifact:
    """The stages; the output appears when all of them are done."""
    require_engine(settings.workers)
    progress = progress or Progress(quiet=settings.quiet)
    resolved, output = resolved_run(recipe, settings, progress, source=source)
    with new_artifact(output, force=settings.force) as folder, resumable(resolved):
        write_companions(resolved.source, resolved.model_map, folder, target_name=resolved.recipe.target)
        folders = replace(
            settings.workers, read=_read_by_workers(resolved), written=(statistics_root(resolved),)
        )
        with open_workers(folders) as workers:
            prepared = prepare(replace(resolved, workers=workers))
            if resolved.recipe.searches:
                written = write_within_budget(prepared, folder, keeps_checkpoint=settings.keep_checkpoint)
            else:
                layers = resolved.recipe.layers
                written = write(prepared, folder, layers, keeps_checkpoint=settings.keep_checkpoint)
        (folder / RECIPE_FILE).write_text(dump_recipe(written.recipe), encoding="utf-8")
        with float_twin(written, folder) as twin:
            measured = measure_written(written, folder, twin)
        report = report_of(written, measured, twin)
        write_reports(folder, report)
        write_card(folder, report, written)
        write_manifest(folder, written, report.files)
    discard(prepared)
    return Artifact(output, report=report, check="none")


def _read_by_workers(resolved: Resolved) -> tuple[Path, ...]:
    path = resolved.source.file or resolved.source.folder  # a GGUF file's folder is of this process alone
    return (path,) if path else ()


def resolved_run(
    recipe: Recipe, settings: Run, progress: Progress, *, source: Source | None = None
) -> tuple[Resolved, Path]:
    """(the model mapped and planned, the output); everything is refused here that can be before the work."""
    if recipe.model is None and source is None:
        raise InputError(
            "no model was named",
            where="quantize",
            allowed="a folder, 'demo', a well-known name, a Hub name, or a recipe with the key 'model'",
            next_step="'quantkit quantize demo' tries it on the embedded model",
        )
    if settings.output:
        check_output(settings.output, recipe, settings)
    resolved = resolve(
        recipe,
        progress,
        source=source,
        statistics=settings.statistics,
        resumes=settings.resume,
        trust_remote_code=settings.trust_remote_code,
    )
    output = settings.output
    if output is None:
        output = Path(f"{resolved.source.name.replace('/', '--')}-{resolved.recipe.scheme}")
        check_output(output, recipe, settings)
    require_space(resolved, output)
    require_target_size(resolved)
    return resolved, output


def check_output(output: Path, recipe: Recipe, settings: Run) -> None:
    """Refuse, before any work, an output that cannot be written or that would replace an input."""
    inputs = {
        "the model": recipe.model,
        "the calibration text": recipe.calibration.text,
        "the text": recipe.measure.text,
        "--statistics": settings.statistics,
    }
    require_apart(output, inputs)
    require_replaceable(output, force=settings.force)
    if settings.statistics and settings.statistics.exists() and not settings.statistics.is_dir():
        raise InputError("not a folder", where=f"--statistics {settings.statistics}")
