"""Measuring an exported model beside its original: accuracy, latency and memory, each only where it can be.

Accuracy is held against the original in transformers, which shares no code with the export. Times and
memory are held against the same graph in float32, so that they show what quantization gains and nothing else.
"""

from __future__ import annotations

import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluate.accuracy import Logits, measure_accuracy
from quantkit.evaluate.latency import Budget, Runs, measure_latency
from quantkit.evaluate.memory import floor_ms, run_and_measure
from quantkit.evaluate.similarity import measure_similarity
from quantkit.export.rotary import context_of
from quantkit.measurements import (
    Accuracy,
    Environment,
    Latency,
    Memory,
    PeakMemory,
    Placement,
    Similarity,
)
from quantkit.model.load import Source
from quantkit.model.tensors import TensorSource
from quantkit.model.weight_source import reference_logits
from quantkit.recipe import Measure, Recipe
from quantkit.records import ModelMap
from quantkit.report.progress import Progress
from quantkit.runtime.doctor import read_cpu
from quantkit.runtime.encoder import Encoder, encode, open_encoder
from quantkit.runtime.session import Decoder, State, all_logits, open_decoder, start, step
from quantkit.runtime.text import TOKENIZER_FILE, open_text
from quantkit.runtime.throughput import read_bandwidth_gb_per_s
from quantkit.stages import Exported, reference_size, write_reference

