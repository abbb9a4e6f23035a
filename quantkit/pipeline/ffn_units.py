"""Dead, duplicate and outlier hidden units of every FFN on a text.

An FFN is a key-value memory: the key of a hidden unit decides when the unit is active, and its value is added
to the residual stream (https://arxiv.org/abs/2012.14913). The down projection reads the activations of all
units in INT8, and a few outliers take the range from the other units (https://arxiv.org/abs/2208.07339).
Statistics come from a calibration pass, block by block. "Never active" holds for this text; "proved" holds
for every text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.model.inspect import inspect_source
from quantkit.model.load import Source, build_on_meta, open_source
from quantkit.model.model_map import Activation, Block, Layer, ModelMap, Role
from quantkit.model.unknown.observe import with_observed_ffns
from quantkit.model.weights.open import open_weights, with_weights
from quantkit.model.weights.tensors import TensorSource
from quantkit.model.weights.torch_model import torch_model
from quantkit.pipeline.options import with_options
from quantkit.pipeline.stages.calibration_text import calibration_windows
from quantkit.pipeline.stages.resolve import Resolved
from quantkit.progress import Progress
from quantkit.quantization.calibration.passes import collect
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.dead_units import dead_units
from quantkit.quantization.projections import weight_of
from quantkit.recipe import Calibration, Recipe
from quantkit.runtime.machine.disk import temporary_folder

# Letters: T tokens of the sample, H hidden units, I channels that they read.
Floats = NDArray[np.float32]
MAX_TOKENS, LENGTH = 4096, 256
# Peak of an active unit: above 0 for ReLU, which gives exact zeros; else above this share of the median peak.
ACTIVE_SHARE = 0.01
OUTLIER = 8.0  # times the median peak: 3 of 7 bits
ALIKE = 0.95  # cosine of keys, and of activations over tokens
BLOCK = 64  # inputs that share a scale in the default scheme
FEW_BITS = 3.0  # bits that the median unit may lose to outliers
UNITS_AT_ONCE = 1024
KEYS = (Role.FFN_GATE, Role.FFN_UP)


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnUnits:
    block: str
    down: str  # the projection that reads the units
    ffn: str
    hidden_features: int
    num_rows: int  # tokens, times the calls of a shared FFN
    num_silent: int  # never active on the text
    num_proved: int  # add nothing on any text; of all units
    num_duplicates: int  # have the key and the activity of an earlier unit
    num_outliers: int
    peak: float
    typical_peak: float  # median over active units
    bits_lost_in_row: float  # by the median unit with one scale for all units
    bits_lost_in_blocks: float  # with a scale for each block of 64, mean over blocks
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport:
    model: str
    text: str
    num_tokens: int
    way: str  # how calibration ran the model
    layers: tuple[FfnUnits, ...]


def ffn_units(
    model: str,
    *,
    text: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> UnitReport:
    """Open a model, run a text through it, and observe the units of every FFN."""
    source = with_weights(open_source(model, trust_remote_code=trust_remote_code), random_weights=False)
    model_map = inspect_source(source)
    if model_map.family is None:
        model_map = with_observed_ffns(model_map, build_on_meta(source))
    if not any(block.ffn for block in model_map.blocks):
        reason = "" if model_map.family else ": its family is unknown, and a forward pass shows none"
        raise InputError(
            f"the model has no FFN{reason}",
            where=model_map.name,
            next_step="'quantkit inspect' lists its projections",
        )
    weights = open_weights(source, model_map, random_weights=False)
    length = min(LENGTH, max_tokens, model_map.context or LENGTH)
    recipe = with_options(
        Recipe(model=model, calibration=Calibration(varied=0)),
        {
            "calibration_text": str(text) if text else None,
            "calibration_length": length,
            "calibration_windows": max(1, max_tokens // length),
        },
    )
    try:
        tokens_BT = calibration_windows(recipe, source, model_map)
    except InputError as error:
        raise InputError(str(error).replace("--calibration-text", "--text")) from error
    return observe_units(
        source, model_map, weights, tokens_BT, text=recipe.calibration.text, progress=Progress(quiet=quiet)
    )


def units_of_model(resolved: Resolved) -> dict[str, FfnUnits]:
    """Down projection -> the hidden units that it reads, on the calibration text of a resolved model."""
    tokens_BT = calibration_windows(resolved.recipe, resolved.source, resolved.model_map)
    tokens_BT = tokens_BT[: max(1, MAX_TOKENS // tokens_BT.shape[1])]
    report = observe_units(
        resolved.source, resolved.model_map, resolved.weights, tokens_BT, progress=resolved.progress
    )
    return {layer.down: layer for layer in report.layers}


def observe_units(
    source: Source,
    model_map: ModelMap,
    weights: TensorSource,
    tokens_BT: NDArray[np.int64],
    *,
    text: str | None = None,
    progress: Progress | None = None,
) -> UnitReport:
    """Observe the units of every FFN on windows of a text, in one calibration pass."""
    progress = progress or Progress(quiet=True)
    downs = {layer.block: layer for layer in model_map.layers if layer.role is Role.FFN_DOWN}
    with (
        progress.stage("hidden units", total=int(tokens_BT.size), unit="tokens") as count,
        temporary_folder() as folder,
    ):
        file = collect(
            torch_model(source, model_map, weights),
            tokens_BT,
            requested={layer.matrix: frozenset({"peak", "sample"}) for layer in downs.values()},
            blocks=[block.name for block in model_map.blocks] if model_map.family else [],
            folder=folder,
            progress=count,
        )
        layers = tuple(
            _units_of(model_map, weights, block, down, file.read(down.matrix))
            for block in model_map.blocks
            if block.ffn and (down := downs.get(block.name)) and down.matrix not in file.unreached
        )
    return UnitReport(
        model=model_map.name,
        text=text or "the bundled calibration text",
        num_tokens=int(tokens_BT.size),
        way=file.way,
        layers=layers,
    )


def _units_of(
    model_map: ModelMap, weights: TensorSource, block: Block, down: Layer, statistics: InputStatistics
) -> FfnUnits:
    assert block.ffn is not None
    assert statistics.peak_I is not None
    peak_H = np.asarray(statistics.peak_I, np.float64)
    is_active_H = peak_H > _inactive_peak(peak_H, block.ffn.activation)
    typical = float(np.median(peak_H[is_active_H])) if is_active_H.any() else 0.0
    proved = dead_units(model_map, weights, block)
    in_row, in_blocks = bits_lost(peak_H, typical)
    keys = [layer for layer in model_map.layers if layer.block == block.name and layer.role in KEYS]
    return FfnUnits(
        block=block.name,
        down=down.name,
        ffn=f"{block.ffn.kind} {block.ffn.display_name}",
        hidden_features=len(peak_H),
        num_rows=statistics.num_rows,
        num_silent=int((~is_active_H).sum()),
        num_proved=int(proved.any_H.sum()) if proved else 0,
        num_duplicates=_num_duplicates(weights, keys, is_active_H, statistics.sample_TI),
        num_outliers=int((peak_H > OUTLIER * typical).sum()) if typical else 0,
        peak=float(peak_H.max()),
        typical_peak=typical,
        bits_lost_in_row=in_row,
        bits_lost_in_blocks=in_blocks,
        verdict=verdict(in_row, in_blocks),
    )


def _inactive_peak(peak_H: NDArray[np.float64], activation: Activation) -> float:
    """Largest peak of a unit that counts as never active."""
    nonzero = peak_H[peak_H > 0]
    if activation in (Activation.RELU, Activation.RELU_SQUARED) or not len(nonzero):
        return 0.0
    return ACTIVE_SHARE * float(np.median(nonzero))


def bits_lost(peak_H: NDArray[np.float64], typical: float) -> tuple[float, float]:
    """Bits between the median active unit and the largest unit: (of the whole row, mean over blocks)."""
    if not typical:
        return 0.0, 0.0
    losses = []
    for start in range(0, len(peak_H), BLOCK):
        part = peak_H[start : start + BLOCK]
        active = part[part > ACTIVE_SHARE * typical]
        losses.append(math.log2(active.max() / np.median(active)) if len(active) else 0.0)
    return math.log2(float(peak_H.max()) / typical), float(np.mean(losses))


def verdict(in_row: float, in_blocks: float) -> str:
    """INT8 inputs that the down projection accepts: any scheme, schemes in blocks, or none ("resists")."""
    if in_row <= FEW_BITS:
        return "any"
    return "blocks" if in_blocks <= FEW_BITS else "resists"


def _num_duplicates(
    weights: TensorSource, keys: list[Layer], is_active_H: NDArray[np.bool_], sample_TH: Floats | None
) -> int:
    """Number of active units with the keys of an earlier unit (by cosine) that are active on its tokens."""
    active = np.flatnonzero(is_active_H)
    if sample_TH is None or not keys or len(active) < 2:
        return 0
    unit_keys = [_unit_rows(weight_of(weights, layer)[active]) for layer in keys]
    activity_HT = _unit_rows(np.abs(np.asarray(sample_TH, np.float32)[:, active].T))
    is_duplicate = np.zeros(len(active), np.bool_)
    for start in range(0, len(active), UNITS_AT_ONCE):
        chunk = slice(start, start + UNITS_AT_ONCE)
        is_alike = np.logical_and.reduce([(rows[chunk] @ rows.T) > ALIKE for rows in unit_keys])
        for later, earlier in zip(*np.nonzero(np.tril(is_alike, start - 1)), strict=True):
            is_duplicate[start + later] |= bool(activity_HT[start + later] @ activity_HT[earlier] > ALIKE)
    return int(is_duplicate.sum())


def _unit_rows(rows: Floats) -> Floats:
    """Rows divided by their norms; rows of zeros stay zero."""
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1), np.float32)
