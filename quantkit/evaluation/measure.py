"""Accuracy, latency and memory of an artifact and its references, as set in its recipe.

The reference of accuracy is the original in transformers, which shares no code with the export. The reference
of latency and memory is the same graph in float32, which isolates the gain of quantization. `quantize`,
`eval` and `bench` all measure with this module.
"""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Ints, TextPerplexity, measure_accuracy, measure_perplexity
from quantkit.evaluation.artifact import LARGEST_WINDOW, OpenArtifact, open_measured
from quantkit.evaluation.categories import accuracy_by_category, category_windows
from quantkit.evaluation.encoder_decoder import measure_halves
from quantkit.evaluation.encoders import compare_encoder
from quantkit.evaluation.latency import Budget, bytes_per_token, fitting, measure_latency, phases_of
from quantkit.evaluation.measurements import (
    Accuracy,
    Environment,
    FloatError,
    Latency,
    Memory,
    PeakMemory,
    Similarity,
)
from quantkit.evaluation.memory import floor_ms, run_and_measure
from quantkit.evaluation.pictures import compare_pictures
from quantkit.evaluation.reference import Reference, session_reference
from quantkit.evaluation.samples import Samples, take_samples
from quantkit.evaluation.text import encoded_text, random_text, read_text
from quantkit.export.traffic import from_metadata
from quantkit.progress import Progress
from quantkit.recipe import Measure
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.machine.facts import cache_bytes, read_cpu
from quantkit.runtime.machine.throughput import read_bandwidth_gb_per_s
from quantkit.runtime.pictures import PREPROCESSOR_FILE
from quantkit.runtime.session import Session
from quantkit.runtime.tokenizer import TOKENIZER_FILE, open_text

PACKAGES = ("quantkit-onnx", "onnxruntime", "transformers", "torch", "onnx", "numpy")
MAX_RUNS = 15
Figure = TypeVar("Figure")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Results of `measure`; None for a figure that the recipe leaves out or that cannot be measured."""

    accuracy: Accuracy | None = None
    similarity: Similarity | None = None  # of an encoder, in place of accuracy
    float_error: FloatError | None = None
    latency: Latency | None = None
    memory: Memory | None = None
    samples: Samples | None = None
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()  # figures that could not be measured because of an error


def attempt(name: str, measure: Callable[[], Figure], failures: list[str]) -> Figure | None:
    """The figure; None and a line in `failures` after an error, which costs the figure and no artifact."""
    try:
        return measure()
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        reason = reason if isinstance(error, InputError) else f"{type(error).__name__}: {reason}"
        failures.append(f"{name} was not measured: {reason}")
        return None


def measure(
    artifact: OpenArtifact,
    *,
    original: Reference | None = None,
    reference: Path | None = None,
    accuracy: Accuracy | None = None,
    progress: Progress,
) -> Measured:
    """Measure the figures that the recipe of the artifact turns on.

    Accuracy is compared with `original`; with random weights, with the float graph in the folder `reference`.
    A given `accuracy` is not measured again. Latency and memory are compared with `reference`.
    """
    measure, session = artifact.recipe.measure, artifact.session
    notes: list[str] = []
    failures: list[str] = []
    reference_session = None
    if reference:
        opening = partial(open_measured, reference, threads=artifact.threads)
        reference_session = attempt("the float reference", opening, failures)
    result: Accuracy | Similarity | TextPerplexity | None = accuracy
    if measure.accuracy and result is None:
        if artifact.recipe.random_weights:
            original = session_reference(reference_session) if reference_session else None
        result = attempt("accuracy", partial(accuracy_of, artifact, original, notes, progress), failures)
    samples = None
    reads_pictures = isinstance(session, Encoder) and session.reads_pictures
    if result is not None and not reads_pictures and reference_session and not artifact.recipe.random_weights:
        taking = partial(_samples, artifact, reference_session, progress)
        samples = attempt("the comparison of answers", taking, failures)
    lengths = fitting(session, *timed_lengths(measure, artifact.context))
    latency = None
    if measure.latency:
        timing = partial(_latency, artifact, reference_session, lengths, notes, progress)
        latency = attempt("latency", timing, failures)
    run = "run" if session.generates else "encode"
    del session, reference_session
    memory = None
    if measure.memory:
        memory = attempt("memory", partial(_memory, artifact, reference, run, lengths, progress), failures)
    return Measured(
        accuracy=result if isinstance(result, Accuracy) else None,
        similarity=result if isinstance(result, Similarity) else None,
        latency=latency,
        memory=memory,
        samples=samples,
        notes=tuple(notes),
        failures=tuple(failures),
    )


def _samples(artifact: OpenArtifact, reference: Session, progress: Progress) -> Samples | None:
    text, _ = read_text(artifact.recipe.measure)
    with progress.stage("answers"):
        tokenizer = open_text(artifact.folder)
        return take_samples(reference, artifact.session, tokenizer, text, folder=artifact.folder)


def accuracy_of(
    artifact: OpenArtifact, original: Reference | None, notes: list[str], progress: Progress
) -> Accuracy | Similarity | TextPerplexity | None:
    """Accuracy on the recipe's text; None and a note if the tokenizer is missing or does not fit."""
    recipe, vocab_size = artifact.recipe, artifact.vocab_size
    session = artifact.session
    if isinstance(session, Encoder) and session.reads_pictures:
        return _accuracy_on_pictures(artifact, session, original, notes, progress)
    if recipe.random_weights and vocab_size:
        if original is None:
            return None
        return compare(
            artifact, random_text(recipe.measure, vocab_size), original, progress, is_meaningful=False
        )
    if not (artifact.folder / TOKENIZER_FILE).exists():
        notes.append("accuracy was not measured: the checkpoint brings no tokenizer")
        return None
    ids, name = encoded_text(recipe.measure, artifact.folder)
    if vocab_size and ids.max(initial=0) >= vocab_size:
        notes.append("accuracy was not measured: the tokenizer makes ids that the model does not have")
        return None
    return compare(artifact, (ids, name), original, progress)


