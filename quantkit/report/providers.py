"""The page of `quantkit bench --provider`: what each provider did in its own process, and what it left.

A provider that could not run is a row like any other, with its reason and its cure below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quantkit.evaluation.measurements import Environment, ProviderRun
from quantkit.model.model_map import to_json
from quantkit.report.figures import figures, megabytes
from quantkit.report.quantization import without_none
from quantkit.report.reruns import machine_line, name_line
from quantkit.report.tables import Page, Table

Json = Mapping[str, Any]
BAR_CELLS = 20
SHOWN_LAYERS = 3  # of those that an operator fell back in; the rest are counted


def providers_json(
    *,
    artifact: Json,
    runs: Sequence[ProviderRun],
    threads: int,
    environment: Environment,
    strict: bool,
    notes: Sequence[str],
) -> dict[str, Any]:
    """What `quantkit bench --provider ... --json` prints."""
    document: dict[str, Any] = without_none(
        {**artifact, "threads": threads, "strict": strict, "environment": to_json(environment)}
    )
    document["providers"] = [without_none(to_json(run)) for run in runs]
    return {**document, "notes": list(notes)}


def providers_page(document: Json) -> Page:
    """The page for a person."""
    runs = document["providers"]
    prompts = sorted({run["prompt_length"] for run in runs if "prompt_length" in run})
    tables = [_speed(runs), *filter(None, [_accuracies(runs)]), _shares(runs)]
    left = [row for run in runs for row in _left(run)]
    if left:
        columns = ("provider", "operator", "nodes", "layers", "why")
        tables.append(Table(title="Left to the CPU", columns=columns, rows=tuple(left), numeric=("nodes",)))
    failed = [(run["provider"], run["why_not"], run["cure"]) for run in runs if "why_not" in run]
    if failed:
        tables.append(
            Table(title="What did not run", columns=("provider", "why", "cure"), rows=tuple(failed))
        )
    lines = [f"{document['threads']} threads, batch 1, prompt {' or '.join(map(str, prompts)) or 'not run'}"]
    if len(runs) > 1:
        lines.append("one process after the other: on a busy machine their times drift apart by themselves")
    if any("accuracy" in run for run in runs):
        lines.append("greatest error: the greatest difference of two outputs over the greatest output")
    for run in runs:
        if "start_again_ms" in run:
            lines.append(
                f"{run['provider']}: starts {run['start_ms'] / run['start_again_ms']:.1f} times faster from "
                f"what it compiled, which is kept (compiling: {figures(run['compile_ms'])} ms)"
            )
    return Page(
        head=(name_line(document),),
        tables=tuple(tables),
        foot=(*lines, machine_line(document["environment"])),
        warnings=(
            *document["notes"],
            *(f"{run['provider']}: {note}" for run in runs for note in run["notes"]),
        ),
        alarms=tuple(_alarms(runs)) if document["strict"] else (),
    )


def _speed(runs: Sequence[Json]) -> Table:
    columns = ("library, ms", "start, ms", "again, ms", "prefill, ms", "decode, ms/token", "peak, MB")

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


def _accuracies(runs: Sequence[Json]) -> Table | None:
    """Decoders by what they predict, encoders by where their states point; None without a comparison."""
    compared = [(run["provider"], run["accuracy"]) for run in runs if "accuracy" in run]
    if not compared:
        return None
    shown: dict[str, tuple[str, Callable[[float], str]]] = {
        "perplexity_ratio": ("perplexity", lambda value: f"x {value:.4f}"),
        "kl_divergence": ("KL, nats", figures),
        "lowest_cosine": ("lowest cosine", lambda value: f"{value:.5f}"),
        "max_relative_logit_error": ("greatest error", lambda value: f"{value:.2%}"),
        "top1_agreement": ("same top-1", lambda value: f"{value:.1%}"),
    }
    keys = [key for key in shown if any(key in accuracy for _, accuracy in compared)]
    if "lowest_cosine" in keys:
        keys.remove("top1_agreement")  # the largest of an encoder's states stands for no token
    columns = ("tokens", *(shown[key][0] for key in keys))
    rows = tuple(
        (
            name,
            str(found["num_tokens"]),
            *(shown[key][1](found[key]) if key in found else "-" for key in keys),
        )
        for name, found in compared
    )
    references = ", ".join(sorted({found["reference"] for _, found in compared}))
    return Table(
        title=f"Accuracy beside {references}", columns=("provider", *columns), rows=rows, numeric=columns
    )


def _outcome(run: Json) -> str:
    """A provider that took nothing has a time all the same, and it is the CPU's."""
    placement = run.get("placement")
    if run["outcome"] != "ran" or not placement or not placement["unplaced"]:
        return str(run["outcome"])
    return "ran on the CPU" if placement.get("mac_fraction") == 0 else "ran, mixed"


def _shares(runs: Sequence[Json]) -> Table:
    def row(run: Json) -> tuple[str, ...]:
        placement = run.get("placement")
        if placement is None:
            return run["provider"], bar(0.0), "-", "-", run.get("device", "-")
        macs, num_nodes = placement.get("mac_fraction"), placement["num_nodes"]
        num_placed = num_nodes - len(placement["unplaced"])
        shown = ("?" * BAR_CELLS, "unknown") if macs is None else (bar(macs), percent(macs))
        return run["provider"], *shown, f"{num_placed} of {num_nodes}", run.get("device", "-")

    return Table(
        title="Placement, by the runtime's record",
        columns=("provider", "share of MACs", "MACs", "nodes", "device"),
        rows=tuple(map(row, runs)),
        numeric=("MACs", "nodes"),
        whole=("share of MACs",),
    )


def bar(share: float) -> str:
    """Twenty cells; full only where all of it is there, and empty only where none is."""
    filled = round(share * BAR_CELLS)
    if 0 < share < 1:
        filled = min(max(filled, 1), BAR_CELLS - 1)
    return "█" * filled + "░" * (BAR_CELLS - filled)


def percent(share: float) -> str:
    """Never rounded up to 100% or down to 0%."""
    text = f"{share:.1%}"
    if share < 1 and text == "100.0%":
        return ">99.9%"
    return "<0.1%" if share > 0 and text == "0.0%" else text


def _left(run: Json) -> Iterable[tuple[str, str, str, str, str]]:
    """One row for each operator and reason, the most frequent first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node in run.get("placement", {}).get("unplaced", ()):
        key = node["operator"], node.get("reason", "the provider does not say")
        groups.setdefault(key, []).append(node.get("layer") or node["name"])
    for (operator, reason), layers in sorted(groups.items(), key=lambda each: -len(each[1])):
        distinct = list(Counter(layers))
        more = f" and {len(distinct) - SHOWN_LAYERS} more" if len(distinct) > SHOWN_LAYERS else ""
        shown = ", ".join(distinct[:SHOWN_LAYERS]) + more
        yield run["provider"], operator, str(len(layers)), shown, reason


def _alarms(runs: Sequence[Json]) -> Iterable[str]:
    """What `--strict` does not accept."""
    for run in runs:
        if "placement" not in run:
            yield f"{run['provider']} did not run the model: {run.get('why_not', 'its placement is unknown')}"
        elif run["placement"]["unplaced"]:
            counts = Counter(node["operator"] for node in run["placement"]["unplaced"])
            operators = ", ".join(f"{operator} x{count}" for operator, count in counts.most_common())
            yield f"{run['provider']} left {counts.total()} nodes to the CPU: {operators}"
