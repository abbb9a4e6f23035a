"""Measuring an exported model beside its original: accuracy, latency and memory, each only where it can be.

Accuracy is held against the original in transformers, which shares no code with the export. Times and
memory are held against the same graph in float32, so that they show what quantization gains and nothing else.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import measure_accuracy
from quantkit.evaluation.encoder_decoder import measure_halves
from quantkit.evaluation.latency import Budget, measure_latency
from quantkit.evaluation.measurements import Accuracy, Environment, Latency, Memory, PeakMemory, Similarity
from quantkit.evaluation.memory import floor_ms, run_and_measure
from quantkit.evaluation.models import (
    bytes_per_token,
    fitting,
    open_measured,
    runs_of,
    why_not_measured,
)
from quantkit.evaluation.similarity import measure_similarity
from quantkit.export.rotary import context_of
from quantkit.model.load import Source
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.open import reference_answer_logits, reference_logits
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.export import Exported, reference_size, write_reference
from quantkit.progress import Progress
from quantkit.recipe import Measure, Recipe
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.machine.throughput import read_bandwidth_gb_per_s
from quantkit.runtime.providers.placement import Placement, place
from quantkit.runtime.providers.table import PROVIDERS
from quantkit.runtime.session import Session
from quantkit.runtime.tokenizer import TOKENIZER_FILE, open_text

PROVIDER = "CPUExecutionProvider"
CONFIG_FILES = ("config.json", "generation_config.json")  # a decoder's first token is told there
RANDOM_TOKENS = 2048
LARGEST_WINDOW = 1024  # as in Hugging Face's documentation of perplexity
COPIES_TO_PLACE = 3  # of the weights, in the sessions that tell where nodes run
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

    placement: Placement | None = None
    accuracy: Accuracy | None = None
    similarity: Similarity | None = None
    latency: tuple[Latency, ...] = ()
    memory: Memory | None = None
    reference_bytes: int | None = None
    notes: tuple[str, ...] = ()


def accuracy_of(subject: Subject, *, progress: Progress) -> Accuracy | None:
    """A decoder with real weights beside its original, and nothing else; None where no text can be read."""
    quantized = open_measured(subject.exported.folder, threads=subject.threads)
    found = _compare(subject, quantized, None, progress, [])
    return found if isinstance(found, Accuracy) else None


def measure(subject: Subject, *, progress: Progress, known: Accuracy | None = None) -> Measured:
    """Everything that the recipe asks for; an accuracy that is `known` is not measured again."""
    wanted = subject.recipe.measure
    if not (wanted.accuracy or wanted.latency or wanted.memory):
        return Measured()
    placement = _placement(subject.exported)
    notes: list[str] = []
    reason = why_not_measured(subject.exported.folder) if subject.exported.kind == "traced" else None
    if reason:
        notes.append(f"the model is exported and checked, but not measured: {reason}")
        return Measured(placement=placement, notes=tuple(notes))
    with _float_twin(subject, progress, notes) as twin:
        quantized = open_measured(subject.exported.folder, threads=subject.threads)
        reference = open_measured(twin.folder, threads=subject.threads) if twin else None
        compared: Accuracy | Similarity | None = None
        if wanted.accuracy:
            compared = known or _compare(subject, quantized, reference, progress, notes)
        lengths = timed_lengths(wanted, subject.model_map.max_positions or LARGEST_WINDOW)
        lengths = fitting(quantized, *lengths)
        latency = _latency(subject, quantized, reference, lengths, progress) if wanted.latency else None
        if latency and quantized.reads_and_answers:
            notes.append("prefill is the encoder over the prompt and the decoder's first token after it")
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


def _placement(exported: Exported) -> Placement | None:
    """What the CPU provider runs, by the runtime's own record; None where memory is short for asking."""
    if exported.num_bytes * COPIES_TO_PLACE > psutil.virtual_memory().available:
        return None
    found = place(PROVIDERS["cpu"], exported.paths)
    return replace(found, num_nodes=None, operators=None, unplaced=None)


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
        num_weights = sum(layer.num_weights for layer in subject.model_map.at_inference.layers)
        with progress.stage("float reference", total=num_weights, unit="weights") as count:
            twin = _write_twin(subject, folder, notes, count)
        yield twin
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_twin(
    subject: Subject, folder: Path, notes: list[str], count: Callable[[int], None]
) -> Exported | None:
    try:
        twin = write_reference(subject.model_map, subject.weights, folder, count=count, **subject.options)
    except InputError as error:  # a traced float file may be larger than such a file can be
        if subject.exported.kind != "traced":
            raise
        notes.append(f"no float reference was timed: {error}")
        return None
    for name in CONFIG_FILES:
        if (subject.exported.folder / name).exists():
            shutil.copyfile(subject.exported.folder / name, folder / name)
    return twin


def _compare(
    subject: Subject, quantized: Session, reference: Session | None, progress: Progress, notes: list[str]
) -> Accuracy | Similarity | None:
    """Next tokens of a decoder, vectors of an encoder, on the same text."""
    wanted, is_random = subject.recipe.measure, subject.recipe.random_weights
    if is_random and reference is None:
        return None
    context = context_of(subject.model_map) or LARGEST_WINDOW
    tokens = _tokens(subject, subject.model_map.vocab_size or 0, notes)
    if tokens is None:
        return None
    common: dict[str, Any] = {"token_ids": tokens[0], "text": tokens[1], "is_meaningful": not is_random}
    if quantized.reads_and_answers:
        return _compare_answers(subject, quantized, common, progress)
    window = min(wanted.window or LARGEST_WINDOW, quantized.fixed_length or context, len(tokens[0]))
    original = reference.logits if is_random and reference else reference_logits(subject.source)
    common |= {"reference": original, "quantized": quantized.logits}
    if not quantized.generates:
        window = min(window, wanted.window or wanted.prompt)
        with progress.stage("accuracy", total=len(tokens[0]), unit="tokens") as count:
            return measure_similarity(**common, window=window, progress=count)
    stride = stride_of(wanted, window)
    with progress.stage("accuracy", total=len(tokens[0]) - 1, unit="tokens") as count:
        return measure_accuracy(**common, window=window, stride=stride, progress=count)


