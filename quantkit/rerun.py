"""A stage of the main job again, on an artifact that lies in a folder: its accuracy, or its speed and memory.

What the artifact's recipe says holds unless a flag says otherwise, so that the same figures come out again.
The original stands beside it where it is at hand: named by the caller, or by the recipe and on this disk.
Nothing is downloaded unless it is named.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluate.accuracy import Logits, TextPerplexity, measure_accuracy, measure_perplexity
from quantkit.evaluate.agreement import agreement
from quantkit.evaluate.latency import Budget, measure_latency, timing_of
from quantkit.evaluate.memory import floor_ms
from quantkit.evaluate.similarity import measure_similarity
from quantkit.measurements import (
    Accuracy,
    Latency,
    Memory,
    PeakMemory,
    PlacedOperator,
    Placement,
    ProviderAccuracy,
    ProviderRun,
    Similarity,
    UnplacedNode,
)
from quantkit.measuring import (
    LARGEST_WINDOW,
    PROVIDER,
    encoded_text,
    peak_bytes,
    random_text,
    stride_of,
    timed_lengths,
)
from quantkit.model.load import DEMO_NAME, open_source
from quantkit.model.weight_source import reference_logits, with_weights
from quantkit.quantization import RECIPE_FILE
from quantkit.recipe import Recipe, load_recipe, override
from quantkit.report.progress import Progress
from quantkit.runtime.doctor import read_cpu
from quantkit.runtime.encoder import Encoder, open_encoder
from quantkit.runtime.provider_trial import Asked, try_provider
from quantkit.runtime.session import MODEL_FILE, Decoder, open_decoder
from quantkit.runtime.static_session import holds_static, open_static_decoder
from quantkit.runtime.throughput import read_bandwidth_gb_per_s
from quantkit.runtime.traced import holds_model
from quantkit.stages import held_bytes
from quantkit.subjects import (
    SMALLEST_VOCABULARY,
    Model,
    bytes_per_token,
    fitting,
    fixed_length,
    generates,
    open_model,
    outputs_of,
    reads_and_answers,
    runs_of,
)
from quantkit.traffic import heard

# Texts whose logits providers are compared by: few, since an emulator takes seconds for each.
COMPARED_WINDOWS, COMPARED_LENGTH = 4, 64
# What a provider's process says in the words of its record.
TOLD = (
    "why_not", "cure", "device", "version", "prompt_length", "peak_bytes", "library_ms", "start_ms",
    "start_again_ms", "compile_ms",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An artifact, ready to run."""

    folder: Path
    model: Model
    recipe: Recipe
    metadata: Mapping[str, Any]

    @property
    def context(self) -> int:
        """The most tokens that it reads."""
        if not isinstance(self.model, Encoder) and self.model.context:
            return self.model.context
        return int(self.metadata.get("max_positions") or LARGEST_WINDOW)

    @property
    def threads(self) -> int:
        """What it runs with."""
        return self.recipe.measure.threads or read_cpu().num_threads

    @property
    def described(self) -> dict[str, str]:
        """The artifact in words."""
        return {
            "artifact": str(self.folder),
            "model": self.recipe.model or str(self.metadata.get("model", "an unnamed model")),
            "scheme": str(self.metadata.get("scheme", self.recipe.scheme)),
        }

    @property
    def size_bytes(self) -> int:
        """Graph and weights."""
        return held_bytes(self.folder, sorted(self.folder.glob("*.onnx")))


def open_artifact(folder: Path, changes: Mapping[str, Any]) -> Opened:
    """Open an artifact with its recipe, of which `changes` replace some keys."""
    if not holds_model(folder):
        raise InputError(
            "no model.onnx there",
            where=str(folder),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        )
    path = folder / RECIPE_FILE
    recipe = override(load_recipe(path) if path.exists() else Recipe(), changes)
    model, metadata = _open(folder, recipe.measure.threads)
    return Opened(folder=folder, model=model, recipe=recipe, metadata=metadata)


def _open(folder: Path, threads: int | None) -> tuple[Model, Mapping[str, Any]]:
    """As what it was exported, and what its graph says of itself."""
    if holds_static(folder):
        decoder = open_static_decoder(folder, threads=threads)
        return decoder, decoder.metadata
    if not (folder / MODEL_FILE).exists():
        return open_model("traced", folder, threads=threads), {}
    model: Decoder | Encoder
    try:
        model = open_decoder(folder, threads=threads)
    except InputError:  # no logits: an encoder, or a file that the next line refuses in the same words
        model = open_encoder(folder, threads=threads)
    stored = json.loads(model.session.get_modelmeta().custom_metadata_map.get("quantkit", "{}"))
    is_decoder = isinstance(model, Decoder) and bool(model.caches)
    kind = stored.get("kind") or ("decoder" if is_decoder else "encoder")
    is_open = isinstance(model, Decoder if kind == "decoder" else Encoder)
    return (model if is_open else open_model(kind, folder, threads=threads)), stored


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """How accurate an artifact is; beside a reference, or for a decoder alone."""

    result: Accuracy | Similarity | TextPerplexity
    reference: str | None
    notes: tuple[str, ...]


