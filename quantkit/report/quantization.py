"""The page of `quantkit quantize`, and report.json: what was quantized, and how it does beside the original.

The page is made from the JSON form, so that an artifact's report can be shown again from its file. A result
that is worse than it should be becomes an alarm and is said in words; what was not measured is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quantkit.errors import InputError
from quantkit.evaluation.measurements import Accuracy, Latency, Timing
from quantkit.model.model_map import to_json
from quantkit.report.document import Report
from quantkit.report.figures import figures, megabytes
from quantkit.report.losses import loss_alarms, loss_head, loss_tables
from quantkit.report.tables import Page, Table

REQUIRED = ("model", "scheme", "target", "projections", "matrices", "parameters", "size", "environment")
# Beyond these a user would notice: the usual per-tensor INT8 costs a real decoder 19% and 0.18 nats,
# scales for blocks of 128 cost it 1% and 0.008.
MAX_INCREASE = 0.05
MAX_KL_DIVERGENCE = 0.05
# The graph, its names and its constants come on top of the planned tensors.
PLANNED_TOLERANCE = 0.02
PLANNED_TOLERANCE_BYTES = 256 << 10
MEMORY_TOLERANCE = 0.02  # two runs of one process differ by less: 0.6% in five
MAX_KEPT_LINES = 6
PHASES = (("prefill_ms", "prefill", "ms"), ("decode_ms_per_token", "decode", "ms/token"))
MEMORY_PEAKS = (("load_peak_bytes", "peak memory to load"), ("run_peak_bytes", "peak memory to run"))
Json = Mapping[str, Any]
Row = tuple[str, str, str, str]


def report_json(report: Report) -> dict[str, Any]:
    """The content of report.json; what was not measured has no key."""
    document: dict[str, Any] = to_json(report)
    document["size"]["ratio"] = report.size.ratio
    document["accuracy"] = accuracy_json(report.accuracy) if report.accuracy else None
    document["latency"] = [latency_json(each) for each in report.latency]
    document = without_none(document)
    document["alarms"] = list(alarms_of(document))
    return document


def accuracy_json(accuracy: Accuracy) -> dict[str, Any]:
    """Accuracy as report.json has it."""
    return {
        "perplexity": {
            "reference": accuracy.reference.value,
            "reference_standard_error": accuracy.reference.standard_error,
            "quantized": accuracy.quantized.value,
            "quantized_standard_error": accuracy.quantized.standard_error,
            "increase": accuracy.increase,
            "increase_standard_error": accuracy.increase_standard_error,
        },
        "kl_divergence": accuracy.kl_divergence,
        "kl_standard_error": accuracy.kl_standard_error,
        "kl_99th_percentile": accuracy.kl_99th_percentile,
        "top1_agreement": accuracy.top1_agreement,
        "max_relative_logit_error": accuracy.max_relative_logit_error,
        "is_meaningful": accuracy.is_meaningful,
        "protocol": {
            "text": accuracy.text,
            "num_tokens": accuracy.num_tokens,
            "window": accuracy.window,
            "stride": accuracy.stride,
        },
    }


def latency_json(latency: Latency) -> dict[str, Any]:
    """One provider's times as report.json has them."""
    reference = _phases_json(latency.prefill_reference, latency.decode_reference)
    return {
        "provider": latency.provider,
        "reference": {"name": latency.reference, **reference} if reference else None,
        **_phases_json(latency.prefill, latency.decode),
        "floor_ms_per_token": latency.floor_ms_per_token,
        "threads": latency.threads,
        "batch": latency.batch,
        "prompt_length": latency.prompt_length,
        "num_decoded": latency.num_decoded,
        "num_warm_ups": latency.num_warm_ups,
    }


def _phases_json(prefill: Timing | None, decode: Timing | None) -> dict[str, Any]:
    """The medians under the names that the contract gives them, each with its whole timing."""
    phases: dict[str, Any] = {}
    if prefill:
        phases |= {"prefill_ms": prefill.median_ms, "prefill": to_json(prefill)}
    if decode:
        phases |= {"decode_ms_per_token": decode.median_ms, "decode": to_json(decode)}
    return phases


