"""The page of `quantkit compare`: reports of several artifacts side by side, with ratios to the first.

A ratio needs two figures of one protocol: perplexity on one text with equal tokens and windows, KL divergence
from one original, times on one machine with equal lengths and threads. A figure of another protocol is shown
in parentheses without a ratio, and a line names the difference. A figure that a report lacks is "-" in the
table and absent from the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.report.figures import figures, megabytes
from quantkit.report.losses import scheme_text
from quantkit.report.tables import Json, Page, Table

PACKAGES = ("onnxruntime",)  # packages whose version decides speed and, by kernels, accuracy
LARGEST_DRIFT = 0.10  # of the float reference's time between two runs; beyond it a warning is shown
# Paths in a report that two comparable figures agree in.
PROTOCOL = tuple(f"accuracy.protocol.{key}" for key in ("text", "num_tokens", "window", "stride"))
TEXT = (*PROTOCOL, "accuracy.is_meaningful", "tokenizer")
SIMILARITY = ("model", *(f"similarity.{key}" for key in ("text", "num_windows", "window", "is_meaningful")))
MACHINE = (
    *(f"environment.{key}" for key in ("processor", "num_cores")),
    *(f"latency.0.{key}" for key in ("provider", "threads", "batch", "prompt_length")),
)
DECODING = (*MACHINE, "latency.0.num_decoded")


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A column: the path of the figure in a report, its text, and the conditions of a ratio."""

    title: str
    path: str
    show: Callable[[float], str]
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedArtifact:
    """Figures of one artifact under the keys of `METRICS`, and ratios to the first artifact."""

    folder: str  # as the user gave it
    model: str
    scheme: str
    target: str
    values: dict[str, float]
    ratios: dict[str, float]
    not_compared: dict[str, str]  # the reason for each missing ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    artifacts: tuple[ComparedArtifact, ...]
    notes: tuple[str, ...]  # differences between the machines and their runtimes


METRICS: Mapping[str, Metric] = {
    "size_bytes": Metric(title="size MB", path="size.artifact_bytes", show=megabytes),
    "perplexity": Metric(
        title="perplexity", path="accuracy.perplexity.quantized", show="{:,.2f}".format, conditions=TEXT
    ),
    "kl_divergence": Metric(
        title="KL", path="accuracy.kl_divergence", show="{:.3g}".format, conditions=("model", *TEXT)
    ),
    "top1_agreement": Metric(
        title="top-1", path="accuracy.top1_agreement", show="{:.2%}".format, conditions=("model", *TEXT)
    ),
    "mean_cosine": Metric(
        title="cosine", path="similarity.mean_cosine", show="{:.5f}".format, conditions=SIMILARITY
    ),
    "flips": Metric(
        title="other labels", path="similarity.labels.flips", show="{:.1%}".format, conditions=SIMILARITY
    ),
    "ndcg10": Metric(
        title="nDCG@10", path="similarity.ranking.ndcg10", show="{:.3f}".format, conditions=SIMILARITY
    ),
    "prefill_ms": Metric(title="prefill ms", path="latency.0.prefill_ms", show=figures, conditions=MACHINE),
    "decode_ms_per_token": Metric(
        title="decode ms", path="latency.0.decode_ms_per_token", show=figures, conditions=DECODING
    ),
    # Memory peaks grow with lengths and threads, and differ between operating systems.
    "run_peak_bytes": Metric(
        title="memory MB",
        path="memory.quantized.run_peak_bytes",
        show=megabytes,
        conditions=(*DECODING, "environment.platform"),
    ),
}


def _value(report: Json, path: str) -> Any:
    """The value at a dotted path of keys and indices; None where a part is missing."""
    value: Any = report
    for key in path.split("."):
        if isinstance(value, list):
            value = value[int(key)] if int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def compare_reports(reports: Sequence[Json]) -> Comparison:
    """Reports side by side; beside the content of report.json each has `folder` and `tokenizer`, a digest."""
    first = reports[0]
    return Comparison(
        artifacts=tuple(_compared(first, report) for report in reports),
        notes=tuple(note for report in reports[1:] for note in _notes(first, report)),
    )


