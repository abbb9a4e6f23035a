"""What is measured of each kind of exported model: how it is opened, what it puts out, its phases."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Logits
from quantkit.evaluation.encoder_decoder import AnswerLogits
from quantkit.evaluation.latency import Runs
from quantkit.export.static.shared_weights import with_all_logits
from quantkit.export.traffic import Traffic
from quantkit.pipeline.export import Exported
from quantkit.runtime import static_decoder as static_session
from quantkit.runtime.encoder import Encoder, encode, open_encoder
from quantkit.runtime.session import (
    MODEL_FILE,
    PROMPT_FILE,
    Decoder,
    State,
    all_logits,
    open_decoder,
    start,
    step,
)
from quantkit.runtime.static_decoder import (
    StaticDecoder,
    StaticState,
    holds_static,
    open_raw,
    open_static_decoder,
    text_logits,
)
from quantkit.runtime.traced import (
    PAST,
    NotTextError,
    Traced,
    TracedState,
    go_on,
    open_traced,
    read_prompt,
    traced_decoder,
    traced_logits,
)

Model = Decoder | Encoder | Traced | StaticDecoder
SETTLING_SECONDS = 0.05
FLOAT_BYTES = 4
SMALLEST_VOCABULARY = 28  # ids that every encoder has


def open_model(kind: str, folder: Path, *, threads: int | None = None) -> Model:
    """Open a model that was exported as a fused "decoder" or "encoder", or "traced"."""
    if kind == "decoder" and holds_static(folder):
        return open_static_decoder(folder, threads=threads)
    if kind == "decoder":
        return open_decoder(folder, threads=threads)
    if kind == "traced" and not (folder / MODEL_FILE).exists():
        return open_traced(folder, threads=threads)
    encoder = open_encoder(folder, threads=threads)
    has_cache = any(name.startswith(PAST) for name in encoder.inputs)
    return traced_decoder(encoder.session) if kind == "traced" and has_cache else encoder


def why_not_measured(exported: Exported) -> str | None:
    """Why nothing runs this model, or None; a tracer may write graphs that take other things than text."""
    if exported.kind != "traced":
        return None
    try:  # a file that cannot be loaded is no such reason, and ends the run
        model = open_model(exported.kind, exported.folder)
    except NotTextError as error:
        return str(error)
    try:
        if isinstance(model, Encoder):
            encode(model, np.ones((1, 2), np.int64))
    except InputError as error:
        return str(error)
    return None


def generates(model: Model) -> bool:
    """Whether it makes one token after the other."""
    return not isinstance(model, Encoder)


def reads_and_answers(model: Model) -> bool:
    """Whether an encoder reads the prompt, and a decoder answers it."""
    return isinstance(model, Traced) and model.encoder is not None


def outputs_of(model: Model) -> Logits:
    """A model as a function from token ids to its logits, or to its states where it has no head."""
    if isinstance(model, Encoder):
        return lambda ids: encode(model, ids)[model.outputs[0]]
    if isinstance(model, Traced):
        return lambda ids: traced_logits(model, ids)
    if isinstance(model, StaticDecoder):
        assert model.folder is not None
        threads = model.prompt.get_session_options().intra_op_num_threads
        whole = open_raw(with_all_logits(model.folder / PROMPT_FILE), model.folder, threads=threads)
        return lambda ids: text_logits(whole, ids)
    return lambda ids: all_logits(model, ids)


def fixed_length(model: Model) -> int | None:
    """How many tokens a model reads at once, where that is fixed."""
    if isinstance(model, StaticDecoder):
        return model.num_prompt
    return model.length if isinstance(model, Encoder) else None


def fitting(model: Model, prompt: int, decode: int) -> tuple[int, int]:
    """Lengths to time: a graph of fixed sizes computes all of its places whatever stands in them."""
    prompt = fixed_length(model) or prompt
    if isinstance(model, StaticDecoder):
        decode = min(decode, model.context - prompt)
    return prompt, decode


def bytes_per_token(model: Model, traffic: Traffic, lengths: tuple[int, int]) -> float:
    """Bytes that a token reads, on the average of those decoded after a prompt of some length."""
    prompt, decode = lengths
    if isinstance(model, StaticDecoder):  # all places of its cache, whatever stands in them
        return traffic.bytes_at(model.context, np.dtype(model.cache_type).itemsize)
    number_bytes = np.dtype(model.cache_type).itemsize if isinstance(model, Decoder) else FLOAT_BYTES
    return traffic.bytes_at(prompt + (decode + 1) / 2, number_bytes)


def answers_of(model: Traced) -> AnswerLogits:
    """An encoder and its decoder as a function of what each of them reads."""
    return lambda encoder_ids, ids: traced_logits(model, ids, encoder_ids=encoder_ids)


def settle() -> None:
    """Wait until the other model's threads, which look out for work for a while, have gone to sleep."""
    time.sleep(SETTLING_SECONDS)


def runs_of(model: Model, prompt: int, decode: int) -> Runs:
    """The phases of one model; a fused decoder's cache is made anew before each prompt, untimed."""
    vocab_size = SMALLEST_VOCABULARY if isinstance(model, Encoder) else model.vocab_size
    ids = np.random.default_rng(0).integers(0, vocab_size, (1, prompt)).astype(np.int64)
    if isinstance(model, Encoder):
        return Runs(prefill=lambda: encode(model, ids), prepare=settle)
    if isinstance(model, Traced):
        texts: list[TracedState] = []

        def read() -> None:
            texts[:] = [read_prompt(model, ids)[0]]

        return Runs(prefill=read, step=lambda: go_on(texts[0], ids[:, :1]), prepare=settle)
    if isinstance(model, StaticDecoder):
        begun: list[StaticState] = []

        def begin() -> None:
            begun[:] = [static_session.start(model, ids[0])[0]]

        return Runs(prefill=begin, step=lambda: static_session.step(begun[0], int(ids[0, 0])), prepare=settle)
    states: list[State] = []

    def prepare() -> None:
        settle()
        states[:] = [start(model, batch=1, capacity=prompt + decode)]

    return Runs(
        prefill=lambda: step(states[0], ids), step=lambda: step(states[0], ids[:, :1]), prepare=prepare
    )