def without_none(value: Any) -> Any:
    """The value without keys that hold nothing."""
    if isinstance(value, dict):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def alarms_of(document: Json) -> tuple[str, ...]:
    """Everything about a result that is worse than it should be, a line each."""
    alarms = [*_size_alarms(document["size"]), *_accuracy_alarms(document.get("accuracy"))]
    alarms += loss_alarms(document)
    for entry in document.get("latency", ()):
        for key, name, unit in PHASES:
            measured, reference = entry.get(key), entry.get("reference", {}).get(key)
            if measured is not None and reference is not None and measured > reference:
                alarms.append(
                    f"SLOWER than the reference: {name} {figures(measured)} {unit} against "
                    f"{figures(reference)} ({measured / reference:.2f}x) on {entry['provider']}"
                    f"{_elsewhere(document['target'])}"
                )
    memory = document.get("memory", {})
    for key, name in MEMORY_PEAKS:
        measured, reference = memory.get("quantized", {}).get(key), memory.get("reference", {}).get(key)
        if measured is not None and reference is not None and measured > reference * (1 + MEMORY_TOLERANCE):
            alarms.append(
                f"MORE MEMORY than the reference: {name} {megabytes(measured)} MB "
                f"against {megabytes(reference)}"
            )
    return tuple(alarms)


def _elsewhere(target: str) -> str:
    """What a slow processor says of a model that is made for another device: little."""
    is_for_cpus = target.startswith("cpu")
    return "" if is_for_cpus else f", and it is made for '{target}': see 'quantkit bench --provider'"


def _size_alarms(size: Json) -> Iterable[str]:
    artifact, planned, source = (size[f"{which}_bytes"] for which in ("artifact", "planned", "source"))
    if artifact > planned * (1 + PLANNED_TOLERANCE) + PLANNED_TOLERANCE_BYTES:
        yield f"LARGER than planned: {megabytes(artifact)} MB against {megabytes(planned)}"
    if artifact >= source:
        yield f"NOT SMALLER than its source: {megabytes(artifact)} MB against {megabytes(source)}"


def _accuracy_alarms(accuracy: Json | None) -> Iterable[str]:
    if accuracy is None or not accuracy["is_meaningful"]:
        return
    perplexity = accuracy["perplexity"]
    if perplexity["increase"] > MAX_INCREASE:
        yield (
            f"LESS ACCURATE: perplexity {perplexity['quantized']:,.2f} against "
            f"{perplexity['reference']:,.2f} ({perplexity['increase']:+.1%}; more than {MAX_INCREASE:+.0%} "
            "is clearly off)"
        )
    if accuracy["kl_divergence"] > MAX_KL_DIVERGENCE:
        yield (
            f"LESS ACCURATE: KL divergence {accuracy['kl_divergence']:.3g} "
            f"(more than {MAX_KL_DIVERGENCE:g} is clearly off)"
        )


def quantization_page(document: Json) -> Page:
    """The page for a person, from the content of report.json."""
    missing = [key for key in REQUIRED if key not in document]
    if missing:
        raise InputError(
            f"{', '.join(missing)} missing",
            where="report.json",
            next_step="write the report again with 'quantkit quantize'",
        )
    timings = _timings(document)
    return Page(
        head=tuple(_head(document)),
        tables=(_comparison(document), *([timings] if timings.rows else []), *loss_tables(document)),
        foot=tuple(_protocol(document)),
        alarms=alarms_of(document),
    )


