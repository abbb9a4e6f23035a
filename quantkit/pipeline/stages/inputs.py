"""Inputs of the packs with the largest errors, for their histograms.

They are a sample that calibration kept, or else come from two calibration windows through the float model, of
which one block is in memory at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quantkit.model.names import modules_by_name
from quantkit.model.weights.torch_model import torch_model
from quantkit.pipeline.stages.calibration_text import calibration_windows
from quantkit.pipeline.stages.prepare import QUICK_LENGTH, QUICK_WINDOWS, Prepared
from quantkit.pipeline.stages.write import Written
from quantkit.quantization.calibration.replay import forward, head_left_out
from quantkit.quantization.grid import Floats
from quantkit.quantization.modules import watching_inputs
from quantkit.quantization.rounding.apply import input_grid
from quantkit.quantization.rounding.histograms import with_input_histogram
from quantkit.quantization.rounding.pack_histograms import PackHistograms

Samples = dict[str, Floats]  # matrix -> inputs [T, I]


def with_inputs(written: Written) -> tuple[tuple[PackHistograms, ...], str]:
    """(histograms of weights and inputs, why inputs are missing)."""
    prepared, histograms = written.prepared, written.exported.histograms
    if not histograms:
        return (), ""
    packs = {pack.name: pack for pack in written.exported.contents.packs}
    chosen = [packs[histogram.name] for histogram in histograms]
    statistics = [prepared.statistics(pack.layers[0]) for pack in chosen]
    samples: Samples = {}
    for pack, kept in zip(chosen, statistics, strict=True):
        if kept and kept.sample_TI is not None:
            samples[pack.layers[0].matrix] = kept.sample_TI
    missing = {pack.layers[0].matrix for pack in chosen} - samples.keys()
    reason = ""
    try:
        samples |= _watched(prepared, missing) if missing else {}
    except Exception as error:  # models whose modules take other inputs than token ids
        reason = f"no histograms of inputs: {' '.join(str(error).split())[:200]}"
    filled = []
    for histogram, pack, kept in zip(histograms, chosen, statistics, strict=True):
        inputs_TI = samples.get(pack.layers[0].matrix)
        if inputs_TI is None or pack.format is None:
            filled.append(histogram)
            continue
        fixed = input_grid(pack.name, pack.format, kept)
        filled.append(with_input_histogram(histogram, pack, inputs_TI, fixed))
    return tuple(filled), reason


def _watched(prepared: Prepared, matrices: set[str]) -> Samples:
    """Inputs of matrices on two calibration windows."""
    resolved, model_map = prepared.resolved, prepared.model_map
    length = min(QUICK_LENGTH, model_map.context or QUICK_LENGTH)
    windows_NT = calibration_windows(
        resolved.recipe, resolved.source, model_map, windows=QUICK_WINDOWS, length=length
    )
    inputs: dict[str, list[Floats]] = {}

    def reading(name: str, x: Tensor) -> None:
        inputs.setdefault(name, []).append(x.reshape(-1, x.shape[-1]).float().numpy().copy())

    with resolved.progress.stage("inputs for histograms"):
        module = torch_model(resolved.source, model_map, prepared.weights, streams=True)
        watched = {name: child for name, child in modules_by_name(module).items() if name in matrices}
        with watching_inputs(watched, reading), torch.inference_mode(), head_left_out(module):
            forward(module, windows_NT)
    return {name: np.concatenate(parts) for name, parts in inputs.items()}
