"""A naive oracle for calibration: every input of every linear kept whole, statistics by numpy in float64."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from quantkit.quantization.calibration.statistics import FIELDS

ALL = frozenset(FIELDS)


def everything(matrices) -> dict[str, frozenset[str]]:
    return dict.fromkeys(matrices, ALL)


def inputs_of(model, tokens_BT: np.ndarray, modules: dict) -> dict[str, np.ndarray]:
    """Rows [T, I] that each named module was given, one window after the other through the whole model."""
    rows = defaultdict(list)

    def watch(name):
        def hook(_, args):
            x = args[0].detach().double()
            if isinstance(modules[name], torch.nn.Conv2d):  # the pixels of each patch
                x = patches(x.numpy(), *modules[name].kernel_size)
            rows[name].append(np.asarray(x).reshape(-1, x.shape[-1]))

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            for window in tokens_BT:
                ids = torch.from_numpy(window[None])
                if ids.is_floating_point():
                    model(pixel_values=ids)
                    continue
                more = {}
                if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
                    start = torch.full((1, 1), getattr(model.config, "decoder_start_token_id", None) or 0)
                    more["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], 1)
                model(input_ids=ids, **more)
    finally:
        for handle in handles:
            handle.remove()
    return {name: np.concatenate(found) for name, found in rows.items()}


def patches(pixels_BCHW: np.ndarray, height: int, width: int) -> np.ndarray:
    """Pixels of the patches of pictures, row by row, [patches, pixels]."""
    rows, columns = pixels_BCHW.shape[2] // height, pixels_BCHW.shape[3] // width
    return np.stack(
        [
            picture[:, y * height : (y + 1) * height, x * width : (x + 1) * width].reshape(-1)
            for picture in pixels_BCHW
            for y in range(rows)
            for x in range(columns)
        ]
    )


def relative(made: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference beside the largest value."""
    assert made.shape == wanted.shape
    return float(np.abs(made - wanted).max() / np.abs(wanted).max())


def check(statistics, x_TI: np.ndarray, *, tolerance: float = 1e-6) -> None:
    """Every statistic against its definition."""
    assert statistics.num_rows == len(x_TI)
    held_TI, second_moment_II = (
        statistics.held_out_TI.astype(float),
        statistics.second_moment_II.astype(float),
    )
    if len(held_TI) < len(x_TI):  # the second moment is that of the other rows
        others = len(x_TI) - len(held_TI)
        second_moment_II = (others * second_moment_II + held_TI.T @ held_TI) / len(x_TI)
    assert relative(second_moment_II, x_TI.T @ x_TI / len(x_TI)) < tolerance
    assert (statistics.second_moment_II == statistics.second_moment_II.T).all()
    assert relative(statistics.peak_I, np.abs(x_TI).max(0)) < tolerance
    assert np.abs(statistics.mean_I - x_TI.mean(0)).max() < tolerance * np.abs(x_TI).max()
    assert relative(statistics.mean_magnitude_I, np.abs(x_TI).mean(0)) < tolerance
    ends = np.array([x_TI.min(), x_TI.max()])
    assert relative(np.array([statistics.low, statistics.high]), ends) < tolerance
    for level in ("99", "99.9"):
        part = float(level) / 100
        # The order statistics on both sides of the rank, and the width of a bin around them.
        for made, rank in zip(statistics.quantiles[level], (1 - part, part), strict=True):
            below = np.quantile(x_TI, rank, method="lower")
            above = np.quantile(x_TI, min(1.0, rank + 1 / x_TI.size), method="higher")
            width = 2**-7 * max(abs(below), abs(above)) + 1e-12
            assert below - width <= made <= above + width
    num_sampled = min(512, len(x_TI))
    assert statistics.sample_TI.shape == (num_sampled, x_TI.shape[1])
    nearest = np.abs(statistics.sample_TI[:, None, :] - x_TI[None]).max(2).min(1)
    assert nearest.max() < tolerance * np.abs(x_TI).max(), "every sampled row is one of the rows"
