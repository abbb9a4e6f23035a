#!/usr/bin/env python
"""One wide FFN beside its unshared twins: parameters, operations and bytes of real files.

Writes each model with seeded random weights, quantizes and exports it, and reads every figure off what lies
on disk or off quantkit's own specification; speed is not measured. The page goes to
docs/benchmarks/one-wide-ffn.md. https://arxiv.org/abs/2309.01826
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AlbertConfig, AlbertForMaskedLM

from quantkit.model.architectures.one_wide import OneWideConfig, OneWideForConditionalGeneration
from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.model_map import FFN_ROLES
from quantkit.model.weights.open import open_weights
from quantkit.pipeline.stages.export import WEIGHTS_FILE, ExportJob, export_dynamic
from quantkit.plan.cost.specification import specify
from quantkit.plan.select import choose

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "one-wide-ffn.md"
SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_decoder_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "ffn_kind": "standard",
    "hidden_act": "relu",
    "norm_kind": "layer_norm",
    "uses_bias": True,
    "pad_token_id": 0,
}
WIDTH = 1024
MODELS: dict[str, dict[str, Any]] = {
    "ordinary: an FFN in each of 12 layers": {"encoder_ffn": "own", "decoder_ffn": "own"},
    "unshared twin: an FFN in each of 6 encoder layers": {"encoder_ffn": "own", "decoder_ffn": "none"},
    "one FFN for the encoder, of the same width": {"encoder_ffn": "shared", "decoder_ffn": "none"},
    "one wide FFN: 12 times as wide": {"encoder_ffn": "shared", "decoder_ffn": "none", "times": 12},
}
ALBERT: dict[str, Any] = {
    "vocab_size": 8192,
    "embedding_size": 128,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MODELS |= {
    "ALBERT, unshared twin: 12 blocks": {"num_hidden_groups": 12},
    "ALBERT: one block run 12 times": {"num_hidden_groups": 1},
}
LENGTH = 128
SCHEME = "int8_block64"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one model comes to."""

    name: str
    parameters: int
    ffn_weights: int
    ffn_calls: int
    flops: float  # of one pass: LENGTH tokens read, LENGTH written
    ffn_flops: float
    float_bytes: int
    int8_bytes: int
    graph_bytes: int


def make(changes: dict[str, Any]) -> Any:
    """One model with seeded random weights."""
    torch.manual_seed(0)
    if "num_hidden_groups" in changes:
        return AlbertForMaskedLM(AlbertConfig(**ALBERT, **changes))
    changes = dict(changes)
    width = WIDTH * int(changes.pop("times", 1))
    return OneWideForConditionalGeneration(OneWideConfig(**SIZES, **changes, intermediate_size=width))


def measure(name: str, changes: dict[str, Any], folder: Path) -> Figures:
    """Write, quantize and export one model."""
    make(changes).save_pretrained(folder / "model")
    model_map = inspect(str(folder / "model"))
    source = open_source(str(folder / "model"))
    out = folder / "out"
    out.mkdir()
    job = ExportJob(
        model_map=model_map,
        plan=choose(model_map, min_dim=256),
        weights=open_weights(source, model_map, random_weights=False),
        scheme=SCHEME,
        single_file_bytes=0,
        original=folder / "model",
    )
    exported = export_dynamic(job, out)
    rows = specify(model_map, batch=1, length=LENGTH).rows
    ffns = [layer for layer in model_map.layers if layer.role in FFN_ROLES]
    return Figures(
        name=name,
        parameters=model_map.num_parameters,
        ffn_weights=sum(layer.num_weights for layer in ffns),
        ffn_calls=sum(layer.calls for layer in ffns) // 2,
        flops=2.0 * sum(row.macs for row in rows),
        ffn_flops=2.0 * sum(row.macs for row in rows if row.group == "ffn"),
        float_bytes=(folder / "model" / "model.safetensors").stat().st_size,
        int8_bytes=(out / WEIGHTS_FILE).stat().st_size,
        graph_bytes=sum(path.stat().st_size for path in exported.paths),
    )


def page(found: list[Figures]) -> str:
    """The whole page."""
    about = (
        "Written by `scripts/bench_one_wide.py`: an encoder-decoder of 6 + 6 layers, hidden size "
        f"{SIZES['hidden_size']}, FFN {WIDTH:,}, vocabulary {SIZES['vocab_size']:,} (one table for both "
        "halves and the head), and ALBERT of 12 depths of the same width; seeded random weights, "
        f"`{SCHEME}`. Bytes are those of files on disk; operations are those of `quantkit inspect --spec` "
        f"for {LENGTH} tokens read, and {LENGTH} written where there is a decoder, 2 a multiply-accumulate. "
        "A shared FFN is stored once in the checkpoint and once for the ONNX files, and its operations "
        "count each time it runs. Speed and accuracy were not measured here. "
        "[The paper](https://arxiv.org/abs/2309.01826)"
    )
    lines = [
        "# One wide FFN",
        "",
        textwrap.fill(about, 110, break_on_hyphens=False),
        "",
        "| model | parameters | in FFNs | FFN runs | GFLOP | in FFNs | float MB | INT8 MB | graphs MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found:
        cells = [
            each.name,
            f"{each.parameters:,}",
            f"{each.ffn_weights:,}",
            f"{each.ffn_calls}",
            f"{each.flops / 1e9:.2f}",
            f"{each.ffn_flops / 1e9:.2f}",
            *(f"{size / 1e6:.2f}" for size in (each.float_bytes, each.int8_bytes, each.graph_bytes)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    twin, shared = found[1], found[2]
    weights = twin.ffn_weights - shared.ffn_weights
    albert_twin, albert = found[4], found[5]
    each_float = (twin.float_bytes - shared.float_bytes) / weights
    each_int8 = (twin.int8_bytes - shared.int8_bytes) / weights
    gain = (
        f"Sharing alone (third row beside the second) leaves every operation and takes {weights:,} weights "
        f"away: {each_float:.3f} bytes for each in float, {each_int8:.3f} in INT8 with a float32 scale for "
        "each 64; biases and names in the header are counted in. ALBERT's one block does the work of twelve "
        f"({albert.flops / 1e9:.2f} GFLOP both ways) in {albert.int8_bytes / albert_twin.int8_bytes:.0%} of "
        "the INT8 bytes of its twin."
    )
    lines += ["", textwrap.fill(gain, 110, break_on_hyphens=False), ""]
    return "\n".join(lines)


def main() -> int:
    """Measure every model, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes")
    parser.add_argument("--json", action="store_true", help="print the figures, write no page")
    asked = parser.parse_args()
    found = []
    for name, changes in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
            found.append(measure(name, changes, Path(folder)))
            print(f"{name}: done", file=sys.stderr)
    if asked.json:
        print(
            json.dumps([{slot: getattr(each, slot) for slot in each.__slots__} for each in found], indent=2)
        )
    else:
        asked.page.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
