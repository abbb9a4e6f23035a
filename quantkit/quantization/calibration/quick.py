"""The magnitude of every input channel from a single pass over a few windows, to find outlier channels.

Channels that stand out do so on nearly every text (https://arxiv.org/abs/2208.07339), so the magnitudes for
smoothing take a second or two; all other statistics need more tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.model.model_map import Layer, ModelMap
from quantkit.model.names import modules_by_name
from quantkit.quantization.calibration.replay import forward, head_left_out
from quantkit.quantization.calibration.statistics import InputStatistics, StatisticsOf
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.quantization.modules import watching_inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class WithPeaks:
    """Statistics of projections with the peaks of a few windows; those of an input never seen are zeros."""

    statistics: StatisticsOf
    peaks: Mapping[str, NDArray[np.float32]]  # matrix -> one for each channel of its input

    def __call__(self, layer: Layer) -> InputStatistics:
        peak_I = self.peaks.get(layer.matrix)
        if peak_I is None:
            peak_I = np.zeros(layer.in_features, np.float32)
        statistics = self.statistics(layer) or InputStatistics(num_rows=0)
        return replace(statistics, peak_I=peak_I)


def quick_magnitudes(
    module: nn.Module,
    model_map: ModelMap,
    tokens_BT: Tokens,
    matrices: Collection[str],
    *,
    takes_means: bool,
) -> dict[str, NDArray[np.float32]]:
    """Matrix -> the mean or largest magnitude of each channel of its input; one never called is missing."""
    magnitudes: dict[str, Tensor] = {}

    def reading(name: str, x: Tensor) -> None:
        x_TI = x.abs().reshape(-1, x.shape[-1])
        value_I = (x_TI.mean(0) if takes_means else x_TI.amax(0)).float()
        if not bool(torch.isfinite(value_I).all()):
            raise InputError(
                f"the input of '{name}' is not finite",
                where=model_map.name,
                next_step="check that the original gives finite logits; --transform none goes on without",
            )
        magnitudes[name] = torch.maximum(magnitudes[name], value_I) if name in magnitudes else value_I

    named = modules_by_name(module)
    watched = {name: child for name, child in named.items() if name in matrices}
    with watching_inputs(watched, reading), torch.inference_mode(), head_left_out(module):
        forward(module, tokens_BT)
    return {name: value_I.numpy() for name, value_I in magnitudes.items()}
