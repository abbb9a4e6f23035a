#!/usr/bin/env python3
"""Train a small decoder with wsFFN twice, with its auxiliary losses and without, and show what they do.

    .venv/bin/python scripts/train_ws_ffn.py [-o ws-ffn] [--steps 300] [--seed 0]

Both runs start from the same weights and read the same windows of the demo's calibration split; the bundled
evaluation text is held out. Then steps of finetuning without the losses are timed against a plain gated FFN
of the same size, one step of each in turn, and both models are quantized as `quantkit quantize` does by
default. The trained models stay in `-o`; curves and tables go to docs/benchmarks/ws-ffn.md, .svg and .json.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ws_ffn_page import write_page

from quantkit.model.architectures.reference import ReferenceConfig, ReferenceForCausalLM
from quantkit.model.architectures.ws_ffn import WsFfnConfig, WsFfnForCausalLM, cosine_similarities
from quantkit.model.companions import tokenizer_files
from quantkit.model.load import open_source
from quantkit.pipeline.quantize import quantize
from quantkit.recipe import Recipe, override
from quantkit.report.document import report_json
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.tokenizer import open_text

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NUM_LATENT_HEADS = 12
BATCH, LENGTH = 8, 96
LEARNING_RATE, WEIGHT_DECAY, WARM_UP = 1e-3, 0.1, 20
HELD_OUT_WINDOWS = 16
DIFFERENT, BY_TOKEN = "different heads of a window", "different heads of a token"
SAME = "the same head of different windows"
RUNS = {"with losses": True, "without losses": False}


def windows(tokens: np.ndarray, rng: np.random.Generator, count: int = BATCH) -> torch.Tensor:
    """Random windows of a text."""
    starts = rng.integers(0, len(tokens) - LENGTH, count)
    return torch.from_numpy(np.stack([tokens[start : start + LENGTH] for start in starts]))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW, decaying matrices alone."""
    wide = [each for each in model.parameters() if each.dim() > 1]
    narrow = [each for each in model.parameters() if each.dim() == 1]
    groups = [{"params": wide, "weight_decay": WEIGHT_DECAY}, {"params": narrow, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> dict[str, float]:
    """One step of training; the losses that it was taken on."""
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses = getattr(output, "losses", None) or {"total": output.loss, "main": output.loss}
    return {name: loss.item() for name, loss in losses.items()}


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Mean loss in nats a token."""
    model.eval()
    losses = [model(input_ids=part, labels=part, use_cache=False).loss.item() for part in ids.split(BATCH)]
    model.train()
    return statistics.fmean(losses)


@torch.no_grad()
def head_similarity(model: WsFfnForCausalLM, ids: torch.Tensor) -> dict[str, float]:
    """Mean |cosine| of latents: different heads of a window and of a token, and one head of two windows."""
    model.eval()
    found: dict[str, list[float]] = {DIFFERENT: [], BY_TOKEN: [], SAME: []}
    for z_BLHZ in model.latents(ids):
        means_BHZ, tokens_THZ = z_BLHZ.mean(1), z_BLHZ[:, ::8].flatten(0, 1)
        for name, groups in (
            (DIFFERENT, means_BHZ),
            (BY_TOKEN, tokens_THZ),
            (SAME, means_BHZ.transpose(0, 1)),
        ):
            others = ~torch.eye(groups.shape[1], dtype=torch.bool)
            found[name] += [cosine_similarities(rows)[others].abs().mean().item() for rows in groups]
    model.train()
    return {name: statistics.fmean(values) for name, values in found.items()}


def drift_of(model: WsFfnForCausalLM) -> float:
    """The share of the latents' squared weights that lies off the diagonal."""
    outside = whole = 0.0
    for ffn in model.model.ffns():
        squared = ffn.latent.weight.detach().square()
        blocks = torch.block_diag(*[torch.ones(ffn.config.z_dim, ffn.config.z_dim)] * ffn.config.n_head)
        outside, whole = outside + (squared * (1 - blocks)).sum().item(), whole + squared.sum().item()
    return outside / whole


def rate_at(number: int, steps: int) -> float:
    """Warm-up, then a cosine down to a twentieth."""
    falling = 0.05 + 0.475 * (1 + math.cos(math.pi * number / steps))
    return LEARNING_RATE * min(1.0, (number + 1) / WARM_UP) * falling


def train(
    options: argparse.Namespace, tokens: np.ndarray, held_out: torch.Tensor, *, uses: bool
) -> tuple[WsFfnForCausalLM, dict[str, Any]]:
    """(model, what happened) of one run."""
    torch.manual_seed(options.seed)
    config = WsFfnConfig(**SIZES, num_latent_heads=NUM_LATENT_HEADS, use_aux_loss=uses)
    model = WsFfnForCausalLM(config).train()
    optimizer, rng = optimizer_of(model), np.random.default_rng(options.seed)
    started, curve = time.perf_counter(), []
    similarity = {"start": head_similarity(model, held_out)}
    recent: list[dict[str, float]] = []
    for number in range(options.steps + 1):
        if number % options.every == 0 or number == options.steps:
            means = {name: statistics.fmean(each[name] for each in recent) for name in (recent or [{}])[0]}
            curve.append({"step": number, "held_out": held_out_loss(model, held_out), **means})
            print(json.dumps(curve[-1]), flush=True)
            recent = []
        if number < options.steps:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(number, options.steps)
            recent.append(step(model, optimizer, windows(tokens, rng)))
    similarity["end"] = head_similarity(model, held_out)
    seconds = time.perf_counter() - started
    return model, {"curve": curve, "similarity": similarity, "drift": drift_of(model), "seconds": seconds}


def finetuning_times(options: argparse.Namespace, tokens: np.ndarray) -> dict[str, Any]:
    """Milliseconds of a step: each kind of model in turn, so that a slow moment falls on all."""
    plain = ReferenceConfig(**SIZES, ffn_kind="gated", hidden_act="silu", norm_kind="rms_norm")
    ours = {"num_latent_heads": NUM_LATENT_HEADS, **SIZES}
    models: dict[str, Any] = {
        "plain gated FFN": ReferenceForCausalLM(plain),
        "wsFFN, losses off": WsFfnForCausalLM(WsFfnConfig(**ours, use_aux_loss=False)),
        "wsFFN, losses on": WsFfnForCausalLM(WsFfnConfig(**ours, use_aux_loss=True)),
    }
    optimizers = {name: optimizer_of(model.train()) for name, model in models.items()}
    rng, times = np.random.default_rng(options.seed), {name: [] for name in models}
    for number in range(options.timed_steps + 3):
        ids = windows(tokens, rng)
        order = list(models) if number % 2 else list(models)[::-1]
        for name in order:
            started = time.perf_counter()
            step(models[name], optimizers[name], ids)
            if number >= 3:
                times[name].append(1000 * (time.perf_counter() - started))
    base = times["plain gated FFN"]
    return {
        name: {
            "median_ms": statistics.median(values),
            "ratio": statistics.median(one / other for one, other in zip(values, base, strict=True)),
        }
        for name, values in times.items()
    }


def save(model: WsFfnForCausalLM, folder: Path) -> None:
    """The model with the bundled tokenizer beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for path in tokenizer_files(open_source("demo")):
        shutil.copyfile(path, folder / path.name)


def quantized(folder: Path) -> dict[str, Any]:
    """What the default command makes of it, and its size with the latents kept."""
    found: dict[str, Any] = {}
    for name, keeps in (("default", False), ("latents kept", True)):
        typed = {"model": str(folder), "keep_latent": keeps}
        typed |= {"measure.latency": False, "measure.memory": False}
        made = folder.parent / f"{folder.name}-int8{'-latents' if keeps else ''}"
        document = report_json(quantize(recipe=override(Recipe(), typed), output=made, force=True).report)
        found[name] = {key: document[key] for key in ("accuracy", "size", "projections")}
    return found


def main() -> None:
    """Train, time, quantize, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("ws-ffn"), help="where the models go")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="steps between two points of the curves")
    parser.add_argument("--timed-steps", type=int, default=40, help="of finetuning, for each kind of model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where page, curves and figures go")
    options = parser.parse_args()
    folder = open_source("demo").folder
    assert folder is not None
    text = open_text(folder)
    tokens, held = (
        np.array(text.encode((folder / name).read_text(encoding="utf-8")))
        for name in ("calibration.txt", "evaluation.txt")
    )
    held_out = windows(held, np.random.default_rng(99), HELD_OUT_WINDOWS)
    runs = {}
    for name, uses in RUNS.items():
        print(name, flush=True)
        model, runs[name] = train(options, tokens, held_out, uses=uses)
        save(model, options.output / name.replace(" ", "-"))
        runs[name]["quantized"] = quantized(options.output / name.replace(" ", "-"))
    document = {
        "sizes": {**SIZES, "num_latent_heads": NUM_LATENT_HEADS, "batch": BATCH, "length": LENGTH},
        "training_tokens": len(tokens),
        "seed": options.seed,
        "steps": options.steps,
        "runs": runs,
        "finetuning": finetuning_times(options, tokens),
        "machine": {
            "processor": read_cpu().model,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%d"),
        },
    }
    options.docs.mkdir(parents=True, exist_ok=True)
    (options.docs / "ws-ffn.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    write_page(document, options.docs)


if __name__ == "__main__":
    main()
