"""Alarms: results of a report that are worse than they should be, one line each."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.report.figures import figures, megabytes
from quantkit.report.tables import Json

# Graph, names and constants come on top of the planned tensors.
PLANNED_TOLERANCE = 0.02
PLANNED_TOLERANCE_BYTES = 256 << 10
MEMORY_TOLERANCE = 0.02  # two runs of one process differ by 0.6% in five
PHASES = (("prefill_ms", "prefill", "ms"), ("decode_ms_per_token", "decode", "ms/token"))
MEMORY_PEAKS = (("load_peak_bytes", "peak memory to load"), ("run_peak_bytes", "peak memory to run"))


def alarms_of(document: Json) -> tuple[str, ...]:
    """Every alarm of the content of report.json."""
    return (
        *_size_alarms(document["size"]),
        *verdict_alarms(document.get("judgement")),
        *_budget_alarms(document),
        *_latency_alarms(document),
        *_memory_alarms(document.get("memory", {})),
        *(f"NOT MEASURED: {failure}" for failure in document.get("failures", ())),
    )


def _size_alarms(size: Json) -> Iterable[str]:
    artifact, planned, source = (size[f"{which}_bytes"] for which in ("artifact", "planned", "source"))
    if artifact > planned * (1 + PLANNED_TOLERANCE) + PLANNED_TOLERANCE_BYTES:
        yield f"LARGER than planned: {megabytes(artifact)} MB against {megabytes(planned)}"
    if artifact >= source:
        yield f"NOT SMALLER than its source: {megabytes(artifact)} MB against {megabytes(source)}"


def verdict_alarms(judgement: Json | None) -> Iterable[str]:
    if judgement is not None:
        yield from (f"{judgement['verdict'].upper()}: {reason}" for reason in judgement["reasons"])


def _budget_alarms(document: Json) -> Iterable[str]:
    search = document.get("search")
    if search is None:
        return
    if not search["holds"]:
        verdict = search["verdicts"][-1]
        which = (
            "the most accurate configuration of the target size"
            if "max_bytes" in search
            else "the best configuration of the search"
        )
        yield (
            f"BUDGET MISSED: perplexity {verdict['ppl_increase']:+.2%}, KL divergence "
            f"{verdict['kl_divergence']:.3g} on held-out text; this is {which}"
        )
    elif not document["projections"]["quantized"]:
        yield "NOTHING QUANTIZED: the float model is the answer to this budget"


def _latency_alarms(document: Json) -> Iterable[str]:
    # A CPU says little about a model that is exported for another device.
    target = document["target"]
    device = (
        "" if target.startswith("cpu") else f"; the target is '{target}': see 'quantkit bench --provider'"
    )
    for entry in document.get("latency", ()):
        for key, phase, unit in PHASES:
            quantized, reference = entry.get(key), entry.get("reference", {}).get(key)
            if quantized is not None and reference is not None and quantized > reference:
                yield (
                    f"SLOWER than the reference: {phase} {figures(quantized)} {unit} against "
                    f"{figures(reference)} ({quantized / reference:.2f}x) on {entry['provider']}{device}"
                )


def _memory_alarms(memory: Json) -> Iterable[str]:
    for key, name in MEMORY_PEAKS:
        quantized, reference = (memory.get(model, {}).get(key) for model in ("quantized", "reference"))
        if quantized is not None and reference is not None and quantized > reference * (1 + MEMORY_TOLERANCE):
            yield (
                f"MORE MEMORY than the reference: {name} {megabytes(quantized)} MB "
                f"against {megabytes(reference)}"
            )
