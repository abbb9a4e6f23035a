"""The stages of a provider's trial, in the process that `trial.py` started.

A stage writes into `Trial.results`; once a session has started, its failure does not end the later stages.
Decoders are timed as sessions, and graphs of fixed sizes by running each file on the inputs that it declares:
the file that takes several tokens reads the prompt, the one that takes a single token makes the next. A
provider that compiles is started twice: from the graphs, which keeps the compiled ones, and at the end from
these.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil
from numpy.typing import NDArray

from quantkit.model.model_map import to_json
from quantkit.runtime.encoder import ENDS
from quantkit.runtime.generate import Batch
from quantkit.runtime.machine.checks import check_provider
from quantkit.runtime.machine.facts import read_cpu, read_hardware
from quantkit.runtime.manifest import target_of
from quantkit.runtime.providers.compiled import compile_kept, find
from quantkit.runtime.providers.compiled import start as start_kept
from quantkit.runtime.providers.placement import (
    assigned,
    explained,
    feeds_of,
    placement_of,
    read_macs,
    record_options,
)
from quantkit.runtime.providers.status import provider_status
from quantkit.runtime.providers.table import RELU_MODEL, Provider, one_line, open_on
from quantkit.runtime.session import OPENERS, kind_of
from quantkit.runtime.static_decoder import FOLDED_WEIGHTS

FEWEST_RUNS, MOST_RUNS = 3, 15
PATIENCE = 4.0  # times the given seconds, after which even fewer runs do: emulators are slow
PREFIX_STEP = 8
# Targets whose graphs the CPU runs best with all weights made floats at the start.
STATIC_TARGETS = ("npu", "openvino")


@dataclass(kw_only=True, slots=True)
class Trial:
    """The options of the trial, its open sessions, and its results so far."""

    options: argparse.Namespace
    provider: Provider
    results: dict[str, Any]
    sessions: dict[Path, onnxruntime.InferenceSession] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """A prompt, a token after it, and the untimed preparation of a prompt."""

    prompt_length: int
    prefill: Callable[[], object]
    step: Callable[[], object] | None = None
    prepare: Callable[[], object] = lambda: None


def look(trial: Trial) -> None:
    status = provider_status(trial.provider.name)
    if not status.usable:
        finding = check_provider(status, read_hardware(read_cpu().model))
        if not status.installed:
            trial.results["cure"] = trial.provider.install
            raise RuntimeError(status.why_not.partition(": pip ")[0])
        assert finding is not None, "an installed provider without a device is a finding"
        trial.results["cure"] = finding.cure
        raise RuntimeError(finding.message)
    trial.results |= {"device": ", ".join(status.devices) or None, "version": status.version}


def load_library(trial: Trial) -> None:
    """The time that the first session of a process needs beyond later ones, on a graph of one node."""
    began = time.perf_counter()
    with contextlib.suppress(Exception):  # a provider need not like that graph
        open_on(trial.provider, RELU_MODEL, _session_options(trial))
    trial.results["library_ms"] = (time.perf_counter() - began) * 1e3


def _session_options(trial: Trial) -> onnxruntime.SessionOptions:
    options = record_options(threads=trial.options.threads)
    if trial.provider.name == "cpu" and target_of(trial.options.folder) in STATIC_TARGETS:
        options.add_session_config_entry(*FOLDED_WEIGHTS)
    return options


def open_sessions(trial: Trial) -> None:
    """Open every file of the artifact and time that."""
    provider, target = trial.provider, target_of(trial.options.folder)
    trial.results["cure"] = f"quantize for it, or exclude what it refuses; it needs: {provider.needs}"
    if target and not _is_made_for(provider, target):
        trial.results["cure"] = (
            f"quantkit quantize MODEL --target {provider.target}; it needs: {provider.needs}"
        )
    said: list[str] = trial.results.setdefault("said", [])
    elapsed = 0.0
    for path in sorted(trial.options.folder.glob("*.onnx")):
        kept = find(provider, path) if provider.keeps_compiled else None
        began = time.perf_counter()
        try:
            if kept and not kept.context:
                trial.sessions[path], why_not_kept = compile_kept(
                    provider, path, lambda: _session_options(trial)
                )
                said += [f"{path.name}: {why_not_kept}"] if why_not_kept else []
            else:
                trial.sessions[path] = open_on(provider, str(path), _session_options(trial))
        except Exception as error:
            made_for = f"made for --target {target}: " if target else ""
            raise RuntimeError(f"{path.name}, {made_for}{one_line(error)}") from error
        elapsed += time.perf_counter() - began
        if kept and kept.reason:
            said.append(f"{path.name} was compiled again: {kept.reason}")
    trial.results["start_ms"] = elapsed * 1e3
    del trial.results["cure"]


def start_again(trial: Trial) -> None:
    """Open the same sessions from the compiled graphs, checks included."""
    if not trial.provider.keeps_compiled:
        return
    began = time.perf_counter()
    for path in trial.sessions:
        started = start_kept(trial.provider, path, lambda: _session_options(trial))
        if not started.is_reused:
            raise RuntimeError(started.message or f"what was compiled of {path.name} is not there any more")
    trial.results["start_again_ms"] = (time.perf_counter() - began) * 1e3
    trial.results["compile_ms"] = max(0.0, trial.results["start_ms"] - trial.results["start_again_ms"])


def _is_made_for(provider: Provider, target: str) -> bool:
    """`cpu` and `cpu-vnni` are one target here."""
    return target.partition("-")[0] == provider.target.partition("-")[0]


def time_phases(trial: Trial) -> None:
    """Milliseconds of prompts and of the tokens after them."""
    options = trial.options
    phases = phases_of(trial)
    trial.results["prompt_length"] = phases.prompt_length
    half = options.seconds / 2
    trial.results["prefill_ms"] = timed(phases.prefill, seconds=half, prepare=phases.prepare)
    step_once = phases.step
    if step_once is None:
        return

    def begin() -> None:
        phases.prepare()
        phases.prefill()

    def go_on_for() -> None:
        for _ in range(options.decode):
            step_once()

    samples = timed(go_on_for, seconds=half, prepare=begin)
    trial.results["decode_ms"] = [sample / options.decode for sample in samples]


def phases_of(trial: Trial) -> Phases:
    if len(trial.sessions) == 1:
        (session,) = trial.sessions.values()
        if not _fixed_length(session):
            return _free_phases(trial, session)
    lengths = {path: _fixed_length(session) for path, session in trial.sessions.items()}
    prompts = [trial.sessions[path] for path, length in lengths.items() if length and length > 1]
    steps = [trial.sessions[path] for path, length in lengths.items() if length == 1]
    if not prompts and not steps:
        raise RuntimeError("an encoder and its decoder in several files are timed on the CPU alone, by bench")
    prompt, *_ = prompts or steps
    return Phases(
        prompt_length=_fixed_length(prompt) or 1,
        prefill=_runs(prompt),
        step=_runs(steps[0]) if steps else None,
    )


def _fixed_length(session: onnxruntime.InferenceSession) -> int | None:
    """Tokens that a graph of fixed sizes takes."""
    for value in session.get_inputs():
        if value.name == "input_ids":
            return value.shape[-1] if isinstance(value.shape[-1], int) else None
    return None


def _runs(session: onnxruntime.InferenceSession) -> Callable[[], object]:
    feeds = feeds_of(session)
    return lambda: session.run(None, feeds)


def _free_phases(trial: Trial, session: onnxruntime.InferenceSession) -> Phases:
    """Phases of one file that takes texts of any length."""
    options = trial.options
    ids = np.ones((1, options.prompt), np.int64)
    kind = kind_of(session)
    if kind == "encoder":
        feeds = feeds_of(session, ids=ids)
        return Phases(prompt_length=options.prompt, prefill=lambda: session.run(None, feeds))
    model, batches = OPENERS[kind](session, options.folder), list[Batch]()

    def prepare() -> None:
        batches[:] = [model.begin(ids.tolist(), options.decode)]

    return Phases(
        prompt_length=options.prompt,
        prefill=lambda: batches[0].read(),  # noqa: PLW0108 (a new batch in every run)
        step=lambda: batches[0].step(ids[0, :1], (0,)),
        prepare=prepare,
    )


def timed(run: Callable[[], object], *, seconds: float, prepare: Callable[[], object]) -> list[float]:
    """Milliseconds of repeated runs after one to warm up; `prepare` is not timed."""
    began = time.perf_counter()
    prepare()
    run()
    samples: list[float] = []
    while len(samples) < MOST_RUNS:
        elapsed = time.perf_counter() - began
        if samples and elapsed > seconds and (len(samples) >= FEWEST_RUNS or elapsed > PATIENCE * seconds):
            break
        prepare()
        start_of_run = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start_of_run) * 1e3)
    return samples


def read_peak(trial: Trial) -> None:
    """Peak memory of this process so far."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii", errors="replace").splitlines() if status.exists() else []
    peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    memory = psutil.Process().memory_info()
    trial.results["peak_bytes"] = peak or int(getattr(memory, "peak_wset", memory.rss))


