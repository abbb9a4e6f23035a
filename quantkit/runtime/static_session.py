"""A decoder of two static graphs, run on any provider: one reads a prompt, the other a token at a time.

The host keeps the cache: it copies what each run gives for its own tokens to their places in arrays of fixed
length, in whatever type the graphs give. Compiling a graph for an NPU takes long, so a provider may leave its
result in a file (`compile_to`), from which later sessions start.
EPContext: https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.runtime.doctor import read_cpu
from quantkit.runtime.providers import PROVIDERS, open_on

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(uint8)": np.uint8,
    "tensor(uint16)": np.uint16,
    "tensor(int32)": np.int32,
}
PAST, PRESENT = "past_key_values.", "present."


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticDecoder:
    """Two open sessions and what is fixed of them."""

    prompt: onnxruntime.InferenceSession
    decode: onnxruntime.InferenceSession
    num_prompt: int  # tokens that a prompt can have
    num_past: int  # tokens that the cache can hold


@dataclass(kw_only=True, slots=True)
class StaticState:
    """The cache of one text."""

    decoder: StaticDecoder
    caches: dict[str, NDArray[Any]]  # by the decode graph's input, [1, heads, num_past, head size]
    length: int  # places filled


def open_static_session(
    model: Path,
    *,
    provider: str = "cpu",
    is_strict: bool = True,
    compile_to: Path | None = None,
    threads: int | None = None,
) -> onnxruntime.InferenceSession:
    """A session on one provider; with `is_strict`, none in which any node fell back to the CPU.

    `compile_to` is where a provider's compiled form of the graph is written, to be opened like a model.
    """
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = threads or read_cpu().num_threads
    if is_strict and provider != "cpu":
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if compile_to is not None:
        settings.add_session_config_entry("ep.context_enable", "1")
        settings.add_session_config_entry("ep.context_embed_mode", "1")
        settings.add_session_config_entry("ep.context_file_path", str(compile_to))
    session: onnxruntime.InferenceSession
    try:
        session = open_on(PROVIDERS[provider], str(model), settings)
    except Exception as error:  # onnxruntime's own exceptions share no useful base class
        raise InputError(
            f"provider '{provider}' cannot run all of it ({' '.join(str(error).split())[:300]})",
            where=str(model),
            next_step="'quantkit doctor' lists what each provider needs",
        ) from error
    return session


def join(prompt: onnxruntime.InferenceSession, decode: onnxruntime.InferenceSession) -> StaticDecoder:
    """Two sessions as one decoder."""
    sizes = {each.name: each.shape for each in decode.get_inputs()}
    pasts = [shape for name, shape in sizes.items() if name.startswith(PAST)]
    return StaticDecoder(
        prompt=prompt,
        decode=decode,
        num_prompt=_shape(prompt, "input_ids")[1],
        num_past=pasts[0][2],
    )


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
            next_step="shorten the prompt, or export with a longer one",
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
            next_step="ask for fewer new tokens, or export with a longer cache",
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


def generate(decoder: StaticDecoder, ids: Sequence[int], *, count: int) -> list[int]:
    """The likeliest next token, `count` times."""
    state, logits = start(decoder, ids)
    made = [int(logits.argmax())]
    while len(made) < count:
        made.append(int(step(state, made[-1]).argmax()))
    return made
