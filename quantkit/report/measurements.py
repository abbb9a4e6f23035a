"""Measured results, beside a reference or alone: tables, lines, and the page of `eval` and `bench`.

`quantize`, `eval` and `bench` write the same JSON keys, so the three pages share everything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.evaluation.verdict import FLOAT_ERROR
from quantkit.report.alarms import MEMORY_PEAKS, verdict_alarms
from quantkit.report.figures import figures, megabytes, with_error
from quantkit.report.tables import Cells, Json, Page, Table, table_of

Row = tuple[str, str, str, str]  # metric, reference, quantized, change
SPREAD = ("median", "lowest", "quartiles", "highest", "runs")
NONE = "-"
CATEGORIES: Cells = {
    "category": lambda row: str(row["name"]),
    "KL divergence, nats": lambda row: f"{row['kl_divergence']:.3g} ± {row['kl_standard_error']:.1g}",
    "likeliest token flips": lambda row: f"{row['flip_rate']:.2%}",
    "window": lambda row: f"{row['window']}",
    "tokens": lambda row: f"{row['num_tokens']:,}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFigure:
    """A figure of labels or rankings, with its standard error and what it was measured on."""

    name: str
    value: str
    spread: str
    compared: str


def has_scores(similarity: Json) -> bool:
    """Whether the outputs are a reranker's scores."""
    return bool(similarity.get("ranking", {}).get("of_pairs"))


def shows_vectors(similarity: Json) -> bool:
    """Whether the error of outputs is what users notice; of classifiers and rerankers it is not."""
    return "labels" not in similarity and not has_scores(similarity)


def rerun_page(document: Mapping[str, Any]) -> Page:
    """The page, from the content of `rerun_json` or `evaluation_json`."""
    reference = f"; reference: {document['reference']}" if "reference" in document else ""
    return Page(
        head=(f"{artifact_line(document)}{reference}",),
        tables=measured_tables(document),
        foot=(*protocol_lines(document), verdict_line(document)),
        warnings=tuple(document["notes"]),
        alarms=tuple(verdict_alarms(document.get("judgement"))),
    )


def artifact_line(document: Mapping[str, Any]) -> str:
    return f"{document['artifact']}: {document['scheme']} of {document['model']}"


def measured_tables(document: Json) -> tuple[Table, ...]:
    """The metrics, and where latency was measured the spread behind each median."""
    rows = (
        *_size_rows(document.get("size", {})),
        *_accuracy_rows(document.get("accuracy")),
        *_similarity_rows(document.get("similarity")),
        *_latency_rows(document.get("latency", [])),
        *_memory_rows(document.get("memory", {})),
    )
    names = ("metric", "reference", "quantized", "change")
    kept = [index for index in range(len(names)) if index == 0 or any(row[index] != NONE for row in rows)]
    columns = tuple(names[index] for index in kept)
    metrics = Table(
        title="Reference and quantized" if "reference" in columns else "Measured",
        columns=columns,
        rows=tuple(tuple(row[index] for index in kept) for row in rows),
        numeric=columns[1:],
    )
    spread = tuple(_spread_rows(document.get("latency", [])))
    tables = [metrics]
    if categories := document.get("accuracy", {}).get("categories"):
        tables.append(table_of("By category of text", categories, CATEGORIES))
    if spread:
        columns = ("phase", "model", *SPREAD)
        tables.append(
            Table(title="Spread of the runs", columns=columns, rows=spread, numeric=SPREAD, is_folded=True)
        )
    return tuple(tables)


def protocol_lines(document: Json) -> Iterable[str]:
    """How each result was measured, a line each; the machine last."""
    accuracy, similarity = document.get("accuracy"), document.get("similarity")
    if accuracy:
        protocol = accuracy["protocol"]
        yield (
            f"accuracy: {protocol['num_tokens']:,} tokens of {protocol['text']}, each predicted once; window "
            f"{protocol['window']}, stride {protocol['stride']}; ± is one standard error{_doubt(accuracy)}"
        )
    if similarity:
        yield from _similarity_lines(similarity)
    if "float_error" in document:
        error = document["float_error"]
        yield (
            f"float graph: differs from transformers by {error['largest_error']:.2g} of the largest output "
            f"({error['num_tokens']} tokens, limit {FLOAT_ERROR.broken:g})"
        )
    for entry in document.get("latency", []):
        yield from _latency_lines(entry)
    for placement in document.get("placement", []):
        macs = f" and {placement['mac_fraction']:.1%} of the MACs" if "mac_fraction" in placement else ""
        yield f"placement: {placement['provider']} runs {placement['node_fraction']:.1%} of the nodes{macs}"
    memory = document.get("memory", {})
    if memory:
        empty = memory.get("empty_process_bytes")
        baseline = f"; {megabytes(empty)} MB without a model" if empty else ""
        yield f"memory: peak resident memory of one process per model{baseline}"
    size = document.get("size", {})
    if size:
        planned = f"; planned {megabytes(size['planned_bytes'])} MB" if "planned_bytes" in size else ""
        yield f"size: graph and weights on disk{planned}; 1 MB is 1e6 bytes"
    yield machine_line(document["environment"])


