"""The strength of smoothing of every space of a model, searched with the rounding of its readers' formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantkit.model.model_map import Layer, ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.plan.formats import Format
from quantkit.progress import Progress
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import decode_all
from quantkit.quantization.rounding.rtn import round_to_nearest
from quantkit.quantization.simulate import rounding_of
from quantkit.quantization.transforms.alpha import Smoothing, search_alpha
from quantkit.quantization.transforms.settings import ChannelStatistics
from quantkit.quantization.transforms.smoothquant import Rule, smoothable
from quantkit.quantization.transforms.spaces import spaces_of

NUM_ROWS = 256  # of a space's input, on which strengths are compared


def search_strengths(
    model_map: ModelMap,
    weights: TensorSource,
    *,
    transform: str,
    formats: Mapping[str, Format],
    statistics: Mapping[str, InputStatistics],
    scaled_by: ChannelStatistics,
    unties_head: bool,
    progress: Progress,
) -> tuple[Smoothing, ...]:
    """The strength with the smallest error of each space's readers, where all of them will be quantized.

    `formats` holds the layers that will be.
    """
    rule: Rule = "awq" if transform == "awq" else "smoothquant"
    names = set(smoothable(model_map, unties_head=unties_head))
    spaces = [space for space in spaces_of(model_map) if space.name in names]
    layers = {layer.name: layer for layer in model_map.layers}
    choices = []
    with progress.stage(f"{transform}: strengths", total=len(spaces), unit="spaces") as count:
        for space in spaces:
            count(1)
            readers = [layers[name] for name in space.readers if name in formats]
            if not readers or len(readers) != len(space.readers) or readers[0].matrix not in statistics:
                continue
            sample_TI = statistics[readers[0].matrix].sample_TI
            if sample_TI is None:
                continue
            chosen = formats[readers[0].name]
            choice = search_alpha(
                model_map,
                weights,
                space,
                sample_TI=sample_TI[:NUM_ROWS],
                statistics=scaled_by,
                rule=rule,
                round_inputs=_input_rounding(chosen, readers[0]),
                round_weights=_weight_rounding(chosen),
            )
            if choice:
                choices.append(choice)
    return tuple(choices)


def _input_rounding(chosen: Format, reader: Layer) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """How the runtime will round the space's values."""
    if chosen.is_static:  # the range moves with the scales, so it is taken from the scaled sample itself
        chosen = replace(chosen, activations="tensor")
    rounding = rounding_of(chosen, reader.role, None)

    def round_inputs(x_TI: NDArray[Any]) -> NDArray[Any]:
        rounded: NDArray[Any] = rounding(torch.from_numpy(np.ascontiguousarray(x_TI))).numpy()
        return rounded

    return round_inputs


def _weight_rounding(chosen: Format) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """How rounding to nearest will change the readers' weights."""

    def round_weights(weight_OI: NDArray[Any]) -> NDArray[Any]:
        rows_OI = np.asarray(weight_OI, np.float32)
        return decode_all(round_to_nearest(rows_OI, chosen.grid), rows_OI.shape[1])

    return round_weights
