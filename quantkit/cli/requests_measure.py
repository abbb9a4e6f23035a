"""What `quantkit eval`, `bench` and `compare` print: artifacts measured again, or reports side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import TextPerplexity
from quantkit.report.comparison import Side, comparison_json, comparison_page
from quantkit.report.tables import Page, print_page, to_markdown

if TYPE_CHECKING:
    from quantkit.evaluation.artifact import Opened
    from quantkit.runtime.providers.trial import Asked

FORMATS = ("table", "markdown", "json")
COMPARED = ("model", "scheme", "target", "size", "environment")  # what a report cannot be compared without


def evaluate(
    *,
    folder: Path,
    reference: str | None,
    changes: Mapping[str, Any],
    as_json: bool,
) -> str:
    """The text that `quantkit eval` prints; empty when a table went to the terminal already."""
    from quantkit.evaluation.artifact import open_artifact, require_room
    from quantkit.evaluation.evaluate import evaluate as evaluate_artifact
    from quantkit.evaluation.measure import environment
    from quantkit.progress import Progress
    from quantkit.report.reruns import evaluation_json, evaluation_page

    opened = open_artifact(folder, changes)
    require_room(opened, {"--window": changes.get("measure.window")})
    made = evaluate_artifact(opened, reference=reference, progress=Progress())
    alone = made.result if isinstance(made.result, TextPerplexity) else None
    document = evaluation_json(
        artifact=opened.described,
        accuracy=alone.perplexity if alone else made.result,  # type: ignore[arg-type]
        protocol={key: getattr(alone, key) for key in ("text", "num_tokens", "window", "stride")}
        if alone
        else {},
        is_meaningful=not opened.recipe.random_weights,
        reference=made.reference,
        environment=environment(),
        notes=made.notes,
    )
    if as_json:
        return json.dumps(document, indent=2)
    print_page(evaluation_page(document))
    return ""


def benchmark(
    *,
    folder: Path,
    changes: Mapping[str, Any],
    providers: Sequence[str],
    strict: bool,
    time_limit: float,
    as_json: bool,
) -> tuple[str, bool]:
    """(text that `bench` prints, empty when a table went to the terminal; whether `--strict` holds)."""
    from quantkit.evaluation.artifact import open_artifact, require_room
    from quantkit.runtime.providers.trial import read_asked

    asked = read_asked(providers)
    if time_limit <= 0:
        raise InputError(f"{time_limit:g} seconds", where="--time-limit", allowed="more than 0")
    opened = open_artifact(folder, changes)
    require_room(opened, {f"--{name}": changes.get(f"measure.{name}") for name in ("prompt", "decode")})
    document, page, holds = (
        _on_providers(opened, asked, strict=strict, time_limit=time_limit) if asked else _alone(opened)
    )
    if as_json:
        return json.dumps(document, indent=2), holds
    print_page(page)
    return "", holds


def _alone(opened: Opened) -> tuple[dict[str, Any], Page, bool]:
    from quantkit.evaluation.benchmark import benchmark as time_artifact
    from quantkit.evaluation.measure import environment
    from quantkit.progress import Progress
    from quantkit.report.reruns import benchmark_json, benchmark_page

    made = time_artifact(opened, progress=Progress())
    document = benchmark_json(
        artifact=opened.described,
        size_bytes=opened.size_bytes,
        latency=made.latency,
        memory=made.memory,
        environment=environment(),
        notes=made.notes,
    )
    return document, benchmark_page(document), True


def _on_providers(
    opened: Opened, asked: Sequence[Asked], *, strict: bool, time_limit: float
) -> tuple[dict[str, Any], Page, bool]:
    from quantkit.evaluation.benchmark import benchmark_providers, fell_back
    from quantkit.evaluation.measure import environment
    from quantkit.progress import Progress
    from quantkit.report.providers import providers_json, providers_page

    runs, notes = benchmark_providers(opened, asked, time_limit=time_limit, progress=Progress())
    document = providers_json(
        artifact=opened.described,
        runs=runs,
        threads=opened.threads,
        environment=environment(),
        strict=strict,
        notes=notes,
    )
    return document, providers_page(document), not (strict and any(fell_back(run) for run in runs))


def health(*, as_json: bool) -> tuple[str, bool]:
    """(text that `quantkit doctor` prints, whether it found no problem)."""
    from quantkit.model.model_map import to_json
    from quantkit.report.health import health_page
    from quantkit.runtime.machine.facts import diagnose

    diagnosis = diagnose()
    document: dict[str, Any] = to_json(diagnosis)
    if as_json:
        return json.dumps(document, indent=2), not diagnosis.has_problem
    print_page(health_page(document))
    return "", not diagnosis.has_problem


def compare(*, folders: Sequence[Path], output_format: str) -> str:
    """The text that `quantkit compare` prints; empty when a table went to the terminal already."""
    if output_format not in FORMATS:
        raise InputError(f"'{output_format}'", where="--format", allowed=", ".join(FORMATS))
    if len(folders) < 2:
        raise InputError("one artifact has nothing beside it", where="compare", allowed="two folders or more")
    document = comparison_json([_side(folder) for folder in folders])
    if output_format == "json":
        return json.dumps(document, indent=2)
    page = comparison_page(document)
    if output_format == "markdown":
        return to_markdown(page)
    print_page(page)
    return ""


def _side(folder: Path) -> Side:
    """An artifact's report as it was written, and which tokenizer its figures were taken with."""
    path, tokenizer = folder / "report.json", folder / "tokenizer.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in COMPARED if key not in report] if isinstance(report, dict) else COMPARED
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else None
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})",
            where=error.filename or str(path),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        ) from error
    except ValueError as error:
        raise InputError(
            f"not JSON ({error})", where=str(path), next_step="quantize again to write it anew"
        ) from error
    if missing:
        raise InputError(
            f"not a report: {', '.join(missing)} missing",
            where=str(path),
            next_step="quantize again to write it anew",
        )
    return Side(name=str(folder), report=report, tokenizer=digest)