def evaluate(opened: Opened, *, reference: str | None, progress: Progress) -> Evaluated:
    """Perplexity, and where there is an original everything that is measured beside it."""
    recipe, wanted = opened.recipe, opened.recipe.measure
    notes: list[str] = []
    name = reference or _original_at_hand(recipe, notes)
    is_encoder = isinstance(opened.model, Encoder)
    if reads_and_answers(opened.model):
        raise InputError(
            "an encoder with a decoder behind it is measured by 'quantkit quantize' alone",
            where=str(opened.folder),
            allowed="decoders and encoders",
        )
    if is_encoder and name is None:
        raise InputError(
            "an encoder predicts no next token, and its original is not at hand",
            where=str(opened.folder),
            next_step="name the original with --reference MODEL",
        )
    ids, text = _tokens(opened)
    readable = fixed_length(opened.model) or opened.context
    window = min(wanted.window or LARGEST_WINDOW, readable, len(ids))
    common: dict[str, Any] = {"token_ids": ids, "text": text}
    quantized, original = outputs_of(opened.model), _logits_of(name, opened.threads) if name else None
    result: Accuracy | Similarity | TextPerplexity
    if is_encoder:
        assert original is not None
        window = min(window, wanted.window or wanted.prompt)
        with progress.stage("accuracy", total=len(ids), unit="tokens") as count:
            result = measure_similarity(
                **common, reference=original, quantized=quantized, window=window, progress=count
            )
        return Evaluated(result=result, reference=name, notes=tuple(notes))
    common |= {"window": window, "stride": stride_of(wanted, window)}
    with progress.stage("accuracy", total=len(ids) - 1, unit="tokens") as count:
        if original is None:
            result = measure_perplexity(**common, model=quantized, progress=count)
        else:
            result = measure_accuracy(**common, reference=original, quantized=quantized, progress=count)
    return Evaluated(result=result, reference=name, notes=tuple(notes))


def _original_at_hand(recipe: Recipe, notes: list[str]) -> str | None:
    """The recipe's model where it lies on this disk; a name is not fetched for the asking."""
    if recipe.model is None:
        notes.append("no recipe names the original; --reference MODEL compares with it")
        return None
    if recipe.random_weights:
        notes.append("the weights are random, so perplexity says nothing")
        return None
    path = Path(recipe.model).expanduser()
    if recipe.model == DEMO_NAME or (path / "config.json").exists() or path.is_file():
        return recipe.model
    notes.append(f"the original, {recipe.model}, is not on this disk; --reference MODEL compares with it")
    return None


def _logits_of(name: str, threads: int) -> Logits:
    """Another artifact in the runtime, or a model in transformers."""
    if holds_model(Path(name).expanduser()):
        return outputs_of(_open(Path(name).expanduser(), threads)[0])
    return reference_logits(with_weights(open_source(name), random_weights=False))


def _tokens(opened: Opened) -> tuple[NDArray[np.int64], str]:
    """(token ids, name of the text)."""
    wanted, model = opened.recipe.measure, opened.model
    vocab_size = None if isinstance(model, Encoder) else model.vocab_size
    if opened.recipe.random_weights and vocab_size:
        return random_text(wanted, vocab_size)
    ids, name = encoded_text(wanted, opened.folder)
    if vocab_size and len(ids) and ids.max() >= vocab_size:
        raise InputError(
            f"its tokenizer makes id {ids.max()}, and the model has {vocab_size} tokens",
            where=str(opened.folder),
            next_step="copy the tokenizer.json that the checkpoint came with",
        )
    return ids, name