def _compare_answers(
    subject: Subject, quantized: Session, common: dict[str, Any], progress: Progress
) -> Accuracy:
    """What a decoder answers to what its encoder read; each has the context for itself."""
    num_tokens = len(common["token_ids"])
    window = answers_window(subject.recipe.measure, quantized, num_tokens)
    with progress.stage("accuracy", total=num_tokens - window // 2, unit="tokens") as count:
        return measure_halves(
            reference=reference_answer_logits(subject.source),
            quantized=quantized.answer_logits,
            window=window,
            start_ids=quantized.start_ids,
            progress=count,
            **common,
        )


def _tokens(subject: Subject, vocab_size: int, notes: list[str]) -> tuple[NDArray[np.int64], str] | None:
    """(token ids, name of the text)."""
    wanted = subject.recipe.measure
    if subject.recipe.random_weights:
        return random_text(wanted, vocab_size)
    folder = subject.exported.folder
    if not (folder / TOKENIZER_FILE).exists():
        notes.append("accuracy was not measured: the checkpoint brings no tokenizer")
        return None
    ids, name = encoded_text(wanted, folder)
    if len(ids) and ids.max() >= vocab_size:
        notes.append("accuracy was not measured: the tokenizer makes ids that the model does not have")
        return None
    return ids, name


def random_text(wanted: Measure, vocab_size: int) -> tuple[NDArray[np.int64], str]:
    """(token ids, their name) for random weights, which no text suits better."""
    ids = np.random.default_rng(0).integers(0, vocab_size, min(wanted.max_tokens, RANDOM_TOKENS))
    return ids.astype(np.int64), "random tokens"


def encoded_text(wanted: Measure, folder: Path) -> tuple[NDArray[np.int64], str]:
    """(token ids, the text's name), by the tokenizer in the folder."""
    text, name = read_text(wanted)
    return np.array(open_text(folder).encode(text)[: wanted.max_tokens], np.int64), name


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


def stride_of(wanted: Measure, window: int) -> int:
    """Tokens from window to window: as asked for, at most a whole one, or half of it."""
    return min(wanted.stride or max(1, window // 2), window)


def answers_window(wanted: Measure, model: Session, num_tokens: int) -> int:
    """Tokens of a window of which an encoder reads the first half and its decoder says the second."""
    longest = (model.context or LARGEST_WINDOW) - len(model.start_ids)
    return min(wanted.window or LARGEST_WINDOW, 2 * longest, num_tokens)


def timed_lengths(wanted: Measure, context: int) -> tuple[int, int]:
    """(prompt, tokens after it) as asked for, or as much of both as the model's context holds."""
    decode = min(wanted.decode, context // 2)
    return min(wanted.prompt, context - decode), decode


def _latency(
    subject: Subject,
    quantized: Session,
    reference: Session | None,
    lengths: tuple[int, int],
    progress: Progress,
) -> Latency:
    wanted = subject.recipe.measure
    prompt, decode = lengths
    with progress.stage("latency"):
        # Of weights behind an encoder a token reads a part that no plan tells.
        floor = None if quantized.reads_and_answers else _floor(subject, quantized, lengths)
        return measure_latency(
            quantized=runs_of(quantized, prompt, decode),
            reference=runs_of(reference, prompt, decode) if reference else None,
            provider=PROVIDER,
            threads=subject.threads,
            prompt_length=prompt,
            num_decoded=decode,
            budget=Budget(max_runs=15, max_seconds=wanted.seconds / 2),
            reference_name=(
                "a fused graph in float32" if quantized.fixed_length else "the same graph in float32"
            ),
            floor_ms_per_token=floor,
        )


def _floor(subject: Subject, quantized: Session, lengths: tuple[int, int]) -> float:
    """Milliseconds that reading weights and cache for one token takes, measured now."""
    return floor_ms(
        bytes_read=bytes_per_token(quantized, subject.exported.traffic, lengths),
        bandwidth_gb_per_s=read_bandwidth_gb_per_s(subject.threads),
    )


def _memory(subject: Subject, twin: Exported | None, lengths: tuple[int, int], progress: Progress) -> Memory:
    def peak(what: str, folder: Path) -> int:
        return peak_bytes(what, folder, lengths, subject.threads)

    def both(folder: Path) -> PeakMemory:
        return PeakMemory(load_peak_bytes=peak("load", folder), run_peak_bytes=peak("run", folder))

    with progress.stage("memory"):
        return Memory(
            quantized=both(subject.exported.folder),
            reference=both(twin.folder) if twin else None,
            empty_process_bytes=peak("empty", subject.exported.folder),
        )


def peak_bytes(what: str, folder: Path, lengths: tuple[int, int], threads: int) -> int:
    """The most memory of one trial run in a process of its own."""
    trial = [sys.executable, "-m", "quantkit.runtime.memory_trial", what, str(folder)]
    ran = run_and_measure([*trial, *map(str, (*lengths, threads))])
    if ran.exit_code:
        raise RuntimeError(f"the trial run failed: {ran.errors.strip()[-400:]}")
    return ran.peak_bytes


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
