"""The largest inputs of every projection from a single pass over a few windows: enough to see outliers.

Channels that stand out do so on nearly every text (https://arxiv.org/abs/2208.07339), so what smoothing needs
can be had in a second or two; everything else that calibration collects wants more tokens than this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quantkit.errors import InputError
from quantkit.model.model_map import ModelMap
from quantkit.model.names import modules_by_name
from quantkit.quantization.calibration.replay import Ints, first_input, head_left_out


def quick_peaks(
    module: nn.Module, model_map: ModelMap, tokens_BT: Ints, matrices: Collection[str]
) -> dict[str, NDArray[np.float32]]:
    """Matrix -> the largest magnitude of each channel of its input; one that was never called is missing."""
    peaks: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = first_input(args, kwargs)
            peak_I = x.abs().reshape(-1, x.shape[-1]).amax(0).float()
            if not bool(torch.isfinite(peak_I).all()):
                raise InputError(
                    f"what is given to '{name}' is not finite",
                    where=model_map.name,
                    next_step="check that the original gives finite logits; --transform none goes on without",
                )
            peaks[name] = torch.maximum(peaks[name], peak_I) if name in peaks else peak_I

        return hook

    handles = []
    for name, child in modules_by_name(module).items():
        if name in matrices:
            handles.append(child.register_forward_pre_hook(watch(name), with_kwargs=True))
    try:
        with torch.inference_mode(), head_left_out(module):
            module(input_ids=torch.from_numpy(np.ascontiguousarray(tokens_BT, np.int64)))
    finally:
        for handle in handles:
            handle.remove()
    return {name: peak_I.numpy() for name, peak_I in peaks.items()}
