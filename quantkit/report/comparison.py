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
from quantkit.report.tables import Page, Table

Json = Mapping[str, Any]
Conditions = Mapping[str, Any]
PACKAGES = ("onnxruntime",)  # packages whose version decides speed and, by kernels, accuracy
LARGEST_DRIFT = 0.10  # of the float reference's time between two runs; beyond it a warning is shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A column: the figure in a report, and the conditions that two comparable figures share."""

    title: str
    read: Callable[[Json], float | None]
    show: Callable[[float], str]
    conditions: Callable[[Json], Conditions] = lambda report: {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One artifact of a comparison."""

    name: str  # the folder, as the user gave it
    report: Json
    tokenizer: str | None = None  # a digest of tokenizer.json


def _at(*keys: str) -> Callable[[Json], float | None]:
    """A reader of the figure at a path of keys; None where a key is missing."""

    def read(report: Json) -> float | None:
        value: Any = report
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) else None

    return read


def _timed(*keys: str) -> Callable[[Json], float | None]:
    """A reader of a time of the first provider."""
    return lambda report: _at(*keys)(_latency(report))


def _latency(report: Json) -> Json:
    entries = report.get("latency") or [{}]
    first: Json = entries[0]
    return first


def _text_conditions(report: Json) -> Conditions:
    accuracy = report.get("accuracy", {})
    return {**accuracy.get("protocol", {}), "weights": _weights(accuracy), "tokenizer": report["tokenizer"]}


def _reference_conditions(report: Json) -> Conditions:
    """KL divergence and agreement depend on the model that was quantized."""
    return {"model": report["model"], **_text_conditions(report)}


def _similarity_conditions(report: Json) -> Conditions:
    similarity = report.get("similarity", {})
    protocol = {key: similarity.get(key) for key in ("text", "num_windows", "window")}
    return {"model": report["model"], **protocol, "weights": _weights(similarity)}


def _weights(measured: Json) -> str:
    return "random" if measured.get("is_meaningful") is False else "trained"


def _machine(report: Json) -> Conditions:
    environment, entry = report["environment"], _latency(report)
    machine = {key: environment.get(key) for key in ("processor", "num_cores")}
    return machine | {key: entry.get(key) for key in ("provider", "threads", "batch", "prompt_length")}


def _decode_conditions(report: Json) -> Conditions:
    return {**_machine(report), "num_decoded": _latency(report).get("num_decoded")}


def _memory_conditions(report: Json) -> Conditions:
    """Memory peaks grow with lengths and threads, and differ between operating systems."""
    return {**_decode_conditions(report), "platform": report["environment"].get("platform")}


METRICS: Mapping[str, Metric] = {
    "size_bytes": Metric(title="size MB", read=_at("size", "artifact_bytes"), show=megabytes),
    "perplexity": Metric(
        title="perplexity",
        read=_at("accuracy", "perplexity", "quantized"),
        show=lambda value: f"{value:,.2f}",
        conditions=_text_conditions,
    ),
    "kl_divergence": Metric(
        title="KL",
        read=_at("accuracy", "kl_divergence"),
        show=lambda value: f"{value:.3g}",
        conditions=_reference_conditions,
    ),
    "top1_agreement": Metric(
        title="top-1",
        read=_at("accuracy", "top1_agreement"),
        show=lambda value: f"{value:.2%}",
        conditions=_reference_conditions,
    ),
    "mean_cosine": Metric(
        title="cosine",
        read=_at("similarity", "mean_cosine"),
        show=lambda value: f"{value:.5f}",
        conditions=_similarity_conditions,
    ),
    "prefill_ms": Metric(title="prefill ms", read=_timed("prefill_ms"), show=figures, conditions=_machine),
    "decode_ms_per_token": Metric(
        title="decode ms",
        read=_timed("decode_ms_per_token"),
        show=figures,
        conditions=_decode_conditions,
    ),
    "run_peak_bytes": Metric(
        title="memory MB",
        read=_at("memory", "quantized", "run_peak_bytes"),
        show=megabytes,
        conditions=_memory_conditions,
    ),
}


def comparison_json(sides: Sequence[Side]) -> dict[str, Any]:
    """Figures of every artifact, ratios to the first, and for each missing ratio its reason."""
    reports = [{**side.report, "tokenizer": side.tokenizer} for side in sides]
    artifacts = []
    for side, report in zip(sides, reports, strict=True):
        values, ratios, refused = {}, {}, {}
        for key, metric in METRICS.items():
            value, first = metric.read(report), metric.read(reports[0])
            if value is None:
                continue
            values[key] = value
            if first is None:
                continue
            differences = list(_differences(metric.conditions(reports[0]), metric.conditions(report)))
            if differences:
                refused[key] = "; ".join(differences)
            elif first:
                ratios[key] = value / first
        artifacts.append(
            {
                "folder": side.name,
                **{key: report[key] for key in ("model", "scheme", "target")},
                "values": values,
                "ratios": ratios,
                "not_compared": refused,
            }
        )
    return {"artifacts": artifacts, "notes": [note for side in sides[1:] for note in _notes(sides[0], side)]}


def _differences(first: Conditions, other: Conditions) -> Iterable[str]:
    for key, value in other.items():
        if value == first.get(key):
            continue
        name = key.replace("_", " ")
        yield f"another {name}" if key == "tokenizer" else f"{name} {value} against {first.get(key)}"


def _notes(first: Side, other: Side) -> Iterable[str]:
    for package in PACKAGES:
        versions = [side.report["environment"].get("versions", {}).get(package) for side in (first, other)]
        if versions[0] != versions[1]:
            yield (f"{other.name} was measured with {package} {versions[1]}, {first.name} with {versions[0]}")
    if other.report["model"] != first.report["model"] or _machine(other.report) != _machine(first.report):
        return
    for key, phase in (("prefill_ms", "prefill"), ("decode_ms_per_token", "decode")):
        times = [_timed("reference", key)(side.report) for side in (first, other)]
        if times[0] and times[1] and abs(times[1] / times[0] - 1) > LARGEST_DRIFT:
            yield (
                f"the machine's speed changed: {phase} of the float reference took "
                f"{times[1] / times[0]:.2f}x as long beside {other.name} as beside {first.name}"
            )


def comparison_page(document: Json) -> Page:
    """The page, from the content of `comparison_json`."""
    artifacts = document["artifacts"]
    names = _names([artifact["folder"] for artifact in artifacts])
    named = list(zip(names, artifacts, strict=True))
    keys = [key for key in METRICS if any(key in artifact["values"] for artifact in artifacts)]
    titles = tuple(METRICS[key].title for key in keys)

    def table(title: str, cell: Callable[[Json, str], str]) -> Table:
        rows = tuple((name, *(cell(artifact, key) for key in keys)) for name, artifact in named)
        return Table(title=title, columns=("artifact", *titles), rows=rows, numeric=titles)

    refused = [
        f"{name}, {METRICS[key].title}: no ratio, {reason}"
        for name, artifact in named
        for key, reason in artifact["not_compared"].items()
    ]
    models = ", ".join(sorted({artifact["model"] for artifact in artifacts}))
    return Page(
        head=(
            f"{len(artifacts)} artifacts of {models}",
            *(f"  {name}: {artifact['scheme']} for {artifact['target']}" for name, artifact in named),
        ),
        tables=(table("Artifacts", _figure), table(f"Ratio to {names[0]}", _ratio)),
        foot=(
            "decode: ms per token; memory: peak of a run; (in parentheses): measured under other conditions",
            *refused,
        ),
        warnings=tuple(document["notes"]),
    )


def _names(folders: Sequence[str]) -> Sequence[str]:
    """The last parts of the folders where they are distinct, otherwise the whole paths."""
    last = [folder.rstrip("/\\").replace("\\", "/").rpartition("/")[2] for folder in folders]
    return last if len(set(last)) == len(last) else folders


def _figure(artifact: Json, key: str) -> str:
    value = artifact["values"].get(key)
    if value is None:
        return "-"
    shown = METRICS[key].show(value)
    return f"({shown})" if key in artifact["not_compared"] else shown


def _ratio(artifact: Json, key: str) -> str:
    return f"{artifact['ratios'][key]:.4g}x" if key in artifact["ratios"] else "-"
