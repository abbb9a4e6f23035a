"""Tiny models quantized to a checkpoint and no further, for tests of what is exported from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quantkit.model.inspect import map_module
from quantkit.model.linears import LINEARS
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.as_mapped import as_mapped
from quantkit.model.weights.open import tensors_by_name
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.stages.export import checkpoint_header
from quantkit.plan.formats import SCHEMES
from quantkit.plan.plan import Plan
from quantkit.plan.select import choose
from quantkit.plan.targets import TARGETS
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.layout import Checkpoint, Contents, contents_of, formats_of
from quantkit.quantization.rounding.apply import quantized_parts
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.smoothquant import smooth

TRANSPOSED = {name: row.is_transposed for name, row in LINEARS.items()}


class ModuleTensors:
    """The weights of a live module, every shared tensor under each of its names."""

    def __init__(self, module: nn.Module) -> None:
        self.values = {
            name: value.detach().float().numpy() for name, value in tensors_by_name(module).items()
        }

    def has(self, name: str) -> bool:
        return name in self.values

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def read(self, name: str, start: int = 0, count: int | None = None):
        return self.values[name][start:][:count].copy()


@dataclass(frozen=True)
class Quantized:
    """A checkpoint, and all that it was made from."""

    map: ModelMap
    plan: Plan
    contents: Contents
    checkpoint: Checkpoint
    source: TensorSource
    scheme: str

    def options(self, *, outside: bool = False) -> dict[str, Any]:
        return {
            "target": TARGETS["cpu"],
            "keeps_weights_outside": outside,
            "metadata": {"max_positions": self.map.max_positions},
        }


def quantize(
    model: nn.Module,
    folder: Path,
    *,
    scheme: str = "int8_block32",
    min_dim: int = 1,
    exclude: tuple[str, ...] = (),
    packs_attention: bool = True,
    magnitudes: Mapping[str, Any] | None = None,
) -> Quantized:
    """With `magnitudes` of inputs, the model is smoothed first."""
    model_map = map_module(model, name="tiny")
    source: TensorSource = as_mapped(ModuleTensors(model), model_map)
    if magnitudes is not None:
        model_map, source = smooth(model_map, source, TransformSettings(statistics=magnitudes))
    plan = choose(model_map, min_dim=min_dim, exclude=exclude)
    contents = contents_of(
        model_map,
        plan,
        formats_of(model_map, SCHEMES[scheme]),
        table_grid=SCHEMES[scheme].head.grid,
        packs_attention=packs_attention,
    )
    description = checkpoint_header(model_map, plan, contents, scheme, "rtn")
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = write_checkpoint(
        folder / "weights.safetensors",
        contents.tensors(),
        quantized_parts(contents, source),
        description,
    )
    return Quantized(model_map, plan, contents, checkpoint, source, scheme)