PROVIDER = "CPUExecutionProvider"
Model = Decoder | Encoder
SETTLING_SECONDS = 0.05
SMALLEST_VOCABULARY = 28  # ids that every encoder has
LARGEST_WINDOW = 1024  # as in Hugging Face's documentation of perplexity
SAFE_SHARE = 0.6  # of the free memory that a float reference may take
PACKAGES = ("quantkit-onnx", "onnxruntime", "transformers", "torch", "onnx", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is measured, and what it was made from."""

    exported: Exported
    model_map: ModelMap
    source: Source
    weights: TensorSource
    recipe: Recipe
    options: dict[str, Any]  # of the export, for the float twin

    @property
    def threads(self) -> int:
        """What everything is timed with."""
        return self.recipe.measure.threads or read_cpu().num_threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What came of it; None where it was not asked for or cannot be had."""

    placement: Placement
    accuracy: Accuracy | None = None
    similarity: Similarity | None = None
    latency: tuple[Latency, ...] = ()
    memory: Memory | None = None
    reference_bytes: int | None = None
    notes: tuple[str, ...] = ()


def measure(subject: Subject, *, progress: Progress) -> Measured:
    """Everything that the recipe asks for."""
    wanted = subject.recipe.measure
    placement = _placement()
    if not (wanted.accuracy or wanted.latency or wanted.memory):
        return Measured(placement=placement)
    notes: list[str] = []
    if len(subject.exported.paths) > 1 or (
        subject.exported.kind == "traced"
        and subject.model_map.blocks
        and subject.model_map.blocks[-1].stack == "decoder"
    ):
        notes.append("a traced model with a cache is exported and checked; nothing of it is measured yet")
        return Measured(placement=placement, notes=tuple(notes))
    with _float_twin(subject, progress, notes) as twin:
        is_decoder = subject.exported.kind == "decoder"
        opener: Callable[..., Model] = open_decoder if is_decoder else open_encoder
        quantized = opener(subject.exported.folder, threads=subject.threads)
        reference = opener(twin.folder, threads=subject.threads) if twin else None
        compared = _compare(subject, quantized, reference, progress, notes) if wanted.accuracy else None
        lengths = timed_lengths(wanted, subject.model_map.max_positions or LARGEST_WINDOW)
        latency = _latency(subject, quantized, reference, lengths, progress) if wanted.latency else None
        del quantized, reference
        memory = _memory(subject, twin, lengths, progress) if wanted.memory else None
        return Measured(
            placement=placement,
            accuracy=compared if isinstance(compared, Accuracy) else None,
            similarity=compared if isinstance(compared, Similarity) else None,
            latency=(latency,) if latency else (),
            memory=memory,
            reference_bytes=twin.num_bytes if twin else None,
            notes=tuple(notes),
        )


def _placement() -> Placement:
    """The built-in CPU provider runs every node, since no other is asked."""
    return Placement(provider=PROVIDER, node_fraction=1.0, mac_fraction=1.0)


@contextmanager
def _float_twin(subject: Subject, progress: Progress, notes: list[str]) -> Iterator[Exported | None]:
    """The same graph in float32 for as long as it is needed, where memory and disk allow."""
    size = reference_size(subject.model_map)
    folder = subject.exported.folder / ".reference"
    fits_memory = size < psutil.virtual_memory().available * SAFE_SHARE
    fits_disk = 2 * size < shutil.disk_usage(subject.exported.folder).free
    if not (fits_memory and fits_disk):
        scarce = "memory" if not fits_memory else "disk space"
        notes.append(
            f"no float reference was timed: its {size / 1e9:.1f} GB do not fit into the free {scarce}"
        )
        yield None
        return
    folder.mkdir()
    try:
        num_weights = sum(layer.num_weights for layer in subject.model_map.layers)
        with progress.stage("float reference", total=num_weights, unit="weights") as count:
            twin = write_reference(subject.model_map, subject.weights, folder, count=count, **subject.options)
        yield twin
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(
    subject: Subject, quantized: Model, reference: Model | None, progress: Progress, notes: list[str]
) -> Accuracy | Similarity | None:
    """Next tokens of a decoder, vectors of an encoder, on the same text."""
    wanted, is_random = subject.recipe.measure, subject.recipe.random_weights
    if is_random and reference is None:
        return None
    context = context_of(subject.model_map) or LARGEST_WINDOW
    tokens = _tokens(subject, subject.model_map.vocab_size or 0, notes)
    if tokens is None:
        return None
    window = min(wanted.window or LARGEST_WINDOW, context, len(tokens[0]))
    original = outputs_of(reference) if is_random and reference else reference_logits(subject.source)
    common: dict[str, Any] = {"reference": original, "quantized": outputs_of(quantized)}
    common |= {"token_ids": tokens[0], "text": tokens[1], "is_meaningful": not is_random}
    if isinstance(quantized, Encoder):
        window = min(window, wanted.window or wanted.prompt)
        with progress.stage("accuracy", total=len(tokens[0]), unit="tokens") as count:
            return measure_similarity(**common, window=window, progress=count)
    stride = min(wanted.stride or window // 2, window - 1)
    with progress.stage("accuracy", total=len(tokens[0]) - 1, unit="tokens") as count:
        return measure_accuracy(**common, window=window, stride=stride, progress=count)


def outputs_of(model: Model) -> Logits:
    """A model as a function from token ids to its logits, or to its states where it has no head."""
    if isinstance(model, Encoder):
        return lambda ids: encode(model, ids)[model.outputs[0]]
    return lambda ids: all_logits(model, ids)


def _tokens(subject: Subject, vocab_size: int, notes: list[str]) -> tuple[NDArray[np.int64], str] | None:
    """(token ids, name of the text)."""
    wanted = subject.recipe.measure
    if subject.recipe.random_weights:
        ids = np.random.default_rng(0).integers(0, vocab_size, min(wanted.max_tokens, 2048))
        return ids.astype(np.int64), "random tokens"
    folder = subject.exported.folder
    if not (folder / TOKENIZER_FILE).exists():
        notes.append("accuracy was not measured: the checkpoint brings no tokenizer")
        return None
    text, name = read_text(wanted)
    ids = np.array(open_text(folder).encode(text)[: wanted.max_tokens], np.int64)
    if len(ids) and ids.max() >= vocab_size:
        notes.append("accuracy was not measured: the tokenizer makes ids that the model does not have")
        return None
    return ids, name


def read_text(wanted: Measure) -> tuple[str, str]:
    """(text, its name): the user's file, or the bundled held-out text."""
    if wanted.text is None:
        bundled = resources.files("quantkit") / "assets" / "demo" / "evaluation.txt"
        return bundled.read_text(encoding="utf-8"), "bundled held-out text"
    path = Path(wanted.text).expanduser()
    try:
        return path.read_text(encoding="utf-8"), path.name
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot be read ({error})",
            where=str(path),
            allowed="a text file in UTF-8",
            next_step="check --text",
        ) from error


def timed_lengths(wanted: Measure, context: int) -> tuple[int, int]:
    """(prompt, tokens after it) as asked for, or as much of both as the model's context holds."""
    decode = min(wanted.decode, context // 2)
    return min(wanted.prompt, context - decode), decode


def _latency(
    subject: Subject,
    quantized: Model,
    reference: Model | None,
    lengths: tuple[int, int],
    progress: Progress,
) -> Latency:
    wanted = subject.recipe.measure
    prompt, decode = lengths
    with progress.stage("latency"):
        bandwidth = read_bandwidth_gb_per_s(subject.threads)
        return measure_latency(
            quantized=_runs(quantized, prompt, decode),
            reference=_runs(reference, prompt, decode) if reference else None,
            provider=PROVIDER,
            threads=subject.threads,
            prompt_length=prompt,
            num_decoded=decode,
            budget=Budget(max_runs=15, max_seconds=wanted.seconds / 2),
            reference_name="the same graph in float32",
            floor_ms_per_token=floor_ms(
                bytes_read=subject.exported.bytes_per_token, bandwidth_gb_per_s=bandwidth
            ),
        )


def settle() -> None:
    """Wait until the other model's threads, which look out for work for a while, have gone to sleep."""
    time.sleep(SETTLING_SECONDS)


def _runs(model: Model, prompt: int, decode: int) -> Runs:
    """The phases of one model; a decoder's cache is made anew before each prompt, untimed."""
    vocab_size = model.vocab_size if isinstance(model, Decoder) else SMALLEST_VOCABULARY
    ids = np.random.default_rng(0).integers(0, vocab_size, (1, prompt)).astype(np.int64)
    if isinstance(model, Encoder):
        return Runs(prefill=lambda: encode(model, ids), prepare=settle)
    states: list[State] = []

    def prepare() -> None:
        settle()
        states[:] = [start(model, batch=1, capacity=prompt + decode)]

    return Runs(
        prefill=lambda: step(states[0], ids), step=lambda: step(states[0], ids[:, :1]), prepare=prepare
    )


def _memory(subject: Subject, twin: Exported | None, lengths: tuple[int, int], progress: Progress) -> Memory:
    run = "run" if subject.exported.kind == "decoder" else "encode"

    def peak(what: str, folder: Path) -> int:
        trial = [sys.executable, "-m", "quantkit.runtime.trial", what, str(folder)]
        ran = run_and_measure([*trial, *map(str, (*lengths, subject.threads))])
        if ran.exit_code:
            raise RuntimeError(f"the trial run failed: {ran.errors.strip()[-400:]}")
        return ran.peak_bytes

    def both(folder: Path) -> PeakMemory:
        return PeakMemory(load_peak_bytes=peak("load", folder), run_peak_bytes=peak(run, folder))

    with progress.stage("memory"):
        return Memory(
            quantized=both(subject.exported.folder),
            reference=both(twin.folder) if twin else None,
            empty_process_bytes=peak("empty", subject.exported.folder),
        )


def environment() -> Environment:
    """Where this runs."""
    cpu = read_cpu()
    return Environment(
        processor=cpu.model,
        num_cores=cpu.usable_cores,
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: version(name) for name in PACKAGES},
    )