def verdict_line(document: Json) -> str:
    """The verdict, or why there is none."""
    if "judgement" in document:
        return f"verdict: {document['judgement']['verdict']}"
    return "verdict: none; the quantized model was not compared with the original"


def machine_line(environment: Json) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"machine: {environment['processor']}, {environment['num_cores']:g} cores, "
        f"{environment['platform']}; Python {environment['python']}, {versions}"
    )


def _doubt(measured: Json) -> str:
    return "" if measured["is_meaningful"] else "; meaningless: random weights"


def _size_rows(size: Json) -> Iterable[Row]:
    if size:
        yield _row("size, MB", size.get("source_bytes"), size["artifact_bytes"], megabytes)
    if size.get("reference_bytes"):
        yield _row("size of float graph, MB", size["reference_bytes"], size["artifact_bytes"], megabytes)


def _accuracy_rows(accuracy: Json | None) -> Iterable[Row]:
    if accuracy is None:
        return
    label = "" if accuracy["is_meaningful"] else " (meaningless: random weights)"
    perplexity = accuracy["perplexity"]
    values = [
        with_error(perplexity[model], perplexity[f"{model}_standard_error"]) if model in perplexity else NONE
        for model in ("reference", "quantized")
    ]
    if "increase" not in perplexity:
        yield f"perplexity{label}", values[0], values[1], NONE
        return
    increase, error = perplexity["increase"], perplexity["increase_standard_error"]
    yield f"perplexity{label}", values[0], values[1], f"{100 * increase:+.2f} ± {100 * error:.2f}%"
    for name, value in (
        ("KL divergence, nats", f"{accuracy['kl_divergence']:.3g} ± {accuracy['kl_standard_error']:.1g}"),
        ("KL, 99th percentile", f"{accuracy['kl_99th_percentile']:.3g}"),
        ("top-1 agreement", f"{accuracy['top1_agreement']:.2%}"),
        ("largest logit error", f"{accuracy['max_relative_logit_error']:.2%}"),
    ):
        yield f"{name}{label}", NONE, value, NONE


def _similarity_rows(similarity: Json | None) -> Iterable[Row]:
    if similarity is None:
        return
    label = "" if similarity["is_meaningful"] else " (meaningless: random weights)"
    nearest = similarity.get("nearest_agreement")
    of_pictures = similarity.get("of_pictures")
    embeddings, example = (
        ("picture embeddings", "picture") if of_pictures else ("sentence embeddings", "text")
    )
    outputs = "pooled outputs" if nearest is None else embeddings
    for figure in head_figures(similarity):
        yield figure.name, NONE, f"{figure.value}{figure.spread}", NONE
    if nearest is not None:
        yield f"same nearest {example}{label}", NONE, f"{nearest:.1%}", NONE
    if not shows_vectors(similarity):
        return
    for name, value in (
        (f"mean cosine of {outputs}", f"{similarity['mean_cosine']:.5f}"),
        (f"lowest cosine of {outputs}", f"{similarity['lowest_cosine']:.5f}"),
        ("relative RMS error of outputs", f"{similarity['relative_rms_error']:.2%}"),
        ("largest output error", f"{similarity['max_relative_error']:.2%}"),
    ):
        yield f"{name}{label}", NONE, value, NONE


def _similarity_lines(similarity: Json) -> Iterable[str]:
    count, labels, ranking = similarity["num_windows"], similarity.get("labels"), similarity.get("ranking")
    if similarity.get("of_pictures"):
        outputs = "embeddings" if "nearest_agreement" in similarity else "outputs"
        compared = f"{labels['num_labels']} labels" if labels else outputs
        yield (
            f"accuracy: {compared} on {count} {similarity['text']} of {similarity['window']} tokens, "
            f"compared with the reference's{_doubt(similarity)}"
        )
        return
    if labels:
        compared = f"{labels['num_labels']} labels of {count} texts of up to"
    elif has_scores(similarity):
        compared = f"scores of {count} pairs of up to"
    elif "nearest_agreement" in similarity:
        compared = f"sentence embeddings of {count} texts of up to"
    else:
        compared = f"outputs on {count} windows of"
    yield (
        f"accuracy: {compared} {similarity['window']} tokens of "
        f"{similarity['text']}, compared with the reference's{_doubt(similarity)}"
    )
    if ranking:
        yield (
            f"ranking: {ranking['num_queries']} bundled questions, {ranking['num_passages']} passages for "
            "each; nDCG@10 with gains of 10 to 1 for the reference's first ten"
        )


