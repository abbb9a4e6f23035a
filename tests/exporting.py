"""What tests of exported models share: tiny checkpoints of every family, written and opened for real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.model.load import model_class, open_source
from quantkit.model.model_map import Layer
from quantkit.model.weights.open import open_weights
from quantkit.pipeline.stages.export import NOTHING, Exported, ExportJob, export_dynamic, write_companions
from quantkit.plan.select import choose
from quantkit.quantization.calibration.statistics import InputStatistics

# One family of each kind of rotation, norm, residual and head. Whole pipelines run over these in every test
# run, and over the others with `scripts/test --all`; contracts of single graphs run over all of them.
KINDS = (
    *("gpt2", "opt", "gpt_neox", "llama", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "gptj", "falcon"),
    *("cohere2", "olmo2", "bert", "roberta", "mpnet", "modernbert", "distilbert", "albert", "t5"),
    *("ws_ffn", "quantkit_reference", "quantkit_one_wide"),
)


def slow_unless_of_a_kind(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in KINDS else (pytest.mark.slow,)


DECODERS = (
    "gpt2",
    "opt",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi",
    "stablelm",
    "smollm3",
    "granite",
    "starcoder2",
    "nemotron",
    "arcee",
    "seed_oss",
    "cohere",
    "cohere2",
    "helium",
    "ernie4_5",
    "glm",
    "glm4",
    "gptj",
    "codegen",
    "gpt_bigcode",
    "falcon",
    "olmo",
    "olmo2",
    "olmo3",
    "exaone4",
    "quantkit_reference",
    "ws_ffn",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
)


def decoder_cases(*, mixtures: bool = True) -> list:
    """Every tiny config of every family that is written as a fused graph."""
    return [
        pytest.param(name, {**FAMILIES[name].tiny, **variant}, id=f"{name}-{number}")
        for name in DECODERS
        if mixtures or FAMILIES[name].stacks[0].mixture is None
        for number, variant in enumerate(({}, *FAMILIES[name].variants))
    ]


def build_tiny(tiny_class: str, sizes: dict, *, spread: float = 0.1, dtype=torch.float32):
    """A random model whose biases and gains are random too, so that none of them can go missing."""
    torch.manual_seed(0)
    made_from = model_class(tiny_class)
    model = made_from(made_from.config_class(**sizes, attn_implementation="eager")).eval()
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    return model.to(dtype)


def write_model(model_map, plan, weights, out: Path, *, scheme: str, **options) -> Exported:
    """Quantize and export what is open already."""
    job = ExportJob(model_map=model_map, plan=plan, weights=weights, scheme=scheme, **options)
    return export_dynamic(job, out)


def export(folder: Path, out: Path, *, scheme: str = "int8_block32", min_dim: int = 1, **options) -> Exported:
    """Quantize and export a checkpoint folder; `min_dim=NOTHING` leaves everything in float."""
    out.mkdir(parents=True, exist_ok=True)
    source = open_source(str(folder))
    model_map = inspect(str(folder))
    weights = open_weights(source, model_map, random_weights=False)
    plan = choose(model_map, min_dim=min_dim)
    exported = write_model(
        model_map, plan, weights, out, scheme=scheme, **{"keeps_checkpoint": True, **options}
    )
    write_companions(source, model_map, out)
    return exported


def observe(model, ids: np.ndarray) -> Callable[[Layer], InputStatistics]:
    """The range of every linear input and of its channels on some tokens, by torch hooks alone."""
    seen: dict[str, InputStatistics] = {}

    def watch(name: str):
        def hook(_, inputs):
            if not inputs:  # called by names alone: no linear module
                return
            x = inputs[0]
            peak_I = (
                x.abs().reshape(-1, x.shape[-1]).amax(0).float().numpy() if x.is_floating_point() else None
            )
            low, high = float(x.min()), float(x.max())
            seen[name] = InputStatistics(num_rows=x[..., 0].numel(), low=low, high=high, peak_I=peak_I)

        return hook

    handles = [
        module.register_forward_pre_hook(watch(name)) for name, module in model.named_modules() if name
    ]
    try:
        with torch.inference_mode():
            model(input_ids=torch.from_numpy(ids))
    finally:
        for handle in handles:
            handle.remove()
    return lambda layer: seen[layer.matrix]


@dataclass(frozen=True)
class Error:
    """The largest difference, by itself and beside the largest value."""

    absolute: float
    relative: float


def error(made: np.ndarray, wanted: np.ndarray) -> Error:
    assert made.shape == wanted.shape
    difference = float(np.abs(made.astype(np.float64) - wanted).max())
    return Error(absolute=difference, relative=difference / float(np.abs(wanted).max()))


__all__ = ["DECODERS", "NOTHING", "build_tiny", "decoder_cases", "error", "export", "observe", "write_model"]