def _head(document: Json) -> Iterable[str]:
    projections, matrices, parameters = (document[key] for key in ("projections", "matrices", "parameters"))
    share = parameters["quantized"] / parameters["total"] if parameters["total"] else 0.0
    yield f"{document['model']}: {document['scheme']} for {document['target']}"
    yield (
        f"quantized: {projections['quantized']} of {projections['total']} projections "
        f"({matrices['quantized']} of {matrices['total']} matrices), {share:.1%} of the parameters, "
        f"at min_dim {document['min_dim']}"
    )
    check = document.get("formula")
    if check:
        verdict = "agrees with the walk" if check["agrees"] else f"but the walk finds {check['walked']}"
        yield (
            f"formula: ({check['attention_per_block']} attention + {check['ffn_per_block']} FFN) x "
            f"{check['num_blocks']} layers + {check['num_outputs']} output = {check['predicted']}, {verdict}"
        )
        yield from (f"  {difference}" for difference in check["differences"])
    yield from loss_head(document)
    kept = document.get("kept", [])
    for each in kept[:MAX_KEPT_LINES]:
        yield f"not quantized: {each['count']} {each['role']} ({each['reason']})"
    if len(kept) > MAX_KEPT_LINES:
        others = sum(each["count"] for each in kept[MAX_KEPT_LINES:])
        yield f"not quantized: {others} more, for other reasons (all are in report.json)"
    if document.get("has_random_weights"):
        yield "weights: random; size, speed and counts hold, accuracy is meaningless"


def _comparison(document: Json) -> Table:
    numeric = ("reference", "quantized", "change")
    return Table(
        title="Reference and quantized",
        columns=("what", *numeric),
        rows=(
            *_size_rows(document["size"]),
            *accuracy_rows(document.get("accuracy")),
            *similarity_rows(document.get("similarity")),
            *_latency_rows(document.get("latency", [])),
            *_memory_rows(document.get("memory", {})),
        ),
        numeric=numeric,
    )


def _size_rows(size: Json) -> Iterable[Row]:
    artifact = size["artifact_bytes"]
    yield _row("size, MB", size["source_bytes"], artifact, megabytes)
    if size.get("reference_bytes"):
        yield _row("size beside the float graph, MB", size["reference_bytes"], artifact, megabytes)


def accuracy_rows(accuracy: Json | None) -> Iterable[Row]:
    """Accuracy as rows of the comparison."""
    if accuracy is None:
        return
    label = "" if accuracy["is_meaningful"] else " (meaningless: random weights)"
    perplexity = accuracy["perplexity"]
    increase, increase_error = perplexity["increase"], perplexity["increase_standard_error"]
    yield (
        f"perplexity{label}",
        f"{perplexity['reference']:,.2f} ± {perplexity['reference_standard_error']:,.2f}",
        f"{perplexity['quantized']:,.2f} ± {perplexity['quantized_standard_error']:,.2f}",
        f"{100 * increase:+.2f} ± {100 * increase_error:.2f}%",
    )
    kl, kl_error = accuracy["kl_divergence"], accuracy["kl_standard_error"]
    yield f"KL divergence, nats{label}", "-", f"{kl:.3g} ± {kl_error:.1g}", "-"
    yield f"KL divergence, 99th percentile{label}", "-", f"{accuracy['kl_99th_percentile']:.3g}", "-"
    yield f"same likeliest token{label}", "-", f"{accuracy['top1_agreement']:.2%}", "-"
    error = accuracy["max_relative_logit_error"]
    yield f"largest logit error{label}", "-", f"{error:.2%}", "-"


def similarity_rows(similarity: Json | None) -> Iterable[Row]:
    """An encoder's similarity as rows of the comparison."""
    if similarity is None:
        return
    label = "" if similarity["is_meaningful"] else " (meaningless: random weights)"
    yield f"cosine of pooled outputs, mean{label}", "-", f"{similarity['mean_cosine']:.5f}", "-"
    yield f"cosine of pooled outputs, lowest{label}", "-", f"{similarity['lowest_cosine']:.5f}", "-"
    yield f"error of all outputs, RMS{label}", "-", f"{similarity['relative_rms_error']:.2%}", "-"
    yield f"largest output error{label}", "-", f"{similarity['max_relative_error']:.2%}", "-"


def _latency_rows(entries: list[Json]) -> Iterable[Row]:
    for entry in entries:
        place = f", {entry['provider']}" if len(entries) > 1 else ""
        prompt, reference = entry["prompt_length"], entry.get("reference", {})
        yield _row(
            f"prefill of {prompt} tokens, ms{place}",
            reference.get("prefill_ms"),
            entry["prefill_ms"],
            figures,
        )
        decode, floor = entry.get("decode_ms_per_token"), entry.get("floor_ms_per_token")
        if decode is not None:
            yield _row(f"decode, ms/token{place}", reference.get("decode_ms_per_token"), decode, figures)
        if decode is not None and floor is not None:
            beside = f"decode {decode / floor:.2f}x of it"
            yield f"  memory floor, ms/token{place}", "-", figures(floor), beside


