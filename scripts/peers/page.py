"""From the benchmark's document (a JSON-like dict) to its bars and its Markdown page; it measures nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from peers.systems import CALM_SHARE, DEFAULT_ENCODER_SCHEME, DEFAULT_SCHEME, SYSTEMS

DEFAULT = f"quantkit-{DEFAULT_SCHEME}"
DEFAULT_ENCODER = f"quantkit-{DEFAULT_ENCODER_SCHEME}"
Document = dict[str, Any]
NONE = "-"
DISTURBED = "**Other processes were busy while this was measured: nothing below can be relied upon.**"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One thing asked for, beside what was measured; None where a part of it is missing."""

    what: str
    limit: float
    measured: float | None
    is_strict: bool = False  # below the limit, not at it

    @property
    def verdict(self) -> str:
        """Met, not met, or why there is no verdict."""
        if self.measured is None:
            return "not measured"
        is_met = self.measured < self.limit if self.is_strict else self.measured <= self.limit
        return "met" if is_met else "NOT MET"


def bars(document: Document) -> list[dict[str, Any]]:
    """Every bar that this benchmark can judge; ratios of medians of one run."""

    def row(model: str, name: str) -> Document:
        found: Document = document["models"].get(model, {}).get("systems", {}).get(name, {})
        return found

    def time(model: str, name: str, key: str) -> float | None:
        found = row(model, name).get("times", {}).get(key)
        return found["median"] if found else None

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    def against(what: str, key: str, peer: str, limit: float, **strict: bool) -> Bar:
        label = f"{what}, default scheme / {SYSTEMS[peer].label}"
        measured = ratio(time("gpt2", DEFAULT, key), time("gpt2", peer, key))
        return Bar(what=label, limit=limit, measured=measured, **strict)

    def fastest(key: str, *, is_peer: bool) -> float | None:
        names = [name for name, system in SYSTEMS.items() if system.is_peer == is_peer]
        times = [found for name in names if (found := time("gpt2", name, key)) is not None]
        return min(times, default=None)

    def size_ratio(scheme: str) -> float | None:
        source = document["models"].get("gpt2", {}).get("source_bytes")
        return ratio(row("gpt2", f"quantkit-{scheme}").get("artifact_bytes"), source)

    gpt2 = document["models"].get("gpt2", {})
    floor_ms, make = row("gpt2", DEFAULT).get("floor_ms"), row("gpt2", DEFAULT).get("make") or {}
    bare, peak = gpt2.get("bare_peak_bytes"), make.get("peak_bytes")
    optimum = row("gpt2", "optimum-int8").get("make") or {}
    above_bare = max(0, peak - bare) if peak and bare else None
    found = [
        Bar(what="artifact, block 128 / FP32 safetensors", limit=0.262, measured=size_ratio("int8_block128")),
        Bar(what="artifact, block 32 / FP32 safetensors", limit=0.29, measured=size_ratio("int8_block32")),
        against("decode", "decode_ms", "llama.cpp", 0.95),
        against("decode", "decode_ms", "optimum-int8", 0.5),
        against("decode", "decode_ms", "onnxruntime-fp32", 0.3),
        Bar(
            what="decode, default scheme / memory floor",
            limit=1.35,
            measured=ratio(time("gpt2", DEFAULT, "decode_ms"), floor_ms),
        ),
        Bar(
            what="prefill, quantkit's best scheme / best peer",
            limit=0.65,
            measured=ratio(fastest("prefill_ms", is_peer=False), fastest("prefill_ms", is_peer=True)),
        ),
        against("prefill", "prefill_ms", "llama.cpp", 1.0, is_strict=True),
        against("prefill", "prefill_ms", "optimum-int8", 1.1),
        *(
            Bar(
                what=f"{model}, default scheme / {SYSTEMS[peer].label}",
                limit=limit,
                measured=ratio(time(model, DEFAULT_ENCODER, "encode_ms"), time(model, peer, "encode_ms")),
            )
            for model in ("bert-6x384", "bert-base")
            for peer, limit in (("optimum-int8", 1.0), ("onnxruntime-fp32", 0.55))
        ),
        Bar(
            what="quantize and export, wall time / optimum's export and quantize",
            limit=1 / 3,
            measured=ratio(make.get("seconds"), optimum.get("seconds")),
        ),
        Bar(
            what="quantize and export, peak memory above the bare process / FP32 safetensors",
            limit=0.5,
            measured=ratio(above_bare, gpt2.get("source_bytes")),
        ),
    ]
    return [{**asdict(bar), "verdict": bar.verdict} for bar in found]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: the first column is text, the others are figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(figures: Document | None) -> str:
    """Median and range."""
    if not figures:
        return NONE
    return f"{figures['median']:.2f} ({figures['min']:.2f}-{figures['max']:.2f})"