def _compared(first: Json, report: Json) -> ComparedArtifact:
    values, ratios, not_compared = {}, {}, {}
    for key, metric in METRICS.items():
        value, first_value = _value(report, metric.path), _value(first, metric.path)
        if value is None:
            continue
        values[key] = float(value)
        if first_value is None:
            continue
        differences = list(_differences(first, report, metric.conditions))
        if differences:
            not_compared[key] = "; ".join(differences)
        elif first_value:
            ratios[key] = value / first_value
    return ComparedArtifact(
        **{key: report[key] for key in ("folder", "model", "target")},
        scheme=scheme_text(report),
        values=values,
        ratios=ratios,
        not_compared=not_compared,
    )


def _differences(first: Json, other: Json, paths: Iterable[str]) -> Iterable[str]:
    for path in paths:
        values = [_value(report, path) for report in (other, first)]
        name = path.rpartition(".")[2].replace("_", " ")
        if values[0] == values[1]:
            continue
        if path.endswith("is_meaningful"):
            name, values = "weights", ["random" if value is False else "trained" for value in values]
        yield f"another {name}" if path == "tokenizer" else f"{name} {values[0]} against {values[1]}"


def _notes(first: Json, other: Json) -> Iterable[str]:
    for package in PACKAGES:
        versions = [_value(report, f"environment.versions.{package}") for report in (first, other)]
        if versions[0] != versions[1]:
            yield (
                f"{other['folder']} was measured with {package} {versions[1]}, "
                f"{first['folder']} with {versions[0]}"
            )
    if list(_differences(first, other, ("model", *MACHINE))):
        return
    for key, phase in (("prefill_ms", "prefill"), ("decode_ms_per_token", "decode")):
        times = [_value(report, f"latency.0.reference.{key}") for report in (first, other)]
        if times[0] and times[1] and abs(times[1] / times[0] - 1) > LARGEST_DRIFT:
            yield (
                f"the machine's speed changed: {phase} of the float reference took "
                f"{times[1] / times[0]:.2f}x as long beside {other['folder']} as beside {first['folder']}"
            )


def comparison_page(comparison: Comparison) -> Page:
    artifacts = comparison.artifacts
    names = short_names([artifact.folder for artifact in artifacts])
    named = list(zip(names, artifacts, strict=True))
    keys = [key for key in METRICS if any(key in artifact.values for artifact in artifacts)]
    titles = tuple(METRICS[key].title for key in keys)

    def table(title: str, cell: Callable[[ComparedArtifact, str], str]) -> Table:
        rows = tuple((name, *(cell(artifact, key) for key in keys)) for name, artifact in named)
        return Table(title=title, columns=("artifact", *titles), rows=rows, numeric=titles)

    not_compared = [
        f"{name}, {METRICS[key].title}: no ratio, {reason}"
        for name, artifact in named
        for key, reason in artifact.not_compared.items()
    ]
    models = ", ".join(sorted({artifact.model for artifact in artifacts}))
    return Page(
        head=(
            f"{len(artifacts)} artifacts of {models}",
            *(f"  {name}: {artifact.scheme} for {artifact.target}" for name, artifact in named),
        ),
        tables=(table("Artifacts", _figure), table(f"Ratio to {names[0]}", _ratio)),
        foot=(
            "decode: ms per token; memory: peak of a run; (in parentheses): measured under other conditions",
            *not_compared,
        ),
        warnings=comparison.notes,
    )


def short_names(folders: Sequence[str]) -> Sequence[str]:
    """The last parts of the folders where they are distinct, otherwise the whole paths."""
    last = [folder.rstrip("/\\").replace("\\", "/").rpartition("/")[2] for folder in folders]
    return last if len(set(last)) == len(last) else folders


def _figure(artifact: ComparedArtifact, key: str) -> str:
    value = artifact.values.get(key)
    if value is None:
        return "-"
    shown = METRICS[key].show(value)
    return f"({shown})" if key in artifact.not_compared else shown


def _ratio(artifact: ComparedArtifact, key: str) -> str:
    return f"{artifact.ratios[key]:.4g}x" if key in artifact.ratios else "-"
