"""A decoder of two static graphs, run on any provider: one reads a prompt, the other a token at a time.

The host keeps the cache: it copies what each run gives for its own tokens to their places in arrays of fixed
length, in whatever type the graphs give. What a provider compiled is kept for later sessions (`compiled.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.runtime.generate import Sampling, checked, continue_rows
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.providers import compiled
from quantkit.runtime.providers.placement import TYPES
from quantkit.runtime.providers.status import provider_status
from quantkit.runtime.providers.table import PROVIDERS, open_on
from quantkit.runtime.session import DECODE_FILE, PROMPT_FILE

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
PAST, PRESENT = "past_key_values.", "present."
# The CPU has no products of 16-bit codes: it makes floats of weights in every run, unless told to do it once.
FOLDED_WEIGHTS = ("session.disable_quant_qdq", "1")
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticDecoder:
    """Two open sessions and what is fixed of them."""

    prompt: onnxruntime.InferenceSession
    decode: onnxruntime.InferenceSession
    num_prompt: int  # tokens that a prompt can have
    num_past: int  # tokens that the cache can hold
    vocab_size: int = 0
    folder: Path | None = None  # where its files lie
    metadata: Mapping[str, Any] = field(default_factory=dict)
    cache_type: Any = np.float32

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.num_past + 1


@dataclass(kw_only=True, slots=True)
class StaticState:
    """The cache of one text."""

    decoder: StaticDecoder
    caches: dict[str, NDArray[Any]]  # by the decode graph's input, [1, heads, num_past, head size]
    length: int  # places filled


def _settings(provider: str, threads: int | None) -> onnxruntime.SessionOptions:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = threads or read_cpu().num_threads
    if provider == "cpu":
        settings.add_session_config_entry(*FOLDED_WEIGHTS)
    return settings


def open_static_session(
    model: Path,
    *,
    provider: str = "cpu",
    is_strict: bool = True,
    threads: int | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> onnxruntime.InferenceSession:
    """A session on one provider; with `is_strict`, none in which any node fell back to the CPU.

    A provider that compiles graphs starts from what it kept of the last time; `say` is told where that does
    not fit any more.
    """

    def options() -> onnxruntime.SessionOptions:
        settings = _settings(provider, threads)
        if provider != "cpu" and is_strict:
            settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return settings

    session: onnxruntime.InferenceSession
    try:
        if PROVIDERS[provider].keeps_compiled:
            started = compiled.start(PROVIDERS[provider], model, options)
            session = started.session
            if started.said:
                say(started.said)
        else:
            session = open_on(PROVIDERS[provider], str(model), options())
    except Exception as error:  # onnxruntime's own exceptions share no useful base class
        raise InputError(
            f"provider '{provider}' cannot run all of it ({' '.join(str(error).split())[:300]})",
            where=str(model),
            next_step="'quantkit doctor' lists what each provider needs",
        ) from error
    return session


def holds_static(folder: Path) -> bool:
    """Whether the folder is such a decoder."""
    return (folder / PROMPT_FILE).exists() and (folder / DECODE_FILE).exists()


def open_static_decoder(folder: Path, *, provider: str = "cpu", threads: int | None = None) -> StaticDecoder:
    """Both graphs of an artifact, on a provider that runs all of them."""
    if provider not in PROVIDERS:
        raise InputError(f"no provider '{provider}'", where="--provider", allowed=", ".join(PROVIDERS))
    with vendors_words_aside():
        status = provider_status(provider)
        if not status.usable:
            raise InputError(
                f"provider '{provider}': {status.why_not}",
                where="--provider",
                next_step="'quantkit doctor' says what this machine has",
            )
        prompt, decode = (
            open_static_session(folder / name, provider=provider, threads=threads)
            for name in (PROMPT_FILE, DECODE_FILE)
        )
    return join(prompt, decode, folder=folder)


@contextlib.contextmanager
def vendors_words_aside() -> Iterator[None]:
    """Vendors' libraries print when they are loaded; what a caller prints, JSON perhaps, must stay alone."""
    sys.stdout.flush()
    own = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def join(
    prompt: onnxruntime.InferenceSession,
    decode: onnxruntime.InferenceSession,
    *,
    folder: Path | None = None,
) -> StaticDecoder:
    """Two sessions as one decoder."""
    past = next(each for each in decode.get_inputs() if each.name.startswith(PAST))
    return StaticDecoder(
        prompt=prompt,
        decode=decode,
        num_prompt=_shape(prompt, "input_ids")[1],
        num_past=past.shape[2],
        vocab_size=next(each.shape[-1] for each in decode.get_outputs() if each.name == "logits"),
        folder=folder,
        metadata=json.loads(prompt.get_modelmeta().custom_metadata_map.get("quantkit", "{}")),
        cache_type=TYPES[past.type],
    )


def open_raw(graph: bytes, folder: Path, *, threads: int | None = None) -> onnxruntime.InferenceSession:
    """A graph that lies in no file, on the CPU; its weights are found in the folder."""
    settings = _settings("cpu", threads)
    settings.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    return onnxruntime.InferenceSession(graph, settings, providers=["CPUExecutionProvider"])


