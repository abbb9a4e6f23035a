"""Measures an artifact beside its references: accuracy, latency and memory, as its recipe asks.

Accuracy is compared with the original in transformers, which shares no code with the export. Latency and
memory are compared with the same graph in float32, so they show the gain of quantization alone. Quantizing,
`eval` and `bench` all measure here.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import TextPerplexity, measure_accuracy, measure_perplexity
from quantkit.evaluation.artifact import LARGEST_WINDOW, OpenArtifact
from quantkit.evaluation.encoder_decoder import measure_halves, perplexity_of_halves
from quantkit.evaluation.latency import Budget, measure_latency
from quantkit.evaluation.measurements import (
    Accuracy,
    Environment,
    Latency,
    Memory,
    PeakMemory,
    Similarity,
)
from quantkit.evaluation.memory import floor_ms, run_and_measure
from quantkit.evaluation.models import bytes_per_token, fitting, open_measured, runs_of
from quantkit.evaluation.reference import Reference, session_reference
from quantkit.evaluation.similarity import measure_similarity
from quantkit.evaluation.text import encoded_text, random_text
from quantkit.export.traffic import from_metadata
from quantkit.progress import Progress
from quantkit.recipe import Measure
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.machine.throughput import read_bandwidth_gb_per_s
from quantkit.runtime.session import Session
from quantkit.runtime.tokenizer import TOKENIZER_FILE

PROVIDER = "CPUExecutionProvider"
PACKAGES = ("quantkit-onnx", "onnxruntime", "transformers", "torch", "onnx", "numpy")
MAX_RUNS = 15
Tokens = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The results; None where a figure was not asked for or cannot be measured."""

    accuracy: Accuracy | None = None
    perplexity: TextPerplexity | None = None  # in place of accuracy, without a reference
    similarity: Similarity | None = None  # in place of accuracy, for an encoder
    latency: Latency | None = None
    memory: Memory | None = None
    notes: tuple[str, ...] = ()


def measure(
    artifact: OpenArtifact,
    *,
    original: Reference | None = None,
    reference: Path | None = None,
    accuracy: Accuracy | None = None,
    progress: Progress,
) -> Measured:
    """Everything that the artifact's recipe asks for.

    Accuracy is compared with `original`, or with the float graph in the folder `reference` where weights are
    random; an `accuracy` that is known already is not measured again. Times and memory are compared with
    `reference`.
    """
    measure, session = artifact.recipe.measure, artifact.session
    notes: list[str] = []
    reference_session = open_measured(reference, threads=artifact.threads) if reference else None
    result: Accuracy | Similarity | TextPerplexity | None = accuracy
    if measure.accuracy and result is None:
        if artifact.recipe.random_weights:
            original = session_reference(reference_session) if reference_session else None
        result = accuracy_of(artifact, original, notes, progress)
    lengths = fitting(session, *timed_lengths(measure, artifact.context))
    latency = None
    if measure.latency:
        latency = _latency(artifact, reference_session, lengths, notes, progress)
    run = "run" if session.generates else "encode"
    del session, reference_session
    memory = _memory(artifact, reference, run, lengths, progress) if measure.memory else None
    return Measured(
        accuracy=result if isinstance(result, Accuracy) else None,
        perplexity=result if isinstance(result, TextPerplexity) else None,
        similarity=result if isinstance(result, Similarity) else None,
        latency=latency,
        memory=memory,
        notes=tuple(notes),
    )


def accuracy_of(
    artifact: OpenArtifact, original: Reference | None, notes: list[str], progress: Progress
) -> Accuracy | Similarity | TextPerplexity | None:
    """The accuracy on the recipe's text; None with a note where no text can be read."""
    recipe, vocab_size = artifact.recipe, artifact.vocab_size
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


