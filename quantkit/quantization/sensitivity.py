"""Sensitivity: the loss of the whole model when one pack alone is put into a format.

The original runs in torch. For each pack and format the pack's weights are replaced by their fitted values,
its input is rounded as the runtime would round it, everything else stays as it is, and the KL divergence of
the next token is taken against the original. Every loss is written to a file as soon as it is known, so that
an interrupted run continues where it stopped; on workers each loss is a task. HAWQ
(https://arxiv.org/abs/1905.03696) ranks layers by curvature; a forward pass costs less than a Hessian here,
and includes the rounding of inputs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from quantkit.quantization.rounding.outliers import outliers_of
from quantkit.quantization.search import Choice, PackOptions
from quantkit.quantization.simulate import beside_outliers, input_hook, rounding_of
from quantkit.runtime.machine.disk import OTHER_CACHE, writing
from quantkit.workers.record import THREADS, Workers
from quantkit.workers.shared import opened

VERSION = 3  # of the method: a change invalidates older losses


def format_named(name: str, pack: Pack) -> Format:
    """The format that a scheme gives a pack."""
    role = pack.layers[0].role
    return fitted_to_head(format_for(name, role), role, pack.in_features)


def measure_sensitivity(
    module: nn.Module | None,
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
    workers: Workers | None = None,
    rebuild: Callable[[], nn.Module] | None = None,
) -> tuple[PackOptions, ...]:
    """The loss of every pack in every format by itself; "float" loses nothing. Costs are left at 0.

    Workers get the model from `rebuild` instead of `module`; each holds all of it.
    """
    tokens_digest = hashlib.sha256(np.ascontiguousarray(tokens_BT, np.int64).tobytes()).hexdigest()
    digest = hashlib.sha256(json.dumps([VERSION, key, fit, tokens_digest]).encode()).hexdigest()
    cached = _read(cache, digest)
    trials = {_label(pack, name): (pack, name) for pack in packs for name in names}
    missing = {label: trial for label, trial in trials.items() if label not in cached}
    progress(len(trials) - len(missing))
    if workers:
        assert rebuild
        losses = _on_workers(workers, SentTrials(rebuild, tokens_BT, fit, statistics), missing)
    else:
        assert module
        losses = _in_this_process(module, tokens_BT, fit, statistics, missing)
    for label, loss in losses:
        cached[label] = loss
        _write(cache, digest, cached)
        progress(1)
    table = []
    for pack in packs:
        known = {FLOAT: 0.0} | {name: cached[_label(pack, name)] for name in names}
        options = tuple(Choice(format=name, loss=loss) for name, loss in known.items())
        layers = tuple(layer.name for layer in pack.layers)
        table.append(PackOptions(name=pack.name, layers=layers, options=options))
    return tuple(table)


Trial = tuple[Pack, str]  # the name of a format


def _label(pack: Pack, name: str) -> str:
    return f"{pack.name}: {name}"


@dataclass(frozen=True, slots=True)
class SentTrials:
    """Everything that all trials share, as workers are sent it."""

    rebuild: Callable[[], nn.Module]
    tokens_BT: Tokens
    fit: str
    statistics: StatisticsOf


@dataclass(frozen=True, slots=True)
class Original:
    """The model beside its predictions."""

    module: nn.Module
    modules: Mapping[str, nn.Module]
    tokens_BT: Tokens
    references: Sequence[Tensor]
    fit: str
    statistics: StatisticsOf

    def loss(self, pack: Pack, name: str) -> float:
        chosen = format_named(name, pack)
        with _replaced(self.modules, pack, chosen, fit=self.fit, statistics=self.statistics):
            return _divergence(self.module, self.tokens_BT, self.references, _label(pack, name))


def _original(module: nn.Module, tokens_BT: Tokens, fit: str, statistics: StatisticsOf) -> Original:
    references = [_log_probabilities(module, window) for window in tokens_BT]
    return Original(module, modules_by_name(module), tokens_BT, references, fit, statistics)


def _in_this_process(
    module: nn.Module, tokens_BT: Tokens, fit: str, statistics: StatisticsOf, trials: Mapping[str, Trial]
) -> Iterator[tuple[str, float]]:
    if trials:
        original = _original(module, tokens_BT, fit, statistics)
        for label, trial in trials.items():
            yield label, original.loss(*trial)


def _on_workers(
    workers: Workers, sent: SentTrials, trials: Mapping[str, Trial]
) -> Iterator[tuple[str, float]]:
    """Losses in the order of their ends."""
    shared = workers.share(sent)
    labels = {workers.submit(trial_loss, shared, *trial): label for label, trial in trials.items()}
    for done in as_completed(labels):
        yield labels[done], done.result()


def trial_loss(shared: Any, pack: Pack, name: str) -> float:
    """The loss of one pack in one format; runs in a worker."""
    original: Original = opened(shared, open_trials)
    return original.loss(pack, name)


def open_trials(sent: SentTrials) -> Original:
    torch.set_num_threads(THREADS)
    return _original(sent.rebuild(), sent.tokens_BT, sent.fit, sent.statistics)


@contextmanager
def _replaced(
    modules: Mapping[str, nn.Module], pack: Pack, chosen: Format, *, fit: str, statistics: StatisticsOf
) -> Iterator[None]:
    """One pack in a format while the context lasts."""
    undo: list[Callable[[], Any]] = []
    inputs = statistics(pack.layers[0])  # all projections of a pack read one input
    outliers = outliers_of(replace(pack, format=chosen), inputs)
    if inputs and outliers:
        inputs = outliers.seen_by_fit(inputs)
    prepared = prepared_fit(fit, chosen.grid, inputs)
    rounding = rounding_of(chosen, pack.layers[0].role, input_grid(pack.name, chosen, inputs))
    if outliers:
        rounding = partial(beside_outliers, rounding, outliers.columns_I)
    try:
        for layer in pack.layers:
            target = weight_OI(modules[layer.matrix], layer.stored_as).detach()
            rows = torch.from_numpy(rows_of(layer.rows))
            original = target[rows].clone()
            own = statistics(layer)
            own = outliers.seen_by_fit(own) if own and outliers else own
            encode = prepared.jointly(own) or prepared.encode
            float_OI = original.float().numpy()
            encoded = encode(outliers.on_grid(float_OI) if outliers else float_OI)
            decoded_OI = decode_all(encoded, layer.in_features)
            if outliers and not outliers.is_tied:
                decoded_OI[:, outliers.columns_I] = float_OI[:, outliers.columns_I]
            target[rows] = torch.from_numpy(decoded_OI).to(target.dtype)
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
