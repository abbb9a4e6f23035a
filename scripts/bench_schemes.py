#!/usr/bin/env python3
"""Every scheme on one model, side by side: size, accuracy against the original, times beside the float graph.

    .venv/bin/python scripts/bench_schemes.py [MODEL] [--max-tokens N]

The table goes to docs/benchmarks/schemes.md; every figure in it comes from `quantkit quantize` itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from quantkit.quantization import run
from quantkit.recipe import Recipe, override
from quantkit.report.quantization import report_json
from quantkit.schemes import SCHEMES

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "schemes.md"
COLUMNS = (
    "scheme",
    "size / float",
    "perplexity",
    "KL, nats",
    "same top token",
    "prompt / float",
    "token / float",
)


def row_of(name: str, report: dict) -> tuple[str, ...]:
    """One line of the table."""
    size, accuracy, latency = report["size"], report["accuracy"], report["latency"][0]
    perplexity, float_times = accuracy["perplexity"], latency["reference"]
    return (
        name,
        f"{size['artifact_bytes'] / size['reference_bytes']:.3f}",
        f"{100 * perplexity['increase']:+.2f} ± {100 * perplexity['increase_standard_error']:.2f}%",
        f"{accuracy['kl_divergence']:.2g} ± {accuracy['kl_standard_error']:.1g}",
        f"{accuracy['top1_agreement']:.2%}",
        f"{latency['prefill_ms'] / float_times['prefill_ms']:.2f}",
        f"{latency['decode_ms_per_token'] / float_times['decode_ms_per_token']:.2f}",
    )


def main() -> int:
    """Quantize and measure with each scheme, then write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--max-tokens", type=int, default=16384)
    arguments = parser.parse_args()
    lines, report = [], {}
    for name in SCHEMES:
        changes = {"model": arguments.model, "scheme": name, "measure.max_tokens": arguments.max_tokens}
        with tempfile.TemporaryDirectory() as folder:
            finished = run(
                override(Recipe(), {**changes, "measure.memory": False}), output=Path(folder) / "out"
            )
        report = report_json(finished.report)
        lines.append(f"| {' | '.join(row_of(name, report))} |")
    protocol, environment = report["accuracy"]["protocol"], report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    perplexity = report["accuracy"]["perplexity"]
    text = (
        f"# Every scheme on {arguments.model}\n\n"
        "Written by `scripts/bench_schemes.py`. Accuracy is against the original in transformers, float32 "
        f"(perplexity {perplexity['reference']:.2f} ± {perplexity['reference_standard_error']:.2f}), on "
        f"{protocol['num_tokens']:,} tokens of {protocol['text']}, window {protocol['window']}, stride "
        f"{protocol['stride']}. Times are medians, in turns with the same graph in float32 in one process; "
        "a prompt of 128 tokens, 32 after it.\n\n"
        f"{environment['processor']}, {environment['num_cores']} cores; {versions}.\n\n"
        f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}\n" + "\n".join(lines) + "\n"
    )
    OUTPUT.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
