#!/usr/bin/env python3
"""INT4 with GPTQ on GPT-2 shapes, random weights, 32 x 512 tokens: peak memory and time, and how they grow.

    .venv/bin/python scripts/bench_calibration.py

Each shape runs as `quantkit quantize` in a process of its own. Results go to docs/benchmarks/calibration.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from quantkit.evaluation.memory import run_and_measure
from quantkit.model.load import known_config
from quantkit.runtime.machine.facts import read_cpu

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "calibration.md"
SHAPES = ((12, 768), (6, 768), (12, 384))  # layers, width
ALLOWED_BYTES = 10**9  # above the model in float32
IMPORTS = "import torch, transformers, onnx, onnxruntime, quantkit.pipeline.quantize"


def main() -> int:
    """Quantize each shape, and write the table."""
    bare = run_and_measure([sys.executable, "-c", IMPORTS]).peak_bytes
    lines, holds = [], True
    for layers, width in SHAPES:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made) / f"gpt2-{layers}x{width}"
            folder.mkdir()
            config = {
                **(known_config("gpt2") or {}),
                "n_layer": layers,
                "n_embd": width,
                "n_head": width // 64,
            }
            (folder / "config.json").write_text(json.dumps(config))
            ran = run_and_measure(
                [
                    sys.executable, "-m", "quantkit.cli", "quantize", str(folder), "--random-weights",
                    "--json", "--scheme", "int4_block32", "--no-eval", "--no-resume",
                    "-o", str(Path(made) / "out"),
                ]
            )  # fmt: skip
            if ran.exit_code:
                raise RuntimeError(ran.errors.strip()[-400:])
            seconds = json.loads(ran.output)["seconds"]
        parameters = 12 * layers * width**2 + (50257 + 1024) * width
        above = ran.peak_bytes - bare - 4 * parameters
        holds = holds and above <= ALLOWED_BYTES
        lines.append(
            f"| {layers} x {width} | {4 * parameters / 1e6:.0f} | {ran.peak_bytes / 1e6:.0f} | "
            f"{above / 1e6:.0f} | {seconds['calibration']:.0f} | "
            f"{seconds.get('weights of outputs', 0):.0f} | {seconds['quantize and export']:.0f} |"
        )
    cpu = read_cpu()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "onnxruntime"))
    text = (
        "# Calibration and GPTQ: memory and time\n\n"
        "Written by `scripts/bench_calibration.py`: GPT-2 shapes, random weights, 32 windows of 512 tokens, "
        "`int4_block32` fitted by GPTQ, no evaluation; each in a process of its own. Imports alone peak at "
        f"{bare / 1e6:.0f} MB.\n\n{cpu.model}, {cpu.num_threads} threads; {versions}.\n\n"
        "| layers x width | FP32 model, MB | peak, MB | peak less imports and FP32 model, MB "
        "| calibration, s | weights of outputs, s | quantize and export, s |\n"
        "|---|---:|---:|---:|---:|---:|---:|\n"
        + "\n".join(lines)
        + "\n\nBar: at most 1,000 MB above imports and the float32 model: "
        f"{'reached' if holds else '**not reached**'}.\n"
    )
    OUTPUT.write_text(text, encoding="utf-8")
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
