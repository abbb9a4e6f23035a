#!/usr/bin/env python3
"""GPTQ beside llm-compressor: the same released model, calibration tokens, bits and groups; seconds and loss.

    .venv/bin/python scripts/bench_gptq.py --peer PYTHON [--windows 16] [--cache FOLDER] [--rounds 3]

PYTHON is the interpreter of an environment with llm-compressor. Both quantize SmolLM2-135M to 4 bits in
groups of 32, symmetric, and leave the head float. Seconds are those of calibration and rounding, without
imports and loading; the machine should be idle. A call that was given the most runs, or was interrupted, is
continued by the next one. Results go to docs/benchmarks/gptq.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from peers.released import float_model, obey, tokens_of

from quantkit import load, quantize
from quantkit.evaluation.accuracy import Ints, Logits, measure_accuracy
from quantkit.evaluation.measure import environment
from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.reference import reference_logits
from quantkit.model.weights.open import with_weights
from quantkit.pipeline.options import Options, with_options
from quantkit.pipeline.stages.calibration_text import calibration_windows
from quantkit.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "gptq"
PEER = ROOT / "scripts" / "peers" / "llm_compressor_gptq.py"
MODEL = "smollm2-135m-instruct"
LENGTH = 512
OFF: Options = {"accuracy": False, "latency": False, "memory": False}
OURS: dict[str, Options] = {
    "quantkit, gptq": {"transforms": []},
    "quantkit, gptq and smoothing (the default)": {},
}


def stored(path: Path) -> Logits:
    """Logits [1, T, V] in the order in which the windows are read."""
    rows = iter(np.load(path, mmap_mode="r"))
    return lambda _: np.asarray(next(rows))[None]


def accuracy_of(reference: Logits, quantized: Logits, windows_NT: Ints) -> dict[str, Any]:
    length = windows_NT.shape[1]
    return asdict(
        measure_accuracy(
            reference=reference,
            quantized=quantized,
            token_ids=windows_NT.reshape(-1),
            window=length,
            stride=length,
            text="prose",
        )
    )


def run_ours(source: Path, calibration: Path, folder: Path, options: Options) -> float:
    """Seconds of quantizing; transforms count."""
    quantize(
        source,
        calibration=calibration,
        output=folder,
        force=True,
        resume=False,
        scheme="int4_block32",
        layers={"lm_head": "float"},
        calibration_length=LENGTH,
        **{**options, **OFF},
    )
    seconds = json.loads((folder / "report.json").read_text())["seconds"]
    return sum(value for name, value in seconds.items() if name not in ("float reference", "float check"))


def table(rows: dict[str, Any], peer: str) -> str:
    lines = [
        "|  | seconds | of the peer's | KL divergence | top-1 | perplexity |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for label, row in rows.items():
        prose = row["accuracy"]
        lines.append(
            f"| {label} | {row['seconds']:.1f} | {row['seconds'] / rows[peer]['seconds']:.2f} | "
            f"{prose['kl_divergence']:.4f} | {prose['top1_agreement']:.1%} | {prose['increase']:+.1%} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="Python with llm-compressor")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quantkit-real")
    parser.add_argument("--most", type=int, default=99, help="runs of this call")
    parser.add_argument("--again", action="store_true", help="forget the runs of earlier calls")
    arguments = parser.parse_args()
    cache = arguments.cache.expanduser().resolve()
    source = float_model(cache, MODEL)
    work = cache / "gptq"
    work.mkdir(parents=True, exist_ok=True)
    calibration, evaluation, outputs = (work / f"{name}.npy" for name in ("calibration", "prose", "logits"))
    recipe = with_options(
        Recipe(model=str(source)),
        {"calibration_windows": arguments.windows, "calibration_length": LENGTH},
    )
    np.save(calibration, calibration_windows(recipe, open_source(str(source)), inspect(str(source))))
    windows_NT = tokens_of(cache, source, None)["prose"]
    np.save(evaluation, windows_NT)
    versions = "import importlib.metadata as m; print(m.version('llmcompressor'), m.version('torch'))"
    number, torch_version = obey(arguments.peer, "-c", versions).split()
    peer = f"llm-compressor {number}"
    kept = work / f"seconds-{arguments.windows}.json"
    seconds: dict[str, list[float]] = {label: [] for label in (peer, *OURS)}
    if kept.exists() and not arguments.again:
        seconds |= json.loads(kept.read_text())
    for _ in range(arguments.most):
        label = min(seconds, key=lambda label: len(seconds[label]))  # in turns
        if len(seconds[label]) >= arguments.rounds:
            break
        if label == peer:
            answer = obey(arguments.peer, PEER, source, calibration, evaluation, outputs).splitlines()[-1]
            taken = json.loads(answer)["seconds"]
        else:
            index = [*OURS].index(label)
            several: Options = {**OURS[label], "calibration_windows": arguments.windows}
            taken = run_ours(source, calibration, work / f"out{index}", several)
        seconds[label].append(taken)
        kept.write_text(json.dumps(seconds))
        print({label: [round(value, 1) for value in values] for label, values in seconds.items()}, flush=True)
    if min(map(len, seconds.values())) < arguments.rounds:
        return 0
    reference = reference_logits(with_weights(open_source(str(source)), random_weights=False))
    sessions = {peer: stored(outputs)}
    for index, label in enumerate(OURS):
        sessions[label] = load(work / f"out{index}").session.logits
    rows = {
        label: {
            "seconds": statistics.median(seconds[label]),
            "all_seconds": seconds[label],
            "accuracy": accuracy_of(reference, logits, windows_NT),
        }
        for label, logits in sessions.items()
    }
    machine = asdict(environment())
    results = {
        "environment": machine,
        "peer_torch": torch_version,
        "windows": arguments.windows,
        "rows": rows,
    }
    PAGE.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    text = [
        "# GPTQ beside llm-compressor",
        f"Written by `scripts/bench_gptq.py`. {MODEL}, float32, {arguments.windows} windows of {LENGTH} "
        "tokens of the bundled calibration text, 4 bits in groups of 32, symmetric, the head float. Seconds "
        "of calibration, transforms and rounding, without imports and loading; medians of "
        f"{arguments.rounds} rounds in turns. Loss on {windows_NT.size:,} tokens of prose that neither has "
        "seen, beside the float32 model.",
        f"{machine['processor']}, {machine['num_cores']:g} cores; torch {torch_version}.",
        table(rows, peer),
    ]
    PAGE.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    print(table(rows, peer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
