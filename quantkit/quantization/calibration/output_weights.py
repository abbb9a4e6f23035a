"""Weights of outputs: for GPTQ, how much a change of each output matters to the model's predictions.

Skips lm_head, whose outputs are the logits, and models that predict no tokens: those projections are fitted
to the error of their outputs alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.model.load import Source
from quantkit.model.model_map import Layer, ModelMap, Role
from quantkit.model.names import modules_by_name
from quantkit.model.weights.tensors import TensorSource
from quantkit.model.weights.torch_model import torch_model
from quantkit.progress import Progress
from quantkit.quantization.calibration.gradients import collect_gradients
from quantkit.quantization.calibration.replay import NotBlockwiseError
from quantkit.quantization.calibration.statistics import InputStatistics, StatisticsOf
from quantkit.quantization.calibration.store import StatisticsFile
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.quantization.projections import rows_of
from quantkit.quantization.rounding import FITS


def weighed_layers(
    model_map: ModelMap, planned: frozenset[str], *, fit: str, num_windows: int
) -> tuple[Layer, ...]:
    """The projections whose outputs are weighed."""
    predicts = any(layer.role is Role.LM_HEAD for layer in model_map.layers)
    if FITS[fit].encode_jointly is None or not predicts or not num_windows:
        return ()
    return tuple(
        layer
        for layer in model_map.layers
        if layer.name in planned and layer.role is not Role.LM_HEAD and layer.num_groups == 1
    )


def weigh_outputs(
    source: Source,
    model_map: ModelMap,
    weights: TensorSource,
    layers: tuple[Layer, ...],
    tokens_BT: Tokens,
    *,
    num_windows: int,
    seed: int,
    folder: Path,
    progress: Progress,
) -> StatisticsFile | str:
    """Second moments of the gradients at these projections' outputs, or the reason why there are none."""
    tokens_BT = tokens_BT[:: -(-len(tokens_BT) // num_windows)]
    with progress.stage("weights of outputs", total=int(tokens_BT.size), unit="tokens") as count:
        module = torch_model(source, model_map, weights)
        named = modules_by_name(module)
        outputs = {
            layer.name: (named[layer.matrix], torch.from_numpy(rows_of(layer.rows))) for layer in layers
        }
        try:
            return collect_gradients(
                module,
                tokens_BT,
                outputs=outputs,
                blocks={block.name: named[block.name] for block in model_map.blocks},
                folder=folder,
                seed=seed,
                progress=count,
            )
        except NotBlockwiseError as error:
            return str(error)


@dataclass(frozen=True, kw_only=True, slots=True)
class WithGradients:
    """Statistics of a projection's input with the gradients at its outputs."""

    inputs: StatisticsOf
    gradients: StatisticsFile

    def __call__(self, layer: Layer) -> InputStatistics | None:
        inputs = self.inputs(layer)
        if inputs is None or layer.name not in self.gradients.located:
            return inputs
        moment_OO = self.gradients.read(layer.name).second_moment_II
        return replace(inputs, gradient_OO=moment_OO, num_gradients=self.gradients.num_tokens)
