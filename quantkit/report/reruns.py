"""The pages of `quantkit eval` and `quantkit bench`: one stage measured again, in the report's own terms.

The JSON has the keys of report.json, so that what reads the one reads the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quantkit.evaluation.measurements import Accuracy, Environment, Latency, Memory, Perplexity, Similarity
from quantkit.model.model_map import to_json
from quantkit.report.figures import figures, megabytes
from quantkit.report.quantization import (
    accuracy_json,
    accuracy_rows,
    latency_json,
    similarity_rows,
    timing_cells,
    without_none,
)
from quantkit.report.tables import Page, Table

Json = Mapping[str, Any]


def evaluation_json(
    *,
    artifact: Json,
    accuracy: Accuracy | Similarity | Perplexity,
    protocol: Json,
    is_meaningful: bool,
    reference: str | None,
    environment: Environment,
    notes: Sequence[str],
) -> dict[str, Any]:
    """What `quantkit eval --json` prints; `protocol` is that of a model alone."""
    measured: dict[str, Any]
    if isinstance(accuracy, Accuracy):
        measured = {"accuracy": accuracy_json(accuracy)}
    elif isinstance(accuracy, Similarity):
        measured = {"similarity": to_json(accuracy)}
    else:
        perplexity = {"quantized": accuracy.value, "quantized_standard_error": accuracy.standard_error}
        measured = {
            "accuracy": {"perplexity": perplexity, "is_meaningful": is_meaningful, "protocol": dict(protocol)}
        }
    document: dict[str, Any] = without_none(
        {**artifact, "reference": reference, **measured, "environment": to_json(environment)}
    )
    return {**document, "notes": list(notes)}


def evaluation_page(document: Json) -> Page:
    """The page for a person."""
    accuracy = document.get("accuracy")
    reference = document.get("reference")
    compared = ("reference", "quantized", "change")
    if accuracy and not reference:
        label = "" if accuracy["is_meaningful"] else " (meaningless: random weights)"
        perplexity = accuracy["perplexity"]
        shown = f"{perplexity['quantized']:,.2f} ± {perplexity['quantized_standard_error']:,.2f}"
        table = Table(
            title="Accuracy",
            columns=("what", "value"),
            rows=((f"perplexity{label}", shown),),
            numeric=("value",),
        )
    else:
        rows = (*accuracy_rows(accuracy), *similarity_rows(document.get("similarity")))
        table = Table(title="Accuracy", columns=("what", *compared), rows=rows, numeric=compared)
    beside = f", beside {reference}" if reference else ""
    return Page(
        head=(f"{name_line(document)}{beside}",),
        tables=(table,),
        foot=(*_protocol(document), machine_line(document["environment"])),
        warnings=tuple(document["notes"]),
    )


def _protocol(document: Json) -> Iterable[str]:
    accuracy, similarity = document.get("accuracy"), document.get("similarity")
    if accuracy:
        protocol = accuracy["protocol"]
        yield (
            f"{protocol['num_tokens']:,} tokens of {protocol['text']} predicted once each, window "
            f"{protocol['window']}, stride {protocol['stride']}; ± is one standard error"
        )
    if similarity:
        yield (
            f"{similarity['num_windows']} windows of {similarity['window']} tokens of {similarity['text']}, "
            "outputs against the reference's"
        )


def benchmark_json(
    *,
    artifact: Json,
    size_bytes: int,
    latency: Latency,
    memory: Memory,
    environment: Environment,
    notes: Sequence[str],
) -> dict[str, Any]:
    """What `quantkit bench --json` prints."""
    document: dict[str, Any] = without_none(
        {
            **artifact,
            "size": {"artifact_bytes": size_bytes},
            "latency": [latency_json(latency)],
            "memory": to_json(memory),
            "environment": to_json(environment),
        }
    )
    return {**document, "notes": list(notes)}


def benchmark_page(document: Json) -> Page:
    """The page for a person."""
    (entry,) = document["latency"]
    spread = ("median", "lowest", "quartiles", "highest", "runs")
    phases = [(f"prefill of {entry['prompt_length']} tokens, ms", entry["prefill"])]
    if "decode" in entry:
        phases.append(("decode, ms/token", entry["decode"]))
    return Page(
        head=(name_line(document),),
        tables=(
            Table(
                title="Time",
                columns=("phase", *spread),
                rows=tuple((name, *timing_cells(timing)) for name, timing in phases),
                numeric=spread,
            ),
            Table(
                title="Size and memory",
                columns=("what", "value"),
                rows=tuple(_memory_rows(document)),
                numeric=("value",),
            ),
        ),
        foot=(*_timing_lines(entry), machine_line(document["environment"])),
        warnings=tuple(document["notes"]),
    )


def _memory_rows(document: Json) -> Iterable[tuple[str, str]]:
    memory = document["memory"]
    yield "graph and weights on disk, MB", megabytes(document["size"]["artifact_bytes"])
    for key, name in (("load_peak_bytes", "peak memory to load"), ("run_peak_bytes", "peak memory to run")):
        if key in memory["quantized"]:
            yield f"{name}, MB", megabytes(memory["quantized"][key])
    if "empty_process_bytes" in memory:
        yield "the same process without a model, MB", megabytes(memory["empty_process_bytes"])


def _timing_lines(entry: Json) -> Iterable[str]:
    decoded = f", {entry['num_decoded']} tokens after it" if entry.get("num_decoded") else ""
    yield (
        f"{entry['provider']}, {entry['threads']} threads, batch {entry['batch']}, prompt "
        f"{entry['prompt_length']}{decoded}; {entry['num_warm_ups']} warm-ups; memory: each in a process "
        "of its own"
    )
    floor = entry.get("floor_ms_per_token")
    if floor:
        yield (
            f"memory floor {figures(floor)} ms/token, the time to read weights and cache once: decode takes "
            f"{entry['decode_ms_per_token'] / floor:.2f}x of it"
        )


def name_line(document: Json) -> str:
    """The artifact in words."""
    return f"{document['artifact']}: {document['scheme']} of {document['model']}"


def machine_line(environment: Json) -> str:
    """Where it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"machine: {environment['processor']}, {environment['num_cores']:g} cores, "
        f"{environment['platform']}; Python {environment['python']}, {versions}"
    )
