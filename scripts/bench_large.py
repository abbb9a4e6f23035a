#!/usr/bin/env python3
"""Quantize a checkpoint as large as Llama-2-7B (13 GB, random, sharded): how much memory, how fast.

    .venv/bin/python scripts/bench_large.py [--folder DIR] [--scheme NAME] [--layers 32] [--keep]

The shards are written by this script, one tensor at a time, so that the machine needs 22 GB of disk and
little memory. The command then runs in a process of its own, whose peak memory and time are the result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np

from quantkit.evaluation.memory import run_and_measure
from quantkit.model.load import known_config
from quantkit.runtime.machine.facts import read_cpu

ROOT = Path(__file__).resolve().parents[1]
SHARD_BYTES = 5 * 10**9
MEMORY_BAR_GB, SPEED_BAR_MB = 2.5, 100


def tensor_shapes(config: dict, layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama, in the order of the checkpoint."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(layers):
        block = f"model.layers.{index}"
        for name in "qkvo":
            shapes[f"{block}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"{block}.mlp.gate_proj.weight"] = shapes[f"{block}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{block}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input", "post_attention"):
            shapes[f"{block}.{name}_layernorm.weight"] = (hidden,)
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write_checkpoint(folder: Path, layers: int) -> int:
    """Shards of BF16 noise with an index; bytes written."""
    folder.mkdir(parents=True)
    config = {**(known_config("llama-2-7b") or {}), "num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in tensor_shapes(config, layers).items():
        size = 2 * int(np.prod(shape))
        if filled + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    random = np.random.default_rng(0)
    noise = (random.standard_normal(1 << 24, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, offset = {}, 0
        for name, shape in shard.items():
            size = 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[name] = file.name
        encoded = json.dumps(header).encode()
        with file.open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            for shape in shard.values():
                left, start = int(np.prod(shape)), int(random.integers(len(noise)))
                while left:  # another piece of the same noise each time
                    piece = noise[start : start + left]
                    piece.tofile(out)
                    left, start = left - len(piece), 0
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main() -> int:
    """Write, quantize, load, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quantkit-large"))
    parser.add_argument("--scheme", default="int8_block64")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint and the artifact")
    arguments = parser.parse_args()
    source, artifact = arguments.folder / "source", arguments.folder / "artifact"
    if not source.exists():
        print(f"writing {arguments.layers} layers into {source}", file=sys.stderr)
        write_checkpoint(source, arguments.layers)
    source_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    bare = run_and_measure([sys.executable, "-c", "import quantkit.pipeline.quantize"])
    command = [sys.executable, "-m", "quantkit.cli", "quantize", str(source), "--scheme", arguments.scheme]
    ran = run_and_measure([*command, "--no-eval", "--force", "-o", str(artifact)])
    if ran.exit_code:
        print(ran.errors, file=sys.stderr)
        return 1
    trial = [sys.executable, "-m", "quantkit.runtime.memory_trial", "run", str(artifact), "8", "4", "2"]
    started = time.perf_counter()
    loaded = run_and_measure(trial)
    artifact_bytes = sum(path.stat().st_size for path in artifact.iterdir())
    speed = source_bytes / 1e6 / ran.seconds
    result = {
        "model": f"Llama-2-7B shape, {arguments.layers} layers, BF16",
        "scheme": arguments.scheme,
        "source_bytes": source_bytes,
        "artifact_bytes": artifact_bytes,
        "seconds": round(ran.seconds, 1),
        "source_mb_per_s": round(speed, 1),
        "peak_bytes": ran.peak_bytes,
        "bare_process_bytes": bare.peak_bytes,
        "loads_and_runs": loaded.exit_code == 0,
        "load_and_run_seconds": round(time.perf_counter() - started, 1),
        "load_peak_bytes": loaded.peak_bytes,
        "machine": read_cpu().model,
        "versions": {name: version(name) for name in ("quantkit-onnx", "numpy", "onnxruntime", "torch")},
        "bars": {
            f"peak <= {MEMORY_BAR_GB} GB": ran.peak_bytes <= MEMORY_BAR_GB * 1e9,
            f">= {SPEED_BAR_MB} MB/s of source": speed >= SPEED_BAR_MB,
            "the result loads and runs": loaded.exit_code == 0,
        },
    }
    out = ROOT / "docs" / "benchmarks" / "large.json"
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    if not arguments.keep:
        shutil.rmtree(arguments.folder)
    return 0 if all(result["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