def write_logits(trial: Trial) -> None:
    """Logits [windows, positions, vocabulary] of the given texts."""
    options = trial.options
    if options.ids is None:
        return
    ids_WS: NDArray[np.int64] = np.load(options.ids)
    readers = [session for session in trial.sessions.values() if _fixed_length(session) != 1]
    if len(trial.sessions) > 1 and not any(_fixed_length(session) for session in readers):
        raise RuntimeError("of an encoder and its decoder in several files no logits are compared")
    if not readers:
        raise RuntimeError("no file of it reads a text at once")
    session = readers[0]
    length = min(ids_WS.shape[1], _fixed_length(session) or ids_WS.shape[1])
    names = [value.name for value in session.get_outputs()]
    outputs = ["logits"] if "logits" in names else names[:1]
    is_one = len(next(value.shape for value in session.get_outputs() if value.name == outputs[0])) == 2

    def logits(ids_S: NDArray[np.int64]) -> NDArray[np.float32]:
        out = session.run(outputs, feeds_of(session, ids=ids_S[None]))[0]
        return np.asarray(out.reshape(-1, out.shape[-1]), np.float32)

    positions = list(range(length))
    began = time.perf_counter()
    gives_all = len(logits(ids_WS[0, :length])) >= length and not is_one
    affordable = max(1, int(options.patience / (time.perf_counter() - began)))
    if is_one:  # answer for a whole text, as a classifier gives it; of a text's ends one number a token
        is_ends = outputs[0] in ENDS
        positions = [0]
        rows = [logits(ids_S[:length])[:, : length if is_ends else None] for ids_S in ids_WS[:affordable]]
    elif gives_all:
        rows = [logits(ids_S[:length])[:length] for ids_S in ids_WS[:affordable]]
    else:  # those of the last token alone, so texts that end earlier
        texts_WS = ids_WS[:affordable]
        positions = spread(positions[PREFIX_STEP - 2 :: PREFIX_STEP], affordable // len(texts_WS))
        rows = [np.stack([logits(ids_S[: place + 1])[-1] for place in positions]) for ids_S in texts_WS]
    np.save(options.logits, np.stack(rows))
    trial.results["positions"] = positions


def spread(places: list[int], count: int) -> list[int]:
    """At most `count` of the places, evenly apart."""
    count = max(1, min(count, len(places)))
    return [places[number * len(places) // count] for number in range(count)]


def read_placement(trial: Trial) -> None:
    """A file that the CPU cannot run has no share of MACs."""
    paths = list(trial.sessions)
    files = [assigned(session, read_macs(path)) for path, session in trial.sessions.items()]
    placement = placement_of(trial.provider, files)
    trial.results["placement"] = to_json(placement)
    if placement.unplaced:
        target = target_of(trial.options.folder)
        if target and not _is_made_for(trial.provider, target):
            trial.results["said"].append(
                f"the artifact was made for --target {target}; this provider's own is --target "
                f"{trial.provider.target}"
            )
        placement = explained(placement, trial.provider, paths, threads=trial.options.threads)
        trial.results["placement"] = to_json(placement)


STAGES: tuple[tuple[str, Callable[[Trial], None]], ...] = (
    ("looking for the provider", look),
    ("loading its library", load_library),
    ("starting a session", open_sessions),
    ("timing it", time_phases),
    ("reading its memory", read_peak),
    ("asking for the placement", read_placement),
    ("starting again from what it compiled", start_again),
    ("comparing its logits", write_logits),  # the last, since an emulator takes seconds for each
)
