#!/usr/bin/env python3
"""Greedy continuations by each target and provider, beside those of the original in transformers.

    .venv/bin/python scripts/bench_greedy.py [MODEL] [--sets 5] [--tokens 64] [--only ROW ...]

A continuation counts where all of its tokens are the original's: where one tie falls otherwise, it does not.
Prompts are 32 tokens of held-out text, evenly spaced. Results go to docs/benchmarks/greedy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import quantkit
from quantkit.runtime.generate import generate
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.session import open_session
from quantkit.runtime.tokenizer import open_text

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "benchmarks" / "greedy.md"
DEMO = Path(quantkit.__file__).parent / "assets" / "demo"
PROMPTS, PROMPT_TOKENS = 20, 32  # of a set, of a prompt
BAR, BAR_ROW = 0.9, "npu on qnn"
# Row -> (what quantize is told, the provider, the most sets that its speed allows).
ROWS: dict[str, tuple[tuple[str, ...], str, int]] = {
    "cpu, as it comes": ((), "cpu", 99),
    "openvino on cpu": (("--target", "openvino"), "cpu", 99),
    "npu on cpu": (("--target", "npu"), "cpu", 99),
    "npu on qnn": (("--target", "npu"), "qnn", 1),
}


def main() -> int:
    """Continue all prompts with all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(DEMO), help="a folder with a tokenizer")
    parser.add_argument("--text", type=Path, default=DEMO / "evaluation.txt")
    parser.add_argument("--sets", type=int, default=5, help=f"of {PROMPTS} prompts")
    parser.add_argument("--tokens", type=int, default=64, help="new ones")
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--continue-with", nargs=2, metavar=("DIR", "PROVIDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.continue_with:
        folder, provider = asked.continue_with
        json.dump(continued(Path(folder), provider, json.load(sys.stdin), asked.tokens), sys.stdout)
        return 0
    ids = np.array(open_text(Path(asked.model)).encode(asked.text.read_text(encoding="utf-8")))
    starts = np.arange(asked.sets * PROMPTS) * ((len(ids) - PROMPT_TOKENS) // (asked.sets * PROMPTS))
    prompts = np.stack([ids[start : start + PROMPT_TOKENS] for start in starts])
    wanted = original(asked.model, prompts, asked.tokens)
    found: dict[str, NDArray[np.bool_]] = {}
    with tempfile.TemporaryDirectory() as made:
        for row in asked.only:
            options, provider, most = ROWS[row]
            count = min(asked.sets, most) * PROMPTS
            folder = Path(made) / "-".join(("out", *options[1:]))
            if not folder.exists():
                run("-m", "quantkit.cli", "quantize", asked.model, "--no-eval", *options, "-o", str(folder))
            try:
                text = run(
                    __file__, "--tokens", str(asked.tokens), "--continue-with", str(folder), provider,
                    given=json.dumps(prompts[:count].tolist()), provider=provider,
                )  # fmt: skip
            except subprocess.CalledProcessError as error:
                print(f"{row}: left out: {error.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            found[row] = (np.array(json.loads(text.splitlines()[-1])) == wanted[:count]).all(axis=1)
            print(f"{row}: {sets_of(found[row])}")
    OUTPUT.write_text(page(asked, found), encoding="utf-8")
    return 0 if BAR_ROW not in found or found[BAR_ROW].mean() >= BAR else 1


def run(*command: str, given: str = "", provider: str = "") -> str:
    """What a Python process prints; on Qualcomm's emulator beside the environment that has it."""
    beside = str(ROOT / f".venv-{provider}") if (ROOT / f".venv-{provider}").is_dir() else ""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"} | ({"PYTHONPATH": beside} if beside else {})
    return subprocess.run(
        [sys.executable, *command], input=given, capture_output=True, text=True, check=True, env=environment
    ).stdout


def continued(folder: Path, provider: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """New tokens of an artifact for each prompt."""
    steps = generate(open_session(folder, provider=provider), prompts, max_new_tokens=count)
    return np.array(list(steps)).T.tolist()  # type: ignore[no-any-return]


@torch.inference_mode()
def original(model: str, prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The most likely tokens of the float model, one by one through its own cache."""
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    made, past, read = [], None, torch.from_numpy(prompts)
    for _ in range(count):
        out = module(read, past_key_values=past, use_cache=True)
        past, read = out.past_key_values, out.logits[:, -1:].argmax(-1)
        made.append(read[:, 0].numpy())
    return np.stack(made, axis=1)


def sets_of(equal: NDArray[np.bool_]) -> str:
    """How many of each set, and of all."""
    counts = equal.reshape(-1, PROMPTS).sum(axis=1)
    return f"{', '.join(map(str, counts))} of {PROMPTS}; {equal.mean():.0%} of {len(equal)}"


def page(asked: argparse.Namespace, found: dict[str, NDArray[np.bool_]]) -> str:
    """The table."""
    cpu, names = read_cpu(), ("onnxruntime", "transformers", "torch")
    lines = [f"| {row} | {sets_of(equal)} |" for row, equal in found.items()]
    reached = "" if BAR_ROW not in found else "reached" if found[BAR_ROW].mean() >= BAR else "**not reached**"
    bar = f"Bar: {BAR:.0%} of all prompts for {BAR_ROW}: {reached}.\n" if reached else ""
    return (
        "# Greedy continuations\n\nWritten by `scripts/bench_greedy.py`: "
        f"{asked.tokens} greedy tokens after {PROMPT_TOKENS} tokens of held-out text, all equal to those of "
        f"{Path(asked.model).name} in transformers, float32.\n\n"
        f"{cpu.model}, {cpu.num_threads} threads; "
        f"{', '.join(f'{name} {version(name)}' for name in names)}.\n\n"
        "| target and provider | prompts whose continuation is the original's |\n|---|---|\n"
        + "\n".join(lines)
        + f"\n\n{bar}"
    )


if __name__ == "__main__":
    sys.exit(main())
