#!/usr/bin/env python3
"""Every way to quantize one model, side by side, and the bars that they are to reach.

    .venv/bin/python scripts/bench_accuracy.py [MODEL] [--text FILE] [--outliers] [--only NAME ...]

With --outliers the model first gets outlier channels that do not change its function. Tables go to
docs/benchmarks/accuracy-MODEL.md and .json; every figure in them comes from `quantkit quantize` itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from make_outliers import make_outliers

from quantkit.pipeline.quantize import quantize
from quantkit.recipe import Recipe, override
from quantkit.report.document import report_json

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
OUTLIERS = "outlier"
SMOOTH = {"transforms": ["smoothquant"]}
PLAIN = {"transforms": []}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "INT8, default": {},
    "INT8 block 128, rounded": {"scheme": "int8_block128", **PLAIN},
    "INT8 block 64": {"scheme": "int8_block64", **PLAIN},
    "INT8 block 32": {"scheme": "int8_block32", **PLAIN},
    "INT8 block 16": {"scheme": "int8_block16", **PLAIN},
    "INT8 block 128, smoothed": {"scheme": "int8_block128", **SMOOTH},
    "INT8 channel, by tensor": {"scheme": "int8_channel", **PLAIN},
    "INT8 channel, by tensor, smoothed": {"scheme": "int8_channel", **SMOOTH},
    "INT8 channel, mixed": {"scheme": "int8_mixed", **PLAIN},
    "INT8 channel, by token": {"scheme": "int8_token", **PLAIN},
    "INT8 channel, by token, smoothed": {"scheme": "int8_token", **SMOOTH},
    "INT8 channel, static 16": {"scheme": "int8_static16", **PLAIN},
    "INT8 channel, static 8": {"scheme": "int8_static8", **PLAIN},
    "INT8 channel, static 8, smoothed": {"scheme": "int8_static8", **SMOOTH},
    "INT4 block 32, rounded": {"scheme": "int4_block32", "fit": "rtn", **PLAIN},
    "INT4 block 32, mse": {"scheme": "int4_block32", "fit": "mse", **PLAIN},
    "INT4 block 32, output": {"scheme": "int4_block32", "fit": "output", **PLAIN},
    "INT4 block 32, GPTQ": {"scheme": "int4_block32", "fit": "gptq", **PLAIN},
    "INT4 block 32, GPTQ, bias": {"scheme": "int4_block32", "fit": "gptq", "bias_correction": True, **PLAIN},
    "INT4 block 32, AWQ, GPTQ": {"scheme": "int4_block32", "fit": "gptq", "transforms": ["awq"]},
    "INT4 block 32, smoothed, GPTQ": {"scheme": "int4_block32", "fit": "gptq", **SMOOTH},
    "INT4 block 32 zeros, GPTQ": {"scheme": "int4_block32_zeros", "fit": "gptq", **PLAIN},
    "INT4 block 128, rounded": {"scheme": "int4_block128", "fit": "rtn", **PLAIN},
    "INT4 block 128, GPTQ": {"scheme": "int4_block128", "fit": "gptq", **PLAIN},
    "budget: +0.5%, size": {"budget.max_ppl_increase": 0.005},
    "budget: KL 0.002, size": {"budget.max_kl": 0.002},
    "budget: KL 0.002, speed": {"budget.max_kl": 0.002, "budget.prefer": "speed"},
}
COLUMNS = (
    "configuration",
    "size / float",
    "perplexity",
    "KL, nats",
    "same top token",
    "prompt / float",
    "token / float",
)
Reports = Mapping[str, Mapping[str, Any]]


def increase(reports: Reports, name: str) -> float:
    """Of the perplexity."""
    return float(reports[name]["accuracy"]["perplexity"]["increase"])


def kl(reports: Reports, name: str) -> float:
    """Nats."""
    return float(reports[name]["accuracy"]["kl_divergence"])


def size(reports: Reports, name: str) -> float:
    """Of the float graph."""
    sizes = reports[name]["size"]
    return float(sizes["artifact_bytes"] / sizes["reference_bytes"])


# What is to be reached: (names of the rows it needs, in words, measured, allowed at most)
BARS: tuple[tuple[tuple[str, ...], str, Callable[[Reports], float], float], ...] = (
    (("INT8, default",), "default INT8: perplexity", lambda r: increase(r, "INT8, default"), 0.005),
    (("INT8, default",), "default INT8: KL", lambda r: kl(r, "INT8, default"), 0.003),
    (
        ("INT8, default",),
        "default INT8: 1 - top-1 agreement",
        lambda r: 1 - float(r["INT8, default"]["accuracy"]["top1_agreement"]),
        0.035,
    ),
    (
        ("INT8 channel, by token, smoothed",),
        "per channel, by token, smoothed: perplexity",
        lambda r: increase(r, "INT8 channel, by token, smoothed"),
        0.01,
    ),
    (
        ("INT8 channel, by token, smoothed", "INT8 channel, by tensor"),
        "the same: KL beside per tensor without smoothing (outlier model)",
        lambda r: kl(r, "INT8 channel, by token, smoothed") / kl(r, "INT8 channel, by tensor"),
        0.25,
    ),
    (
        ("INT8 channel, static 16",),
        "static 16-bit: perplexity",
        lambda r: increase(r, "INT8 channel, static 16"),
        0.01,
    ),
    (
        ("INT8 channel, static 8, smoothed",),
        "static 8-bit, smoothed: perplexity",
        lambda r: increase(r, "INT8 channel, static 8, smoothed"),
        0.05,
    ),
    (
        ("INT4 block 32, GPTQ", "INT4 block 32, rounded"),
        "INT4 GPTQ: perplexity increase beside plain rounding's",
        lambda r: increase(r, "INT4 block 32, GPTQ") / increase(r, "INT4 block 32, rounded"),
        0.5,
    ),
    (
        ("INT4 block 32, GPTQ", "INT4 block 32, rounded"),
        "INT4 GPTQ: KL beside plain rounding's",
        lambda r: kl(r, "INT4 block 32, GPTQ") / kl(r, "INT4 block 32, rounded"),
        0.5,
    ),
    (("INT4 block 32, GPTQ",), "INT4 GPTQ: size", lambda r: size(r, "INT4 block 32, GPTQ"), 0.19),
    (
        ("budget: +0.5%, size",),
        "budget of +0.5%: perplexity on unseen text",
        lambda r: increase(r, "budget: +0.5%, size"),
        0.005,
    ),
)


def row_of(name: str, report: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    accuracy, latency = report["accuracy"], report["latency"][0]
    perplexity, float_times = accuracy["perplexity"], latency["reference"]
    return (
        name,
        f"{report['size']['artifact_bytes'] / report['size']['reference_bytes']:.3f}",
        f"{100 * perplexity['increase']:+.2f} ± {100 * perplexity['increase_standard_error']:.2f}%",
        f"{accuracy['kl_divergence']:.2g} ± {accuracy['kl_standard_error']:.1g}",
        f"{accuracy['top1_agreement']:.2%}",
        f"{latency['prefill_ms'] / float_times['prefill_ms']:.2f}",
        f"{latency['decode_ms_per_token'] / float_times['decode_ms_per_token']:.2f}",
    )


def page_of(title: str, reports: Reports) -> str:
    """The table and the bars, as Markdown."""
    last = list(reports.values())[-1]
    protocol, environment = last["accuracy"]["protocol"], last["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    perplexity = last["accuracy"]["perplexity"]
    lines = [f"| {' | '.join(row_of(name, report))} |" for name, report in reports.items()]
    bars = []
    for needed, words, measured, allowed in BARS:
        is_about_outliers = OUTLIERS in words  # says nothing of a model without any
        if all(each in reports for each in needed) and (not is_about_outliers or OUTLIERS in title):
            value = measured(reports)
            bars.append(
                f"| {words} | {allowed:g} | {value:.4g} | {'yes' if value <= allowed else '**no**'} |"
            )
    return (
        f"# Accuracy of {title}\n\n"
        "Written by `scripts/bench_accuracy.py`. Accuracy is against the original in transformers, float32 "
        f"(perplexity {perplexity['reference']:.2f} ± {perplexity['reference_standard_error']:.2f}), on "
        f"{protocol['num_tokens']:,} tokens of {protocol['text']}, window {protocol['window']}, stride "
        f"{protocol['stride']}. Times are medians, in turns with the same graph in float32 in one process; "
        "a prompt of 128 tokens, 32 after it.\n\n"
        f"{environment['processor']}, {environment['num_cores']} cores; {versions}.\n\n"
        f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}\n" + "\n".join(lines) + "\n\n"
        "| bar | at most | measured | reached |\n|---|---:|---:|---|\n" + "\n".join(bars) + "\n"
    )


def main() -> int:
    """Quantize and measure in each way, then write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--text", help="a text to measure on; without it the bundled held-out text")
    parser.add_argument("--calibration-text", help="a text to calibrate on; without it the bundled split")
    parser.add_argument("--max-tokens", type=int, default=16384)
    parser.add_argument("--outliers", action="store_true", help="give the model outlier channels first")
    parser.add_argument("--only", nargs="*", help="these configurations alone")
    arguments = parser.parse_args()
    name = Path(arguments.model).name
    with tempfile.TemporaryDirectory() as made:
        model = arguments.model
        if arguments.outliers:
            model, name = str(Path(made) / f"{name}-outliers"), f"{name}-outliers"
            make_outliers(arguments.model, Path(model))
        common = {
            "model": model,
            "measure.max_tokens": arguments.max_tokens,
            "measure.memory": False,
            "measure.text": arguments.text,
            "calibration.text": arguments.calibration_text,
        }
        stored = FOLDER / f"accuracy-{name}.json"
        reports: dict[str, Any] = {}
        if arguments.only and stored.exists():  # measured before, and kept beside what is measured now
            reports = json.loads(stored.read_text(encoding="utf-8"))
        for label in arguments.only or CONFIGURATIONS:
            recipe = override(Recipe(), {**common, **CONFIGURATIONS[label]})
            finished = quantize(recipe=recipe, output=Path(made) / "out", force=True, quiet=False)
            reports[label] = report_json(finished.report)
            print(" | ".join(row_of(label, reports[label])), flush=True)
    reports = {label: reports[label] for label in CONFIGURATIONS if label in reports}
    text = page_of(name, reports)
    (FOLDER / f"accuracy-{name}.md").write_text(text, encoding="utf-8")
    kept = {label: {**report, "layer_losses": None} for label, report in reports.items()}
    (FOLDER / f"accuracy-{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