def require_room(opened: Opened, asked: Mapping[str, int | None]) -> None:
    """Refuse lengths that were typed and do not fit; those of a recipe shrink to the model's context."""
    total = sum(length or 0 for length in asked.values())
    if total > opened.context:
        raise InputError(
            f"{total} tokens are more than the model's context",
            where=" and ".join(flag for flag, length in asked.items() if length),
            allowed=f"up to {opened.context}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmarked:
    """How fast an artifact is, and what memory it takes."""

    latency: Latency
    memory: Memory
    notes: tuple[str, ...]


def benchmark(opened: Opened, *, progress: Progress) -> Benchmarked:
    """Prompt, tokens after it and peak memory on the CPU provider."""
    wanted, model = opened.recipe.measure, opened.model
    lengths = fitting(model, *timed_lengths(wanted, opened.context))
    traffic = heard(opened.metadata)
    notes = []
    with progress.stage("latency"):
        floor = None
        if traffic:
            bandwidth = read_bandwidth_gb_per_s(opened.threads)
            bytes_read = bytes_per_token(model, traffic, lengths)
            floor = floor_ms(bytes_read=bytes_read, bandwidth_gb_per_s=bandwidth)
        elif generates(model):
            notes.append("no memory floor: the artifact does not say how many bytes a token reads")
        latency = measure_latency(
            quantized=runs_of(model, *lengths),
            reference=None,
            provider=PROVIDER,
            threads=opened.threads,
            prompt_length=lengths[0],
            num_decoded=lengths[1],
            budget=Budget(max_runs=15, max_seconds=wanted.seconds / 2),
            floor_ms_per_token=floor,
        )
    with progress.stage("memory"):
        run = "run" if generates(model) else "encode"
        memory = _memory(opened.folder, run, lengths, opened.threads)
    return Benchmarked(latency=latency, memory=memory, notes=tuple(notes))


def _memory(folder: Path, run: str, lengths: tuple[int, int], threads: int) -> Memory:
    """Peaks of processes of their own."""

    def peak(what: str) -> int:
        return peak_bytes(what, folder, lengths, threads)

    peaks = PeakMemory(load_peak_bytes=peak("load"), run_peak_bytes=peak(run))
    return Memory(quantized=peaks, empty_process_bytes=peak("empty"))


def benchmark_providers(
    opened: Opened, asked: Sequence[Asked], *, time_limit: float, progress: Progress
) -> tuple[tuple[ProviderRun, ...], tuple[str, ...]]:
    """(a row for each provider, notes); each in a process of its own, so none can end the others."""
    notes: list[str] = []
    lengths = fitting(opened.model, *timed_lengths(opened.recipe.measure, opened.context))
    with tempfile.TemporaryDirectory(prefix="quantkit-") as made:
        ids_path = Path(made) / "ids.npy"
        with progress.stage("reference"):
            compared = _compared(opened, notes)
        if compared:
            np.save(ids_path, compared[0])
        runs = []
        for number, each in enumerate(asked):
            logits_path = Path(made) / f"logits-{number}.npy"
            with progress.stage(each.name):
                found = try_provider(
                    opened.folder,
                    each,
                    threads=opened.threads,
                    prompt=lengths[0],
                    decode=lengths[1],
                    seconds=opened.recipe.measure.seconds / 2,
                    time_limit=time_limit,
                    ids=ids_path if compared else None,
                    logits=logits_path,
                )
            accuracy = None
            if compared and "positions" in found:
                logits = np.load(logits_path)
                accuracy = agreement(
                    logits,
                    compared[1][: len(logits), found["positions"]],
                    ids_WS=compared[0][: len(logits)],
                    positions=found["positions"],
                    reference=compared[2],
                    predicts_tokens=generates(opened.model),
                )
            runs.append(_provider_run(each, found, accuracy))
    return tuple(runs), tuple(notes)


def _compared(opened: Opened, notes: list[str]) -> tuple[NDArray[np.int64], NDArray[np.float32], str] | None:
    """(texts, the reference's logits, what it is): the original, or else the same file on the CPU."""
    if reads_and_answers(opened.model):
        notes.append("an encoder with a decoder behind it is placed, but its logits are not compared")
        return None
    try:
        ids, _ = _tokens(opened)
    except InputError as error:  # no tokenizer, or a text that it does not fit
        notes.append(f"logits are compared on random tokens ({error})")
        ids = np.random.default_rng(0).integers(0, SMALLEST_VOCABULARY, COMPARED_WINDOWS * COMPARED_LENGTH)
    length = min(COMPARED_LENGTH, fixed_length(opened.model) or opened.context, len(ids))
    count = min(COMPARED_WINDOWS, len(ids) // length)
    texts_WS = ids[: count * length].reshape(count, length)
    name = _original_at_hand(opened.recipe, [])
    outputs = _logits_of(name, opened.threads) if name else outputs_of(opened.model)
    words = f"{name} in float32" if name else "the same file on the CPU"
    made = np.concatenate([outputs(ids_S[None]) for ids_S in texts_WS])
    return texts_WS, made if made.ndim > 2 else made[:, None], words  # one answer a text stands at one place


def _provider_run(asked: Asked, found: Mapping[str, Any], accuracy: ProviderAccuracy | None) -> ProviderRun:
    """The record of what a trial printed."""
    placed = found.get("placement")
    return ProviderRun(
        provider=asked.name,
        python=asked.python,
        outcome=found["outcome"],
        prefill=timing_of(found["prefill_ms"]) if found.get("prefill_ms") else None,
        decode=timing_of(found["decode_ms"]) if found.get("decode_ms") else None,
        placement=Placement(
            **placed
            | {
                "operators": tuple(PlacedOperator(**each) for each in placed["operators"]),
                "unplaced": tuple(UnplacedNode(**each) for each in placed["unplaced"]),
            }
        )
        if placed
        else None,
        accuracy=accuracy,
        notes=(*found.get("notes", ()), *found.get("said", ())),
        **{key: found.get(key) for key in TOLD},
    )


def fell_back(run: ProviderRun) -> bool:
    """Whether it did not run all of the model, or nobody knows."""
    return run.placement is None or bool(run.placement.unplaced)
