"""PyTorch eager, FP32: as transformers runs it, with its own cache and the last position's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
import transformers


def make(variant: str, source: Path, output: Path) -> None:
    """The source is what runs; a link says so, and has its size."""
    (output / "model.safetensors").symlink_to(source / "model.safetensors")
    (output / "config.json").symlink_to(source / "config.json")


def open_decoder(variant: str, folder: Path) -> tuple[Callable[[], None], timing.Feed]:
    """A fresh `DynamicCache` for each prompt."""
    torch.set_num_threads(timing.NUM_THREADS)
    torch.set_grad_enabled(False)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    caches = [transformers.DynamicCache()]

    def clear() -> None:
        caches[0] = transformers.DynamicCache()

    def feed(ids: list[int]) -> object:
        return model(torch.tensor([ids]), past_key_values=caches[0], use_cache=True, logits_to_keep=1).logits

    return clear, feed


if __name__ == "__main__":
    timing.main(make=make, open_decoder=open_decoder)
