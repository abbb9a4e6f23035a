"""The page of `quantkit compare`: reports of several artifacts side by side, and ratios to the first.

A ratio is only formed between figures that were taken in the same way: perplexity on the same text with the
same tokens and windows, KL divergence against the same original, times on the same machine with the same
lengths and threads. Where that is not so the figure stands alone, in parentheses, and a line says what
differs. What a report does not hold is absent, in the table ("-") and in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.report.figures import figures, megabytes
from quantkit.report.tables import Page, Table

Json = Mapping[str, Any]
Conditions = Mapping[str, Any]
PACKAGES = ("onnxruntime",)  # whose version decides speed and, by its kernels, accuracy
LARGEST_DRIFT = 0.10  # of the same float reference between two runs, before the machine is called unsteady


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A column: where a report holds the figure, and what must agree for two of them to be compared."""

    title: str
    read: Callable[[Json], float | None]
    show: Callable[[float], str]
    conditions: Callable[[Json], Conditions]


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One artifact of a comparison."""

    name: str  # the folder as it was given
    report: Json
    tokenizer: str | None = None  # a digest of its tokenizer.json


def _at(*keys: str) -> Callable[[Json], float | None]:
    """The figure at a path of keys, None where any of them is missing."""

    def read(report: Json) -> float | None:
        value: Any = report
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) else None

    return read


def _timed(key: str) -> Callable[[Json], float | None]:
    """A time of the first provider."""
    return lambda report: _at(key)(_latency(report))


def _latency(report: Json) -> Json:
    entries = report.get("latency") or [{}]
    first: Json = entries[0]
    return first


def _nothing(report: Json) -> Conditions:
    return {}


def _text_conditions(report: Json) -> Conditions:
    accuracy = report.get("accuracy", {})
    return {**accuracy.get("protocol", {}), "weights": _weights(accuracy), "tokenizer": report["tokenizer"]}


def _reference_conditions(report: Json) -> Conditions:
    """KL and agreement are held against the model that was quantized."""
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
    """Peaks grow with lengths and threads, and differ between operating systems."""
    return {**_decode_conditions(report), "platform": report["environment"].get("platform")}


METRICS: Mapping[str, Metric] = {
    "size_bytes": Metric(
        title="size MB", read=_at("size", "artifact_bytes"), show=megabytes, conditions=_nothing
    ),
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
    """Figures, ratios to the first and what stood in the way of others; absent where there is no figure."""
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
    return {"artifacts": artifacts, "notes": list(_notes(sides))}


def _differences(first: Conditions, other: Conditions) -> Iterable[str]:
    for key, value in other.items():
        if value != first.get(key):
            shown = f"another {key}" if key == "tokenizer" else f"{key} {value} against {first.get(key)}"
            yield shown.replace("_", " ") if key != "platform" else shown


def _notes(sides: Sequence[Side]) -> Iterable[str]:
    first = sides[0].report
    for side in sides[1:]:
        versions = side.report["environment"].get("versions", {})
        for package in PACKAGES:
            mine, other = versions.get(package), first["environment"].get("versions", {}).get(package)
            if mine != other:
                yield f"{side.name} was measured with {package} {mine}, {sides[0].name} with {other}"
        if side.report["model"] != first["model"] or _machine(side.report) != _machine(first):
            continue
        for key, phase in (("prefill_ms", "prefill"), ("decode_ms_per_token", "decode")):
            times = [_at("reference", key)(_latency(report)) for report in (first, side.report)]
            if times[0] and times[1] and abs(times[1] / times[0] - 1) > LARGEST_DRIFT:
                yield (
                    f"the float reference's {phase} took {times[1] / times[0]:.2f}x as long when {side.name} "
                    f"was measured as when {sides[0].name} was: the machine was not as fast both times"
                )


def comparison_page(document: Json) -> Page:
    """The page for a person, from the content of `comparison_json`."""
    artifacts = document["artifacts"]
    keys = [key for key in METRICS if any(key in each["values"] for each in artifacts)]
    titles = tuple(METRICS[key].title for key in keys)
    names = _names([each["folder"] for each in artifacts])
    figures_rows = tuple(
        (name, each["scheme"], *(_figure(each, key) for key in keys))
        for name, each in zip(names, artifacts, strict=True)
    )
    ratio_rows = tuple(
        (name, *(f"{each['ratios'][key]:.4g}x" if key in each["ratios"] else "-" for key in keys))
        for name, each in zip(names, artifacts, strict=True)
    )
    foot = [
        f"{name}, {METRICS[key].title}: not compared, {reason}"
        for name, each in zip(names, artifacts, strict=True)
        for key, reason in each["not_compared"].items()
    ]
    legend = "decode is per token, memory the peak of a run; (in parentheses) measured otherwise, no ratio"
    models = {each["model"] for each in artifacts}
    return Page(
        head=(f"{len(artifacts)} artifacts of {', '.join(sorted(models))}",),
        tables=(
            Table(
                title="Artifacts", columns=("artifact", "scheme", *titles), rows=figures_rows, numeric=titles
            ),
            Table(
                title=f"Ratio to {names[0]}", columns=("artifact", *titles), rows=ratio_rows, numeric=titles
            ),
        ),
        foot=(legend, *foot),
        warnings=tuple(document["notes"]),
    )


def _names(folders: Sequence[str]) -> Sequence[str]:
    """The folders' last parts where these tell them apart; whole paths leave no room for figures."""
    last = [folder.rstrip("/\\").replace("\\", "/").rpartition("/")[2] for folder in folders]
    return last if len(set(last)) == len(last) else folders


def _figure(artifact: Json, key: str) -> str:
    value = artifact["values"].get(key)
    if value is None:
        return "-"
    shown = METRICS[key].show(value)
    return f"({shown})" if key in artifact["not_compared"] else shown