def _megabytes(size: float | None) -> str:
    return NONE if size is None else f"{size / 1e6:.1f}"


def _systems(systems: Document, columns: dict[str, str]) -> str:
    rows = []
    for row in systems.values():
        times, make = row.get("times", {}), row.get("make") or {}
        if row.get("reason"):
            rows.append([row["label"], NONE, *[NONE] * len(columns), NONE, NONE])
            continue
        cost = [f"{make['seconds']:.1f}", _megabytes(make["peak_bytes"])] if make else [NONE, NONE]
        figures = [spread(times.get(key)) for key in columns]
        rows.append([row["label"], _megabytes(row.get("artifact_bytes")), *figures, *cost])
    return table(["system", "size MB", *columns.values(), "make s", "make peak MB"], rows)


def page(document: Document) -> str:
    """The whole page."""
    machine, models = document["machine"], document["models"]
    judged = [
        [
            bar["what"],
            f"{bar['limit']:.3g}",
            NONE if bar["measured"] is None else f"{bar['measured']:.3f}",
            bar["verdict"],
        ]
        for bar in document["bars"]
    ]
    versions = [f"- {name}: {', '.join(found)}" for name, found in document["versions"].items() if found]
    reasons = [
        f"- {row['label']} ({model}): {row['reason']}"
        for model, part in models.items()
        for row in part["systems"].values()
        if row.get("reason")
    ]
    is_disturbed = document["largest_other_share"] > CALM_SHARE
    parts = [
        "# quantkit and its peers",
        *([DISTURBED] if is_disturbed else []),
        "Written by `scripts/bench_peers.py`. The same random weights for all, batch 1, a prompt of "
        f"{document['num_prompt_tokens']} tokens, {document['num_new_tokens']} tokens after it, "
        f"{document['num_threads']} threads. Medians (lowest-highest) over {document['num_rounds']} rounds "
        f"of fresh processes, in each of which all systems took {document['num_turns']} short turns, one "
        "system after the other; compare ratios, not milliseconds.",
        f"{document['date']}; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gb']:.0f} GB, {machine['system']}. Memory read at "
        f"{spread(document.get('bandwidth_gb_per_s'))} GB/s in the same turns. Other processes took up to "
        f"{document['largest_other_share']:.0%} of the processors while one was timed.",
        "## Bars",
        table(["what", "at most", "measured", "verdict"], judged),
    ]
    if "gpt2" in models:
        part = models["gpt2"]
        columns = {
            "prefill_ms": "prompt ms",
            "decode_ms": "ms a token",
            "decode_after_prompt_ms": "ms a token, same depth",
        }
        default = part["systems"].get(DEFAULT, {})
        parts += [
            f"## GPT-2 small (FP32 safetensors {_megabytes(part['source_bytes'])} MB)",
            _systems(part["systems"], columns),
            "llama-bench decodes from an empty cache; the last column of times has llama.cpp after a prompt "
            "of the same length, which is what all the others do. optimum's and onnxruntime's graphs compute "
            "logits for the whole prompt, the others for its last position. CTranslate2's prompt includes "
            "choosing the first token. OpenVINO runs with its defaults (where the processor has bfloat16, in "
            "that precision, with an 8-bit cache). make: the whole process from FP32 weights on disk to the "
            "artifact, the lowest of two runs.",
        ]
        if "floor_ms" in default:
            parts.append(
                f"Memory floor of the default scheme: {default['floor_ms']:.2f} ms a token, in which "
                f"{_megabytes(default['bytes_per_token'])} MB of weights, keys and values come from memory "
                "at the speed above."
            )
        if part.get("bare_peak_bytes"):
            parts.append(
                "quantkit's command on a model of two tiny blocks peaks at "
                f"{_megabytes(part['bare_peak_bytes'])} MB: the bare process with its imports."
            )
    for model, part in models.items():
        if model != "gpt2":
            parts += [
                f"## {model}, {document['num_prompt_tokens']} tokens "
                f"(FP32 safetensors {_megabytes(part['source_bytes'])} MB)",
                _systems(part["systems"], {"encode_ms": "ms"}),
            ]
    parts += ["## Versions", "\n".join(versions)]
    if reasons:
        parts += ["## Not measured", "\n".join(reasons)]
    return "\n\n".join(parts) + "\n"