def compare(
    artifact: OpenArtifact,
    tokens: tuple[Tokens, str],
    original: Reference | None,
    progress: Progress,
    *,
    is_meaningful: bool = True,
) -> Accuracy | Similarity | TextPerplexity:
    """Next tokens of a decoder, vectors of an encoder, answers of both, on the same text."""
    session, measure = artifact.session, artifact.recipe.measure
    ids, text = tokens
    if session.reads_and_answers:
        window = answers_window(measure, session, len(ids))
        with progress.stage("accuracy", total=len(ids) - window // 2, unit="tokens") as count:
            if original is None:
                return perplexity_of_halves(
                    model=session.answer_logits,
                    token_ids=ids,
                    window=window,
                    start_ids=session.start_ids,
                    text=text,
                    progress=count,
                )
            return measure_halves(
                reference=original.answer_logits(),
                quantized=session.answer_logits,
                token_ids=ids,
                window=window,
                start_ids=session.start_ids,
                text=text,
                is_meaningful=is_meaningful,
                progress=count,
            )
    context = session.fixed_length or artifact.context
    if not session.generates:
        if original is None:
            raise InputError(
                "an encoder predicts no next token, and its original is not at hand",
                where=str(artifact.folder),
                next_step="name the original with --reference MODEL",
            )
        with progress.stage("accuracy", total=len(ids), unit="tokens") as count:
            return measure_similarity(
                reference=original.logits(),
                quantized=session.logits,
                token_ids=ids,
                window=min(measure.window or measure.prompt, context, len(ids)),
                text=text,
                is_meaningful=is_meaningful,
                progress=count,
            )
    window = min(measure.window or LARGEST_WINDOW, context, len(ids))
    stride = min(measure.stride or max(1, window // 2), window)
    with progress.stage("accuracy", total=len(ids) - 1, unit="tokens") as count:
        if original is None:
            return measure_perplexity(
                model=session.logits, token_ids=ids, window=window, stride=stride, text=text, progress=count
            )
        return measure_accuracy(
            reference=original.logits(),
            quantized=session.logits,
            token_ids=ids,
            window=window,
            stride=stride,
            text=text,
            is_meaningful=is_meaningful,
            progress=count,
        )


def answers_window(measure: Measure, session: Session, num_tokens: int) -> int:
    """Tokens of a window of which the encoder reads the first half and the decoder predicts the second."""
    longest = (session.context or LARGEST_WINDOW) - len(session.start_ids)
    return min(measure.window or LARGEST_WINDOW, 2 * longest, num_tokens)


def timed_lengths(measure: Measure, context: int) -> tuple[int, int]:
    """(prompt, tokens after it) as the recipe says, or as much of both as the context holds."""
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
            quantized=runs_of(session, *lengths),
            reference=runs_of(reference, *lengths) if reference else None,
            provider=PROVIDER,
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
    """Milliseconds that reading weights and cache for one token takes at the bandwidth measured now."""
    session = artifact.session
    if not session.generates or session.reads_and_answers:  # unknown share of weights
        return None
    traffic = from_metadata(session.metadata)
    if traffic is None:
        notes.append("no memory floor: the artifact does not say how many bytes a token reads")
        return None
    return floor_ms(
        bytes_read=bytes_per_token(session, traffic, lengths),
        bandwidth_gb_per_s=read_bandwidth_gb_per_s(artifact.threads),
    )


def _memory(
    artifact: OpenArtifact,
    reference: Path | None,
    run: str,
    lengths: tuple[int, int],
    progress: Progress,
) -> Memory:
    """Peak memory of loading and running, each in a process of its own."""

    def peaks(folder: Path) -> PeakMemory:
        load, ran = (peak_bytes(stage, folder, lengths, artifact.threads) for stage in ("load", run))
        return PeakMemory(load_peak_bytes=load, run_peak_bytes=ran)

    with progress.stage("memory"):
        return Memory(
            quantized=peaks(artifact.folder),
            reference=peaks(reference) if reference else None,
            empty_process_bytes=peak_bytes("empty", artifact.folder, lengths, artifact.threads),
        )


def peak_bytes(stage: str, folder: Path, lengths: tuple[int, int], threads: int) -> int:
    """The peak memory of one trial run in a process of its own."""
    trial = [sys.executable, "-m", "quantkit.runtime.memory_trial", stage, str(folder)]
    ran = run_and_measure([*trial, *map(str, (*lengths, threads))])
    if ran.exit_code:
        raise RuntimeError(f"the trial run failed: {ran.errors.strip()[-400:]}")
    return ran.peak_bytes


def environment() -> Environment:
    """The machine and the versions that measurements were made with."""
    cpu = read_cpu()
    return Environment(
        processor=cpu.model,
        num_cores=cpu.usable_cores,
        python=platform.python_version(),
        platform=platform.platform(),
        versions={name: version(name) for name in PACKAGES},
    )
