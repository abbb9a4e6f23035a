#!/usr/bin/env python3
"""Calibration and GPTQ of one model on 1, 2 and more workers of one thread: seconds, and equal bytes.

    .venv/bin/python scripts/bench_workers.py [--workers 1 2 4] [--rounds 2] [--most RUNS]

A random Llama of 98M parameters is quantized with `--scheme int4`, 16,384 tokens of random ids, without
smoothing and measurements; every run is a process of its own. Results go to docs/benchmarks/workers.md and
.json; a call that was given the most runs, or was interrupted, is continued by the next one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from other_programs import others
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit import quantize
from quantkit.evaluation.memory import run_and_measure
from quantkit.runtime.machine.facts import read_cpu

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "workers.md"
SHAPE = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12}
STAGES = ("calibration", "quantize and export")
BAR = 1.7  # of two workers beside one


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, vocab_size=4096, max_position_embeddings=1024, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(1, 4096, 40_000))


def quantize_one(folder: str, workers: str) -> None:
    """Quantizes in this process, and prints seconds of the stages and a hash of graph and weights."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        output = Path(temporary) / "out"
        quantize(
            Path(folder) / "model",
            output=output,
            calibration=Path(folder) / "ids.npy",
            scheme="int4",
            transforms=[],
            accuracy=False,
            latency=False,
            memory=False,
            resume=False,
            workers=int(workers),
        )
        seconds = json.loads((output / "report.json").read_text())["seconds"]
        digest = hashlib.sha256()
        for path in sorted(
            path for path in output.iterdir() if path.suffix in (".onnx", ".data", ".safetensors")
        ):
            digest.update(path.read_bytes())
    print(json.dumps({"seconds": sum(seconds[stage] for stage in STAGES), "hash": digest.hexdigest()[:16]}))


def measure(folder: Path, workers: int) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", str(folder), str(workers)]
    with others() as cores_of_others:
        ran = run_and_measure(command, environment=environment)
    if ran.exit_code:
        raise SystemExit(ran.errors[-600:])
    measured = json.loads(ran.output.splitlines()[-1])
    return {**measured, "peak_bytes": ran.peak_bytes, "cores_of_others": cores_of_others()}


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        quantize_one(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--most", type=int, default=99, help="runs of this call")
    parser.add_argument("--again", action="store_true", help="forget the runs of earlier calls")
    arguments = parser.parse_args()
    kept = PAGE.with_suffix(".json")
    runs: dict[int, list[dict[str, Any]]] = {number: [] for number in arguments.workers}
    if kept.exists() and not arguments.again:
        runs |= {int(number): results for number, results in json.loads(kept.read_text()).items()}
    with tempfile.TemporaryDirectory(prefix="quantkit-") as temporary:
        write_model(Path(temporary))
        for _ in range(arguments.most):
            number = min(runs, key=lambda number: len(runs[number]))  # in turns
            if len(runs[number]) >= arguments.rounds:
                break
            runs[number].append(measure(Path(temporary), number))
            print(number, runs[number][-1], flush=True)
            kept.write_text(json.dumps(runs, indent=1) + "\n")
    if min(map(len, runs.values())) < arguments.rounds:
        return 0
    medians = {
        number: statistics.median(run["seconds"] for run in results) for number, results in runs.items()
    }
    first = next(iter(medians.values()))
    rows = [
        f"| {number} | {medians[number]:.1f} | {first / medians[number]:.2f} | "
        f"{max(run['peak_bytes'] for run in results) / 1e6:.0f} | "
        f"{max(run['cores_of_others'] for run in results):.2f} | `{results[0]['hash']}` |"
        for number, results in runs.items()
    ]
    hashes = {run["hash"] for results in runs.values() for run in results}
    cpu = read_cpu()
    PAGE.write_text(
        "# One model on several workers\n\n"
        "Written by `scripts/bench_workers.py`. A random Llama of 98M parameters, `--scheme int4` by GPTQ, "
        "16,384 tokens, no smoothing or measurements, one thread a worker; each run in a process of its own, "
        f"medians of {arguments.rounds} rounds. Peak memory is that of the largest process, "
        "others are programs beside it.\n\n"
        f"{cpu.model}, {cpu.usable_cores:g} cores; torch {version('torch')}, numpy {version('numpy')}.\n\n"
        "| workers | calibration and rounding, s | times as fast | peak MB | others, cores | hash |\n"
        "|---:|---:|---:|---:|---:|---|\n" + "\n".join(rows) + "\n"
    )
    print(PAGE.read_text())
    return 0 if len(hashes) == 1 and first / medians.get(2, first) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