def text_logits(session: onnxruntime.InferenceSession, ids: Ints) -> Floats:
    """Logits of every token of some texts [batch, sequence], by a prompt's graph that gives all of them."""
    return np.stack([run_prompt(session, row)[0] for row in ids])


def _shape(session: onnxruntime.InferenceSession, name: str) -> list[int]:
    return next(list(each.shape) for each in session.get_inputs() if each.name == name)


def _feeds(
    session: onnxruntime.InferenceSession, wanted: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """What the graph has inputs for, in their types."""
    return {
        each.name: np.ascontiguousarray(wanted[each.name], TYPES[each.type]) for each in session.get_inputs()
    }


def run_prompt(
    session: onnxruntime.InferenceSession, ids: Sequence[int] | Ints
) -> tuple[Floats, dict[str, NDArray[Any]]]:
    """(logits of a text's tokens or of its last one, keys and values of all places), padded on the right."""
    size, row = _shape(session, "input_ids")[1], np.asarray(ids, np.int64).reshape(-1)
    if not 0 < len(row) <= size:
        raise InputError(
            f"a prompt of {len(row)} tokens",
            where="prompt",
            allowed=f"1 to {size} tokens: the graph reads that many at once",
            next_step="shorten the prompt, or quantize with a longer --prompt-length",
        )
    filler = (0, size - len(row))
    wanted = {
        "input_ids": np.pad(row, filler)[None],
        "attention_mask": np.pad(np.ones_like(row), filler)[None],
        "logit_position": np.array([len(row) - 1]),
    }
    names = [each.name for each in session.get_outputs()]
    made = dict(zip(names, session.run(names, _feeds(session, wanted)), strict=True))
    logits: Floats = made.pop("logits")
    return logits[0, : len(row)], made


def start(decoder: StaticDecoder, ids: Sequence[int] | Ints) -> tuple[StaticState, Floats]:
    """(the cache after a prompt, logits of what follows it)."""
    logits, made = run_prompt(decoder.prompt, ids)
    length = np.asarray(ids).size
    caches = {}
    for each in decoder.decode.get_inputs():
        if each.name.startswith(PAST):
            new = made[each.name.replace(PAST, PRESENT)]
            # Empty places repeat the first: their scores are hidden by a finite number, and codes that stand
            # for no key at all may score higher than that.
            cache = caches[each.name] = np.empty(each.shape, TYPES[each.type])
            cache[:] = new[:, :, :1]
            cache[:, :, :length] = new[:, :, :length]
    return StaticState(decoder=decoder, caches=caches, length=length), logits[-1]


def step(state: StaticState, token: int) -> Floats:
    """Logits after one more token, which then lies in the cache."""
    decoder, place = state.decoder, state.length
    if place > decoder.num_past:
        raise InputError(
            f"{place} tokens before this one",
            where="length",
            allowed=f"up to {decoder.num_past}: the cache holds that many",
            next_step="ask for fewer new tokens, or quantize with a longer --cache-length",
        )
    # The new token stands behind all places of the cache, filled or not.
    mask = np.append(np.arange(decoder.num_past) < place, True)
    wanted: dict[str, NDArray[Any]] = {
        "input_ids": np.array([[token]]),
        "attention_mask": mask[None],
        "position_ids": np.array([[place]]),
        **state.caches,
    }
    names = [each.name for each in decoder.decode.get_outputs()]
    made = dict(zip(names, decoder.decode.run(names, _feeds(decoder.decode, wanted)), strict=True))
    if place < decoder.num_past:
        for name, cache in state.caches.items():
            cache[:, :, place] = made[name.replace(PAST, PRESENT)][:, :, 0]
    state.length += 1
    logits: Floats = made["logits"][0, -1]
    return logits


def begin(decoder: StaticDecoder, ids: Sequence[int] | Ints) -> tuple[StaticState, Floats]:
    """The same for a prompt of any length: what is longer than the graph follows token by token."""
    row = np.asarray(ids, np.int64).reshape(-1)
    state, logits = start(decoder, row[: decoder.num_prompt])
    for token in row[decoder.num_prompt :]:
        logits = step(state, int(token))
    return state, logits


def generate_static(
    decoder: StaticDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[list[int | None]]:
    """The next token of every row, step by step; None for a row that has ended. Rows run one by one."""
    sampling = checked(sampling, prompts, decoder.vocab_size)
    needed = max(len(prompt) for prompt in prompts) + max_new_tokens
    if needed > decoder.context:
        raise InputError(
            f"{needed} tokens of prompt and answer are more than the cache of the graph holds",
            where="length",
            allowed=f"up to {decoder.context} tokens together",
            next_step="shorten the prompt or ask for less, or quantize with a longer --cache-length",
        )
    rows = [begin(decoder, prompt) for prompt in prompts]
    logits = np.stack([last for _, last in rows])

    def advance(tokens: Ints, open_rows: list[int]) -> Floats:
        for row in open_rows:
            logits[row] = step(rows[row][0], int(tokens[row]))
        return logits

    yield from continue_rows(
        logits, advance, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids
    )