def _accuracy_on_pictures(
    artifact: OpenArtifact,
    session: Encoder,
    original: Reference | None,
    notes: list[str],
    progress: Progress,
) -> Similarity | None:
    has_random_weights = artifact.recipe.random_weights
    if not (has_random_weights or (artifact.folder / PREPROCESSOR_FILE).exists()):
        notes.append(f"accuracy was not measured: the checkpoint brings no {PREPROCESSOR_FILE}")
        return None
    if original is None:
        return None
    return compare_pictures(artifact, session, original, progress, is_meaningful=not has_random_weights)


def compare(
    artifact: OpenArtifact,
    tokens: tuple[Ints, str],
    original: Reference | None,
    progress: Progress,
    *,
    is_meaningful: bool = True,
) -> Accuracy | Similarity | TextPerplexity:
    """Compare an artifact with its original: logits of a decoder, outputs of an encoder, answers of both."""
    session, measure = artifact.session, artifact.recipe.measure
    ids, text = tokens
    if session.reads_and_answers:
        window = answers_window(measure, session, len(ids))
        with progress.stage("accuracy", total=len(ids) - window // 2, unit="tokens") as count:
            return measure_halves(
                reference=original.answer_logits() if original else None,
                quantized=session.answer_logits,
                token_ids=ids,
                window=window,
                start_ids=session.start_ids,
                text=text,
                is_meaningful=is_meaningful,
                progress=count,
            )
    if not session.generates:
        assert original is not None, "an encoder has no perplexity of its own"
        return compare_encoder(artifact, tokens, original, progress, is_meaningful=is_meaningful)
    context = session.fixed_length or artifact.context
    window = min(measure.window or LARGEST_WINDOW, context, len(ids))
    stride = min(measure.stride or max(1, window // 2), window)
    with progress.stage("accuracy", total=len(ids) - 1, unit="tokens") as count:
        if original is None:
            return measure_perplexity(
                model=session.logits, token_ids=ids, window=window, stride=stride, text=text, progress=count
            )
        logits = original.logits()
        accuracy = measure_accuracy(
            reference=logits,
            quantized=session.logits,
            token_ids=ids,
            window=window,
            stride=stride,
            text=text,
            is_meaningful=is_meaningful,
            progress=count,
        )
    if not is_meaningful or not (artifact.folder / TOKENIZER_FILE).exists():
        return accuracy
    windows = category_windows(measure, artifact.folder, context=context, vocab_size=artifact.vocab_size)
    total = sum(windows_NT.size for windows_NT in windows.values())
    with progress.stage("accuracy by category", total=total, unit="tokens") as count:
        categories = accuracy_by_category(logits, session.logits, windows, count)
    return replace(accuracy, categories=categories)


def answers_window(measure: Measure, session: Session, num_tokens: int) -> int:
    """Tokens of a window: the encoder reads the first half, the decoder predicts the second."""
    longest = (session.context or LARGEST_WINDOW) - len(session.start_ids)
    return min(measure.window or LARGEST_WINDOW, 2 * longest, num_tokens)


def timed_lengths(measure: Measure, context: int) -> tuple[int, int]:
    """(prompt length, decoded tokens) of the recipe, cut to the context."""
    decode = min(measure.decode, context // 2)
    return min(measure.prompt, context - decode), decode


def _latency(
    artifact: OpenArtifact,
    reference: Session | None,
    lengths: tuple[int, int],
    notes: list[str],
    progress: Progress,
) -> Latency:
    session = artifact.session
    with progress.stage("latency"):
        floor = _memory_floor_ms(artifact, lengths, notes)
        if session.reads_and_answers:
            notes.append("prefill is the encoder over the prompt and the decoder's first token after it")
        return measure_latency(
            quantized=phases_of(session, *lengths),
            reference=phases_of(reference, *lengths) if reference else None,
            threads=artifact.threads,
            prompt_length=lengths[0],
            num_decoded=lengths[1],
            budget=Budget(max_runs=MAX_RUNS, max_seconds=artifact.recipe.measure.seconds / 2),
            reference_name=(
                ("a fused graph in float32" if session.fixed_length else "the same graph in float32")
                if reference
                else None
            ),
            floor_ms_per_token=floor,
        )


def _memory_floor_ms(artifact: OpenArtifact, lengths: tuple[int, int], notes: list[str]) -> float | None:
    """Milliseconds to read weights and cache of one token at the measured memory bandwidth."""
    session = artifact.session
    if not session.generates or session.reads_and_answers:  # bytes per token are unknown
        return None
    traffic = from_metadata(session.metadata)
    if traffic is None:
        notes.append("no memory floor: the artifact does not say how many bytes a token reads")
        return None
    bytes_read, cached = bytes_per_token(session, traffic, lengths), cache_bytes()
    if cached and bytes_read <= cached:
        notes.append(
            f"no memory floor: the {bytes_read / 1e6:.1f} MB that a token reads fit the processor's cache"
        )
        return None
    return floor_ms(
        bytes_read=bytes_read,
        bandwidth_gb_per_s=read_bandwidth_gb_per_s(artifact.threads),
    )


def _memory(
    artifact: OpenArtifact,
    reference: Path | None,
    run: str,
    lengths: tuple[int, int],
    progress: Progress,
) -> Memory:
    """Peak memory of loading and of running, in a process for each."""

    def peak_bytes(stage: str, folder: Path) -> int:
        trial = [sys.executable, "-m", "quantkit.runtime.memory_trial", stage, str(folder)]
        child = run_and_measure([*trial, *map(str, (*lengths, artifact.threads))])
        if child.exit_code < 0:
            name = signal.Signals(-child.exit_code).name
            raise InputError(f"{name} ended the process that was to {stage} the model")
        if child.exit_code:
            raise RuntimeError(f"the memory trial failed: {child.errors.strip()[-400:]}")
        count(1)
        return child.peak_bytes

    def peaks(folder: Path) -> PeakMemory:
        load = peak_bytes("load", folder)
        return PeakMemory(load_peak_bytes=load, run_peak_bytes=peak_bytes(run, folder))

    num_trials = 5 if reference else 3
    with progress.stage("memory", total=num_trials, unit="processes") as count:
        return Memory(
            quantized=peaks(artifact.folder),
            reference=peaks(reference) if reference else None,
            empty_process_bytes=peak_bytes("empty", artifact.folder),
        )


def environment() -> Environment:
    """Machine and package versions of a measurement."""
    cpu = read_cpu()
    return Environment(
        processor=cpu.model,
        num_cores=cpu.usable_cores,
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: version(name) for name in PACKAGES},
    )
