"""The page of `quantkit bench --provider`: speed, accuracy and placement of each execution provider.

Each provider runs in a process of its own. A provider that fails is a row too, with reason and remedy below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from quantkit.report.alarms import verdict_alarms
from quantkit.report.figures import BAR_CELLS, bar, figures, megabytes, percent
from quantkit.report.measurements import artifact_line, machine_line, verdict_line
from quantkit.report.tables import Json, Page, Table

SHOWN_LAYERS = 3  # of each operator that ran on the CPU instead; the rest are counted
# Key of a provider's accuracy -> column, and a value as text.
ACCURACIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "perplexity_ratio": ("perplexity", lambda value: f"x {value:.4f}"),
    "kl_divergence": ("KL, nats", figures),
    "lowest_cosine": ("lowest cosine", lambda value: f"{value:.5f}"),
    "max_relative_logit_error": ("largest error", lambda value: f"{value:.2%}"),
    "top1_agreement": ("top-1", lambda value: f"{value:.1%}"),
}


def providers_page(document: Json) -> Page:
    """The page, from `rerun_json` with the runs of the providers."""
    runs = document["providers"]
    unplaced = tuple(row for run in runs for row in _unplaced_rows(run))
    failed = tuple((run["provider"], run["why_not"], run["cure"]) for run in runs if "why_not" in run)
    tables = (
        _speeds(runs),
        _accuracies([(run["provider"], run["accuracy"]) for run in runs if "accuracy" in run]),
        _placements(runs),
        Table(
            title="Operators on the CPU instead",
            columns=("provider", "operator", "nodes", "layers", "reason"),
            rows=unplaced,
            numeric=("nodes",),
        ),
        Table(title="Failures", columns=("provider", "reason", "remedy"), rows=failed),
    )
    return Page(
        head=(artifact_line(document),),
        tables=tuple(table for table in tables if table.rows),
        foot=(*_lines(document), machine_line(document["environment"]), verdict_line(document)),
        warnings=(
            *document["notes"],
            *(f"{run['provider']}: {note}" for run in runs for note in run["notes"]),
        ),
        alarms=(
            *verdict_alarms(document.get("judgement")),
            *(_strict_alarms(runs) if document["strict"] else _failures(runs)),
        ),
    )


def _lines(document: Json) -> Iterable[str]:
    runs = document["providers"]
    prompts = sorted({run["prompt_length"] for run in runs if "prompt_length" in run})
    yield f"{document['threads']} threads, batch 1, prompt {' or '.join(map(str, prompts)) or 'not run'}"
    if len(runs) > 1:
        yield "providers run one after the other, so load on the machine can make their times differ"
    if any("accuracy" in run for run in runs):
        yield "largest error: greatest output difference over greatest output"
    for run in runs:
        if "start_again_ms" in run:
            yield (
                f"{run['provider']}: cached start is {run['start_ms'] / run['start_again_ms']:.1f} times "
                f"faster (compiling takes {figures(run['compile_ms'])} ms)"
            )


def _speeds(runs: Sequence[Json]) -> Table:
    columns = (
        "library load, ms",
        "start, ms",
        "cached start, ms",
        "prefill, ms",
        "decode, ms/token",
        "peak, MB",
    )

    def cells(run: Json) -> Iterable[str]:
        for key in ("library_ms", "start_ms", "start_again_ms"):
            yield figures(run[key]) if key in run else "-"
        for phase in ("prefill", "decode"):
            yield figures(run[phase]["median_ms"]) if phase in run else "-"
        yield megabytes(run["peak_bytes"]) if "peak_bytes" in run else "-"

    return Table(
        title="Providers, each in a process of its own",
        columns=("provider", "outcome", *columns),
        rows=tuple((run["provider"], _outcome(run), *cells(run)) for run in runs),
        numeric=columns,
    )


def _accuracies(measured: Sequence[tuple[str, Json]]) -> Table:
    """Decoders are compared by predictions, encoders by the directions of their states."""
    keys = [key for key in ACCURACIES if any(key in accuracy for _, accuracy in measured)]
    if "lowest_cosine" in keys:
        keys.remove("top1_agreement")  # the largest component of an encoder's state is no token
    columns = ("tokens", *(ACCURACIES[key][0] for key in keys))
    rows = tuple(
        (
            provider,
            f"{accuracy['num_tokens']}",
            *(ACCURACIES[key][1](accuracy[key]) if key in accuracy else "-" for key in keys),
        )
        for provider, accuracy in measured
    )
    references = ", ".join(sorted({accuracy["reference"] for _, accuracy in measured}))
    return Table(
        title=f"Accuracy beside {references}", columns=("provider", *columns), rows=rows, numeric=columns
    )


def _outcome(run: Json) -> str:
    """The outcome; a provider that placed no MACs has the CPU's times."""
    placement = run.get("placement")
    if run["outcome"] != "ran" or not placement or not placement["unplaced"]:
        return str(run["outcome"])
    return "ran on the CPU" if placement.get("mac_fraction") == 0 else "ran, mixed"


def _placements(runs: Sequence[Json]) -> Table:
    def cells(run: Json) -> tuple[str, ...]:
        placement = run.get("placement")
        if placement is None:
            return bar(0.0), "-", "-"
        macs, num_nodes = placement.get("mac_fraction"), placement["num_nodes"]
        share = ("?" * BAR_CELLS, "unknown") if macs is None else (bar(macs), percent(macs))
        return *share, f"{num_nodes - len(placement['unplaced'])} of {num_nodes}"

    return Table(
        title="Placement, as onnxruntime records it",
        columns=("provider", "share of MACs", "MACs", "nodes", "device"),
        rows=tuple((run["provider"], *cells(run), run.get("device", "-")) for run in runs),
        numeric=("MACs", "nodes"),
        whole=("share of MACs",),
    )


def _unplaced_rows(run: Json) -> Iterable[tuple[str, ...]]:
    """One row for each operator and reason, the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node in run.get("placement", {}).get("unplaced", ()):
        key = node["operator"], node.get("reason", "the provider gives none")
        groups.setdefault(key, []).append(node.get("layer") or node["name"])
    for (operator, reason), layers in sorted(groups.items(), key=lambda group: -len(group[1])):
        distinct = list(Counter(layers))
        more = f" and {len(distinct) - SHOWN_LAYERS} more" if len(distinct) > SHOWN_LAYERS else ""
        yield run["provider"], operator, f"{len(layers)}", ", ".join(distinct[:SHOWN_LAYERS]) + more, reason


def _failures(runs: Sequence[Json]) -> Iterable[str]:
    return (
        f"{run['provider']} did not run the model: {run['why_not']}"
        for run in runs
        if run["outcome"] == "failed"
    )


def _strict_alarms(runs: Sequence[Json]) -> Iterable[str]:
    """Runs that `--strict` rejects."""
    for run in runs:
        if "placement" not in run:
            yield f"{run['provider']} did not run the model: {run.get('why_not', 'its placement is unknown')}"
        elif run["placement"]["unplaced"]:
            counts = Counter(node["operator"] for node in run["placement"]["unplaced"])
            operators = ", ".join(f"{operator} x{count}" for operator, count in counts.most_common())
            yield f"{run['provider']} left {counts.total()} nodes to the CPU: {operators}"
