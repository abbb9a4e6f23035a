"""How much the whole model loses when one matrix product alone is put into a format.

The original runs in torch; for each unit and format its weights are replaced by what the fit makes of them,
its input is rounded as the runtime would round it, everything else stays as it was, and the KL divergence of
the next token is taken against the original. Every figure goes to a file as soon as it is known, so that an
interrupted run goes on where it stopped. HAWQ (https://arxiv.org/abs/1905.03696) ranks layers by curvature; a
forward pass costs less than a Hessian here, and counts the rounding of inputs too.
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
from quantkit.model.linears import weight_OI
from quantkit.model.model_map import ModelMap, Role
from quantkit.model.names import modules_by_name
from quantkit.plan.formats import FLOAT, Format, format_for
from quantkit.quantization.grid import decode_all
from quantkit.quantization.layout import Pack
from quantkit.quantization.rounding import QUANTIZERS
from quantkit.quantization.rounding.apply import Evidences, fitting_for, input_grid, usable
from quantkit.quantization.search import Choice, UnitOptions
from quantkit.quantization.simulate import hook_of, rounding_of, rows_of

Progress = Callable[[int], None]
VERSION = 2  # of the method: a change makes older figures worthless


def format_named(name: str, unit: Pack) -> Format:
    """The format that a scheme gives a unit."""
    return format_for(name, is_head=unit.layers[0].role is Role.LM_HEAD)


def measure_sensitivity(
    module: nn.Module,
    model_map: ModelMap,
    units: Sequence[Pack],
    names: Sequence[str],
    tokens_BT: NDArray[np.int64],
    *,
    fit: str,
    evidence: Evidences,
    cache: Path,
    key: str,
    progress: Progress = lambda _: None,
) -> tuple[UnitOptions, ...]:
    """Every unit in every format by itself; "float" loses nothing. Costs are left at 0 for others to fill."""
    digest = hashlib.sha256(json.dumps([VERSION, key, fit, hash_of(tokens_BT)]).encode()).hexdigest()
    known = _read(cache, digest)
    modules = modules_by_name(module)
    references: list[Tensor] = []
    found = []
    for unit in units:
        losses = {FLOAT: 0.0}
        for name in names:
            label = f"{unit.name}: {name}"
            if label not in known:
                if not references:
                    references = [_log_probabilities(module, window) for window in tokens_BT]
                with replaced(modules, unit, format_named(name, unit), fit=fit, evidence=evidence):
                    known[label] = _divergence(module, tokens_BT, references, label)
                _write(cache, digest, known)
            losses[name] = known[label]
            progress(1)
        options = tuple(Choice(format=name, loss=loss) for name, loss in losses.items())
        layers = tuple(layer.name for layer in unit.layers)
        found.append(UnitOptions(name=unit.name, layers=layers, options=options))
    return tuple(found)


@contextmanager
def replaced(
    modules: Mapping[str, nn.Module], unit: Pack, chosen: Format, *, fit: str, evidence: Evidences
) -> Iterator[None]:
    """One unit in a format for as long as the context lasts."""
    undo: list[Callable[[], Any]] = []
    seen = evidence(unit.layers[0])
    fixed = input_grid(unit.name, chosen, seen)
    quantizer = usable(QUANTIZERS[fit], seen, chosen.grid)
    fitting = fitting_for(quantizer, chosen.grid, seen)  # all of a unit read one input
    try:
        for layer in unit.layers:
            linear = modules[layer.matrix]
            target = weight_OI(linear, layer.stored_as).detach()
            rows = rows_of(layer.rows)
            original = target[rows].clone()
            fit_rows = fitting.joined(evidence(layer)) or fitting.of_rows
            encoded = fit_rows(original.float().numpy())
            target[rows] = torch.from_numpy(decode_all(encoded, layer.in_features)).to(target.dtype)
            undo.append(partial(target.index_copy_, 0, rows, original))
        rounding = rounding_of(chosen, unit.layers[0].role, fixed)
        for matrix in dict.fromkeys(layer.matrix for layer in unit.layers):
            undo.append(modules[matrix].register_forward_pre_hook(hook_of(rounding)).remove)
        yield
    finally:
        for step in undo:
            step()


def _log_probabilities(module: nn.Module, window_T: NDArray[np.int64]) -> Tensor:
    with torch.inference_mode():
        logits = module(input_ids=torch.from_numpy(window_T[None])).logits[0]
        found: Tensor = logits.float().log_softmax(-1)
    return found


def _divergence(
    module: nn.Module, tokens_BT: NDArray[np.int64], references: Sequence[Tensor], label: str
) -> float:
    """KL(original || changed) in nats, mean over tokens."""
    total = 0.0
    for window, reference_TV in zip(tokens_BT, references, strict=True):
        changed_TV = _log_probabilities(module, window)
        total += float((reference_TV.exp() * (reference_TV - changed_TV)).sum(dtype=torch.float64))
    if not np.isfinite(total):
        raise InputError("the model's outputs are no numbers with it", where=label, next_step="exclude it")
    return max(total / tokens_BT.size, 0.0)


def hash_of(tokens_BT: NDArray[np.int64]) -> str:
    """What tells one set of tokens from another."""
    return hashlib.sha256(np.ascontiguousarray(tokens_BT, np.int64).tobytes()).hexdigest()


def _read(cache: Path, digest: str) -> dict[str, float]:
    try:
        stored = json.loads(cache.read_text(encoding="utf-8"))
        return dict(stored["losses"]) if stored["key"] == digest else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _write(cache: Path, digest: str, losses: Mapping[str, float]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    beside = cache.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps({"key": digest, "losses": dict(losses)}, indent=1), encoding="utf-8")
    beside.replace(cache)