def head_figures(similarity: Json) -> Iterable[HeadFigure]:
    """Labels of a classifier, rankings of a reranker or a sentence model."""
    labels, ranking = similarity.get("labels"), similarity.get("ranking")
    if labels:
        examples = "pictures" if similarity.get("of_pictures") else "texts"
        compared = f"{labels['num_compared']:,} {'tokens' if labels['of_tokens'] else examples}"
        yield _head_figure(labels, "flips", "other labels", compared, "{:.1%}")
        yield _head_figure(labels, "kl_divergence", "KL divergence of labels, nats", compared, "{:.2g}")
    if ranking:
        compared = f"{ranking['num_queries']} queries, {ranking['num_passages']} passages"
        yield _head_figure(ranking, "ndcg10", "nDCG@10 of the reference's ranking", compared, "{:.3f}")
        yield _head_figure(ranking, "other_first", "other first passages", compared, "{:.1%}")


def _head_figure(part: Json, key: str, name: str, compared: str, show: str) -> HeadFigure:
    error = part.get(f"{key}_standard_error")
    spread = f" ± {show.format(error)}" if error else ""
    return HeadFigure(name=name, value=show.format(part[key]), spread=spread, compared=compared)


def _latency_rows(entries: list[Json]) -> Iterable[Row]:
    for entry in entries:
        provider = f", {entry['provider']}" if len(entries) > 1 else ""
        reference, decode = entry.get("reference", {}), entry.get("decode_ms_per_token")
        prefill = f"prefill of {entry['prompt_length']} tokens, ms{provider}"
        yield _row(prefill, reference.get("prefill_ms"), entry["prefill_ms"], figures)
        if decode is not None:
            yield _row(f"decode, ms/token{provider}", reference.get("decode_ms_per_token"), decode, figures)
            if "floor_ms_per_token" in entry:
                floor = figures(entry["floor_ms_per_token"])
                yield f"memory floor, ms/token{provider}", NONE, floor, NONE


def _memory_rows(memory: Json) -> Iterable[Row]:
    for key, name in MEMORY_PEAKS:
        if key in memory.get("quantized", {}):
            reference = memory.get("reference", {}).get(key)
            yield _row(f"{name}, MB", reference, memory["quantized"][key], megabytes)


def _row(name: str, reference: float | None, quantized: float, show: Callable[[float], str]) -> Row:
    if not reference:
        return name, NONE, show(quantized), NONE
    return name, show(reference), show(quantized), f"{quantized / reference:.3g}x"


def _spread_rows(entries: list[Json]) -> Iterable[tuple[str, ...]]:
    for entry in entries:
        provider = f", {entry['provider']}" if len(entries) > 1 else ""
        for phase, unit in (("prefill", "ms"), ("decode", "ms/token")):
            for model, phases in (("reference", entry.get("reference", {})), ("quantized", entry)):
                if phase in phases:
                    yield f"{phase}, {unit}{provider}", model, *_spread_cells(phases[phase])


def _spread_cells(timing: Json) -> tuple[str, ...]:
    quartiles = f"{figures(timing['lower_quartile_ms'])} to {figures(timing['upper_quartile_ms'])}"
    lowest, highest = figures(timing["lowest_ms"]), figures(timing["highest_ms"])
    return figures(timing["median_ms"]), lowest, quartiles, highest, f"{timing['num_runs']}"


def _latency_lines(entry: Json) -> Iterable[str]:
    decoded = f", {entry['num_decoded']} decoded tokens" if entry.get("num_decoded") else ""
    name = entry.get("reference", {}).get("name")
    interleaved = f", interleaved with the reference ({name})" if name else ""
    yield (
        f"latency: {entry['provider']}, {entry['threads']} threads, batch {entry['batch']}, prompt "
        f"{entry['prompt_length']}{decoded}; medians after {entry['num_warm_ups']} warm-ups{interleaved}"
    )
    decode, floor = entry.get("decode_ms_per_token"), entry.get("floor_ms_per_token")
    if decode is not None and floor is not None:
        yield (
            "memory floor: the time to read weights and KV cache once at full bandwidth; decode takes "
            f"{decode / floor:.2f}x of it"
        )
