#!/usr/bin/env python3
"""Minutes and peak memory that a dry run predicts, beside those of the run itself.

    .venv/bin/python scripts/bench_dry_run.py [--cases NAME ...] [--encoder FOLDER] [--output FILE]

Each case is a dry run and then the run, in processes of their own with the same options. `llama-1b` has
random weights in bfloat16, 16 layers of 2048 x 5632, and demo's tokenizer; it needs 12 GB of memory and disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.evaluation.memory import ChildRun, run_and_measure
from quantkit.runtime.machine.facts import read_cpu

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "quantkit" / "assets" / "demo"
BAR = 1.5  # of either ratio
FEW_TOKENS = "measure: {max_tokens: 512, prompt: 32, decode: 4, seconds: 10.0}\n"


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    options: tuple[str, ...] = ()
    recipe: str = ""


CASES = {
    "demo": Case(model="demo"),
    "demo, --no-eval": Case(model="demo", options=("--no-eval",)),
    "npu": Case(model="demo", options=("--target", "npu")),
    "encoder": Case(model="encoder"),
    "llama-1b": Case(model="llama-1b", recipe=FEW_TOKENS),
    "llama-1b, --no-eval": Case(model="llama-1b", options=("--no-eval",)),
}


def write_llama(folder: Path) -> None:
    """Random weights in the shape of Llama 3.2 1B, with a vocabulary of 32,000."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, folder / name)


def measure_case(case: Case, model: str, folder: Path) -> dict[str, float]:
    """Predicted and actual figures of one case, and the load before it."""
    command = [
        sys.executable,
        "-m",
        "quantkit.cli",
        "quantize",
        model,
        "-o",
        str(folder / "out"),
        *case.options,
    ]
    if case.recipe:
        (folder / "recipe.yaml").write_text(case.recipe)
        command += ["--recipe", str(folder / "recipe.yaml")]
    load = os.getloadavg()[0]
    forecast = json.loads(_finished([*command, "--dry-run", "--json"]).output)
    ran = _finished(command)
    shutil.rmtree(folder / "out")
    return {
        "predicted_minutes": forecast["minutes"],
        "actual_minutes": ran.seconds / 60,
        "minutes_ratio": forecast["minutes"] * 60 / ran.seconds,
        "predicted_mb": forecast["peak_bytes"] / 1e6,
        "actual_mb": ran.peak_bytes / 1e6,
        "memory_ratio": forecast["peak_bytes"] / ran.peak_bytes,
        "load": load,
    }


def _finished(command: list[str]) -> ChildRun:
    ran = run_and_measure(command)
    if ran.exit_code:
        raise SystemExit(f"{' '.join(command)}: {ran.errors[-400:]}")
    return ran


def page_of(cases: dict[str, dict[str, float]]) -> str:
    lines = [
        "| case | minutes, predicted | actual | ratio | peak MB, predicted | actual | ratio | load before |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in cases.items():
        cells = (
            name,
            *(f"{row[key]:.2f}" for key in ("predicted_minutes", "actual_minutes", "minutes_ratio")),
            *(f"{row[key]:,.0f}" for key in ("predicted_mb", "actual_mb")),
            f"{row['memory_ratio']:.2f}",
            f"{row['load']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["demo", "npu"])
    parser.add_argument("--encoder", help="a folder such as all-MiniLM-L6-v2")
    parser.add_argument("--llama", type=Path, help="a folder that keeps the random checkpoint")
    parser.add_argument("--output", type=Path, help="a JSON file, to which the cases are added")
    arguments = parser.parse_args()
    if any(CASES[name].model == "encoder" for name in arguments.cases) and not arguments.encoder:
        parser.error("the case 'encoder' needs --encoder FOLDER")
    cpu = read_cpu()
    results = {"processor": cpu.model, "cores": cpu.usable_cores, "cases": {}}
    if arguments.output and arguments.output.exists():
        results = json.loads(arguments.output.read_text())
    with tempfile.TemporaryDirectory(prefix="quantkit-") as temporary:
        folder = Path(temporary)
        llama = arguments.llama or folder / "llama-1b"
        models = {"encoder": arguments.encoder, "llama-1b": str(llama)}
        for name in arguments.cases:
            case = CASES[name]
            if case.model == "llama-1b" and not llama.exists():
                write_llama(llama)
            results["cases"][name] = measure_case(case, models.get(case.model, case.model), folder)
            print(page_of({name: results["cases"][name]}), flush=True)
    ratios = [row[key] for row in results["cases"].values() for key in ("minutes_ratio", "memory_ratio")]
    num_within = sum(1 / BAR <= ratio <= BAR for ratio in ratios)
    print(f"\n{page_of(results['cases'])}\n\n{num_within} of {len(ratios)} ratios within {BAR}")
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
