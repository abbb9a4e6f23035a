"""The hidden units of every FFN on a text: which never wake, which say the same, which are far too loud.

An FFN is a memory: each hidden unit's key says when it wakes and its value what it then adds
(https://arxiv.org/abs/2012.14913). What reads the units' activations is rounded to INT8 along with them, and
a few loud units take the range from all others (https://arxiv.org/abs/2208.07339). Statistics come from the
pass that calibration uses, block by block; "never active" holds for this text, "proved" for every text.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from quantkit.pipeline.calibration_text import calibration_windows
from quantkit.pipeline.options import with_options
from quantkit.pipeline.resolve import Resolved
from quantkit.progress import Progress
from quantkit.quantization.calibration.passes import collect
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.calibration.tokens import context_length
from quantkit.quantization.dead_units import dead_units, weight_of
from quantkit.recipe import Recipe

# Letters: T tokens of the sample, H hidden units, I channels that they read.
Floats = NDArray[np.float32]
MAX_TOKENS, LENGTH = 4096, 256
# How loud a unit must be, at its loudest, to count as active: any value for ReLU, which gives exact zeros;
# for curves that never quite do, this share of the layer's median unit.
QUIET: dict[Activation, float] = {Activation.RELU: 0.0}
QUIET_SHARE = 0.01
OUTLIER = 8.0  # times the median unit's peak: three of seven bits
ALIKE = 0.95  # cosine of keys, and of activations over tokens
BLOCK = 64  # inputs that share a scale in the default scheme
FEW_BITS = 3.0  # that the median unit may lose before a scheme is called strained
AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnUnits:
    """One FFN on a text."""

    block: str
    down: str  # the projection that reads the units
    ffn: str
    hidden_features: int
    num_rows: int  # tokens, times the calls of a shared FFN
    num_silent: int  # never active on the text
    num_proved: int  # of all units, those that add nothing on any text
    num_duplicates: int  # with the key and the activity of an earlier unit
    num_outliers: int
    peak: float
    typical_peak: float  # of the median unit that is active at all
    bits_lost_in_row: float  # by the median unit, where one scale serves all
    bits_lost_in_blocks: float  # the same in blocks of 64, their mean
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReport:
    """Every FFN of a model on one text."""

    model: str
    text: str
    num_tokens: int
    way: str  # how the model was run
    layers: tuple[FfnUnits, ...]


def ffn_units(
    model: str,
    *,
    text: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> UnitReport:
    """Open a model, run the text through it, and look at every FFN."""
    progress = Progress(quiet=quiet)
    source = with_weights(open_source(model, trust_remote_code=trust_remote_code), random_weights=False)
    model_map = inspect_source(source)
    if model_map.family is None:
        model_map = with_observed_ffns(model_map, build_on_meta(source))
    if not any(block.ffn for block in model_map.blocks):
        reason = "has none" if model_map.family else "shows none in a forward pass, and has no row of facts"
        raise InputError(
            f"no FFN to look at: the model {reason}",
            where=model_map.name,
            next_step="'quantkit inspect' says what is known of it",
        )
    weights = open_weights(source, model_map, random_weights=False)
    length = min(LENGTH, max_tokens, context_length(model_map) or LENGTH)
    recipe = with_options(
        Recipe(model=model),
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
    with progress.stage("hidden units", total=int(tokens_BT.size), unit="tokens") as count:
        where = recipe.calibration.text
        return observe_units(source, model_map, weights, tokens_BT, text=where, progress=count)


def units_of_model(resolved: Resolved) -> dict[str, FfnUnits]:
    """Down projection -> its hidden units, on the calibration text of a resolved model."""
    tokens_BT = calibration_windows(resolved.recipe, resolved.source, resolved.model_map)
    tokens_BT = tokens_BT[: max(1, MAX_TOKENS // tokens_BT.shape[1])]
    with resolved.progress.stage("hidden units", total=int(tokens_BT.size), unit="tokens") as count:
        report = observe_units(
            resolved.source, resolved.model_map, resolved.weights, tokens_BT, progress=count
        )
    return {layer.down: layer for layer in report.layers}


def observe_units(
    source: Source,
    model_map: ModelMap,
    weights: TensorSource,
    tokens_BT: NDArray[np.int64],
    *,
    text: str | None = None,
    progress: Any = lambda _: None,
) -> UnitReport:
    """The units of every FFN on these windows, from one calibration pass."""
    downs = {layer.block: layer for layer in model_map.layers if layer.role is Role.FFN_DOWN}
    found = []
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        seen = collect(
            torch_model(source, model_map, weights),
            tokens_BT,
            requested={layer.matrix: frozenset({"peak", "sample"}) for layer in downs.values()},
            blocks=[block.name for block in model_map.blocks] if model_map.family else [],
            folder=Path(folder),
            progress=progress,
        )
        for block in model_map.blocks:
            down = downs.get(block.name)
            if block.ffn and down and down.matrix not in seen.unreached:
                found.append(_units_of(model_map, weights, block, down, seen.read(down.matrix)))
    return UnitReport(
        model=model_map.name,
        text=text or "the bundled calibration text",
        num_tokens=int(tokens_BT.size),
        way=seen.way,
        layers=tuple(found),
    )


def _units_of(
    model_map: ModelMap, weights: TensorSource, block: Block, down: Layer, seen: InputStatistics
) -> FfnUnits:
    assert block.ffn is not None
    assert seen.peak_I is not None
    peak_H, sample_TH = np.asarray(seen.peak_I, np.float64), seen.sample_TI
    is_active_H = peak_H > quiet_below(peak_H, block.ffn.activation)
    typical = float(np.median(peak_H[is_active_H])) if is_active_H.any() else 0.0
    proved = dead_units(model_map, weights, block)
    in_row, in_blocks = bits_lost(peak_H, typical)
    keys = [layer for layer in model_map.layers if layer.block == block.name and layer.role in _KEYS]
    return FfnUnits(
        block=block.name,
        down=down.name,
        ffn=f"{block.ffn.kind} {block.ffn.display_name}",
        hidden_features=len(peak_H),
        num_rows=seen.num_rows,
        num_silent=int((~is_active_H).sum()),
        num_proved=int(proved.any_H.sum()) if proved else 0,
        num_duplicates=_num_duplicates(weights, keys, is_active_H, sample_TH),
        num_outliers=int((peak_H > OUTLIER * typical).sum()) if typical else 0,
        peak=float(peak_H.max()),
        typical_peak=typical,
        bits_lost_in_row=in_row,
        bits_lost_in_blocks=in_blocks,
        verdict=verdict(in_row, in_blocks),
    )


_KEYS = (Role.FFN_GATE, Role.FFN_UP)


def quiet_below(peak_H: NDArray[np.float64], activation: Activation) -> float:
    """The loudest that a unit may be and still count as never active."""
    if activation in QUIET:
        return QUIET[activation]
    loud = peak_H[peak_H > 0]
    return QUIET_SHARE * float(np.median(loud)) if len(loud) else 0.0


def bits_lost(peak_H: NDArray[np.float64], typical: float) -> tuple[float, float]:
    """Bits that the median active unit loses to the loudest one: of the whole row, and of its block."""
    if not typical:
        return 0.0, 0.0
    losses = []
    for start in range(0, len(peak_H), BLOCK):
        part = peak_H[start : start + BLOCK]
        active = part[part > QUIET_SHARE * typical]
        losses.append(math.log2(active.max() / np.median(active)) if len(active) else 0.0)
    return math.log2(float(peak_H.max()) / typical), float(np.mean(losses))


def verdict(in_row: float, in_blocks: float) -> str:
    """What this means for INT8 inputs of the way down."""
    if in_row <= FEW_BITS:
        return "any"
    return "blocks" if in_blocks <= FEW_BITS else "resists"


def _num_duplicates(
    weights: TensorSource, keys: list[Layer], is_active_H: NDArray[np.bool_], sample_TH: Floats | None
) -> int:
    """Active units whose keys all point where an earlier unit's do, and that wake on the same tokens."""
    places = np.flatnonzero(is_active_H)
    if sample_TH is None or not keys or len(places) < 2:
        return 0
    unit_keys = [_unit_rows(weight_of(weights, layer)[places]) for layer in keys]
    activity_HT = _unit_rows(np.abs(np.asarray(sample_TH, np.float32)[:, places].T))
    found = np.zeros(len(places), np.bool_)
    for start in range(0, len(places), AT_ONCE):
        chunk = slice(start, start + AT_ONCE)
        is_alike = np.logical_and.reduce([(rows[chunk] @ rows.T) > ALIKE for rows in unit_keys])
        for later, earlier in zip(*np.nonzero(np.tril(is_alike, start - 1)), strict=True):
            found[start + later] |= bool(activity_HT[start + later] @ activity_HT[earlier] > ALIKE)
    return int(found.sum())


def _unit_rows(rows: Floats) -> Floats:
    """Rows of length one; a row of zeros stays one."""
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(length > 0, length, 1), np.float32)
