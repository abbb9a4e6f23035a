"""Sensitivity: the loss of the whole model when one pack alone is put into a format.

The original runs in torch. For each pack and format the pack's weights are replaced by their fitted values,
its input is rounded as the runtime would round it, everything else stays as it is, and the KL divergence of
the next token is taken against the original. Every loss is written to a file as soon as it is known, so that
an interrupted run continues where it stopped. HAWQ (https://arxiv.org/abs/1905.03696) ranks layers by
curvature; a forward pass costs less than a Hessian here, and includes the rounding of inputs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.files import read_json
from quantkit.model.linears import weight_OI
from quantkit.model.model_map import ModelMap
from quantkit.model.names import modules_by_name
from quantkit.plan.formats import FLOAT, Format, fitted_to_head, format_for
from quantkit.quantization.calibration.statistics import StatisticsOf
from quantkit.quantization.calibration.tokens import Tokens
from quantkit.quantization.grid import decode_all
from quantkit.quantization.layout import Pack
from quantkit.quantization.projections import rows_of
from quantkit.quantization.rounding.apply import input_grid, prepared_fit
from quantkit.quantization.search import Choice, PackOptions
from quantkit.quantization.simulate import input_hook, rounding_of
from quantkit.runtime.machine.disk import OTHER_CACHE, writing

VERSION = 3  # of the method: a change invalidates older losses


def format_named(name: str, pack: Pack) -> Format:
    """The format that a scheme gives a pack."""
    role = pack.layers[0].role
    return fitted_to_head(format_for(name, role), role, pack.in_features)


def measure_sensitivity(
    module: nn.Module,
    model_map: ModelMap,
    packs: Sequence[Pack],
    names: Sequence[str],
    tokens_BT: Tokens,
    *,
    fit: str,
    statistics: StatisticsOf,
    cache: Path,
    key: str,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[PackOptions, ...]:
    """The loss of every pack in every format by itself; "float" loses nothing. Costs are left at 0."""
    tokens_digest = hashlib.sha256(np.ascontiguousarray(tokens_BT, np.int64).tobytes()).hexdigest()
    digest = hashlib.sha256(json.dumps([VERSION, key, fit, tokens_digest]).encode()).hexdigest()
    cached = _read(cache, digest)
    modules = modules_by_name(module)
    references: list[Tensor] = []
    table = []
    for pack in packs:
        losses = {FLOAT: 0.0}
        for name in names:
            label = f"{pack.name}: {name}"
            if label not in cached:
                if not references:
                    references = [_log_probabilities(module, window) for window in tokens_BT]
                with _replaced(modules, pack, format_named(name, pack), fit=fit, statistics=statistics):
                    cached[label] = _divergence(module, tokens_BT, references, label)
                _write(cache, digest, cached)
            losses[name] = cached[label]
            progress(1)
        options = tuple(Choice(format=name, loss=loss) for name, loss in losses.items())
        layers = tuple(layer.name for layer in pack.layers)
        table.append(PackOptions(name=pack.name, layers=layers, options=options))
    return tuple(table)


@contextmanager
def _replaced(
    modules: Mapping[str, nn.Module], pack: Pack, chosen: Format, *, fit: str, statistics: StatisticsOf
) -> Iterator[None]:
    """One pack in a format while the context lasts."""
    undo: list[Callable[[], Any]] = []
    inputs = statistics(pack.layers[0])  # all projections of a pack read one input
    prepared = prepared_fit(fit, chosen.grid, inputs)
    rounding = rounding_of(chosen, pack.layers[0].role, input_grid(pack.name, chosen, inputs))
    try:
        for layer in pack.layers:
            target = weight_OI(modules[layer.matrix], layer.stored_as).detach()
            rows = torch.from_numpy(rows_of(layer.rows))
            original = target[rows].clone()
            encode = prepared.jointly(statistics(layer)) or prepared.encode
            encoded = encode(original.float().numpy())
            target[rows] = torch.from_numpy(decode_all(encoded, layer.in_features)).to(target.dtype)
            undo.append(partial(target.index_copy_, 0, rows, original))
        for matrix in dict.fromkeys(layer.matrix for layer in pack.layers):
            undo.append(modules[matrix].register_forward_pre_hook(input_hook(rounding)).remove)
        yield
    finally:
        for step in undo:
            step()


def _log_probabilities(module: nn.Module, window_T: NDArray[np.int64]) -> Tensor:
    with torch.inference_mode():
        logits = module(input_ids=torch.from_numpy(window_T[None])).logits[0]
        log_probabilities_TV: Tensor = logits.float().log_softmax(-1)
    return log_probabilities_TV


def _divergence(module: nn.Module, tokens_BT: Tokens, references: Sequence[Tensor], label: str) -> float:
    """KL(original || changed) in nats, mean over tokens."""
    total = 0.0
    for window, reference_TV in zip(tokens_BT, references, strict=True):
        changed_TV = _log_probabilities(module, window)
        total += float((reference_TV.exp() * (reference_TV - changed_TV)).sum(dtype=torch.float64))
    if not np.isfinite(total):
        raise InputError("the model's outputs are no numbers with it", where=label, next_step="exclude it")
    return max(total / tokens_BT.size, 0.0)


def _read(cache: Path, digest: str) -> dict[str, float]:
    try:
        stored = read_json(cache)
        return dict(stored["losses"]) if stored["key"] == digest else {}
    except (InputError, LookupError):
        return {}


def _write(cache: Path, digest: str, losses: Mapping[str, float]) -> None:
    beside = cache.with_suffix(f".{os.getpid()}")
    with writing(cache.parent, next_step=OTHER_CACHE):
        cache.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"key": digest, "losses": dict(losses)}, indent=1), encoding="utf-8")
        beside.replace(cache)