def _memory_rows(memory: Json) -> Iterable[Row]:
    for key, name in MEMORY_PEAKS:
        measured = memory.get("quantized", {}).get(key)
        if measured is not None:
            yield _row(f"{name}, MB", memory.get("reference", {}).get(key), measured, megabytes)


def _timings(document: Json) -> Table:
    """The spread behind each median."""
    numeric = ("median", "lowest", "quartiles", "highest", "runs")
    rows = []
    for entry in document.get("latency", []):
        place = f", {entry['provider']}" if len(document["latency"]) > 1 else ""
        for phase in ("prefill", "decode"):
            unit = "ms" if phase == "prefill" else "ms/token"
            for model, part in (("reference", entry.get("reference", {})), ("quantized", entry)):
                timing = part.get(phase)
                if timing:
                    rows.append((f"{phase} {unit}{place}", model, *timing_cells(timing)))
    return Table(
        title="Spread of the runs", columns=("phase", "model", *numeric), rows=tuple(rows), numeric=numeric
    )


def timing_cells(timing: Json) -> tuple[str, ...]:
    """Median and spread."""
    quartiles = f"{figures(timing['lower_quartile_ms'])} to {figures(timing['upper_quartile_ms'])}"
    lowest, highest = figures(timing["lowest_ms"]), figures(timing["highest_ms"])
    return figures(timing["median_ms"]), lowest, quartiles, highest, f"{timing['num_runs']}"


def _protocol(document: Json) -> Iterable[str]:
    accuracy = document.get("accuracy")
    if accuracy:
        protocol = accuracy["protocol"]
        meaning = "" if accuracy["is_meaningful"] else "; meaningless: random weights"
        yield (
            f"accuracy: {protocol['num_tokens']:,} tokens of {protocol['text']} predicted once each, window "
            f"{protocol['window']}, stride {protocol['stride']}; ± is one standard error{meaning}"
        )
    similarity = document.get("similarity")
    if similarity:
        yield (
            f"accuracy: {similarity['num_windows']} windows of {similarity['window']} tokens of "
            f"{similarity['text']}, outputs against the original's"
        )
    for entry in document.get("latency", []):
        decoded = f", {entry['num_decoded']} tokens after it" if entry.get("num_decoded") else ""
        name = entry.get("reference", {}).get("name")
        yield (
            f"latency: {entry['provider']}, {entry['threads']} threads, batch {entry['batch']}, prompt "
            f"{entry['prompt_length']}{decoded}; {entry['num_warm_ups']} warm-ups, models in turn, medians"
            + (f"; reference: {name}" if name else "")
        )
    for place in document.get("placement", []):
        macs = f", {place['mac_fraction']:.1%} of the MACs" if "mac_fraction" in place else ""
        yield f"placement: {place['provider']} runs {place['node_fraction']:.1%} of the nodes{macs}"
    memory = document.get("memory", {})
    if memory:
        bare = memory.get("empty_process_bytes")
        beside = f"; without a model {megabytes(bare)} MB" if bare else ""
        yield f"memory: peak resident, each model in a process of its own{beside}"
    planned = megabytes(document["size"]["planned_bytes"])
    yield f"size: of graph and weights beside the checkpoint's; planned {planned} MB; 1 MB is 1e6 bytes"
    where = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    yield (
        f"machine: {where['processor']}, {where['num_cores']:g} cores, {where['platform']}; "
        f"Python {where['python']}, {versions}"
    )
    stages = ", ".join(
        f"{name} {figures(seconds)} s" for name, seconds in document.get("seconds", {}).items()
    )
    if stages:
        yield f"time: {stages}"
    yield from (f"note: {note}" for note in document.get("notes", []))


def _row(name: str, reference: float | None, quantized: float, show: Callable[[float], str]) -> Row:
    if not reference:
        return name, "-", show(quantized), "-"
    return name, show(reference), show(quantized), f"{quantized / reference:.3g}x"
