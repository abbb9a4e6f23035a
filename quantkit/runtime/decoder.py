"""Fused decoder in onnxruntime with its KV cache in place: bound once, written by every step.

Past and present of each layer are one buffer, so that a step writes the keys and values of the new token and
nothing else. Rows of a batch have their own lengths: shorter prompts are padded on the right, and new tokens
take the place of the padding. So a row of a batch sums the same numbers in the same order as a row alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.runtime.graph import (
    PAST,
    PRESENT,
    TYPES,
    Floats,
    Ints,
    Kind,
    metadata_of,
    open_model_file,
    threads_of,
)

NUM_LOGITS = "num_logits"  # an input of files of an older quantkit, in place of the mask's largest number


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    session: onnxruntime.InferenceSession
    caches: tuple[tuple[str, str, int, int], ...]  # past name, present name, heads, head size
    context: int
    vocab_size: int
    folder: Path = Path()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    cache_type: Any = np.float32  # int8 where the cache was quantized too
    spare: list[NDArray[Any]] = field(default_factory=list)  # memory of earlier batches
    kind: ClassVar[Kind] = "decoder"
    generates: ClassVar[bool] = True
    reads_and_answers: ClassVar[bool] = False
    fixed_length: ClassVar[int | None] = None
    start_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def threads(self) -> int:
        return threads_of(self.session)

    @property
    def cache_number_bytes(self) -> int:
        return int(np.dtype(self.cache_type).itemsize)

    def logits(self, ids: Ints, mask: Ints | None = None) -> Floats:
        """Logits of every position of texts from their beginning, [batch, sequence, vocabulary].

        Rows may be padded on either side where `mask` is 0; logits of padding mean nothing.
        """
        length = ids.shape[1]
        mask = np.ones(ids.shape, np.int64) if mask is None else mask.astype(np.int64)
        if length < self.context:
            ids, mask = with_even_count(ids, mask)
        logits: Floats = self.session.run(["logits"], _feeds(self, ids, mask, ids.shape[1]))[0]
        return logits[:, :length]

    def answer_logits(self, encoder_ids: Ints, ids: Ints) -> Floats:
        raise AssertionError("no encoder reads before this decoder")

    def begin(self, prompts: Sequence[Sequence[int]], num_new: int) -> DecoderBatch:
        longest = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            mask[row, : len(prompt)] = 1
        state = start(self, batch=len(prompts), capacity=longest + num_new)
        return DecoderBatch(state=state, ids=ids, mask=mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderBatch:
    """Prompts of unequal length, padded on the right, and their caches."""

    state: State
    ids: Ints
    mask: Ints

    def read(self) -> Floats:
        return step(self.state, self.ids, self.mask)

    def step(self, tokens: Ints, open_rows: Sequence[int]) -> Floats:
        return step(self.state, tokens[:, None])


def open_decoder(folder: Path, *, threads: int | None = None) -> Decoder:
    session = open_model_file(folder, threads=threads)
    inputs, outputs = (
        {value.name for value in values} for values in (session.get_inputs(), session.get_outputs())
    )
    if "logits" not in outputs or "input_ids" not in inputs:
        raise InputError(
            "not a model that generates text (no logits, or no input_ids)",
            where=str(folder),
            next_step="give 'quantkit generate' a decoder; 'quantkit package' brings an encoder's runner",
        )
    return decoder_of(session, folder)


def decoder_of(session: onnxruntime.InferenceSession, folder: Path = Path()) -> Decoder:
    """A decoder on any provider; `caches` stay empty where the graph is no decoder."""
    inputs = {value.name: value for value in session.get_inputs()}
    caches = tuple(
        (name, name.replace(PAST, PRESENT), value.shape[1], value.shape[3])
        for name, value in inputs.items()
        if name.startswith(PAST)
        and len(value.shape) == 4
        and all(isinstance(size, int) for size in value.shape[1::2])
    )
    metadata = metadata_of(session)
    sizes = (size for value in session.get_outputs() if value.name == "logits" for size in value.shape[-1:])
    return Decoder(
        session=session,
        caches=caches,
        context=int(metadata.get("max_positions") or 2048),
        vocab_size=next((size for size in sizes if isinstance(size, int)), 0),  # others: a name, or None
        folder=folder,
        metadata=metadata,
        cache_type=TYPES[inputs[caches[0][0]].type] if caches else np.float32,
    )


@dataclass(kw_only=True, slots=True, weakref_slot=True)
class State:
    """The caches of one batch, and how far they are filled."""

    decoder: Decoder
    binding: Any
    buffers: list[Any]
    mask: Ints  # [batch, capacity]: 0 at padding and at places not filled
    lengths: list[int]  # of each row: places filled, padding on the left included
    positions: list[int]  # of each row's next token
    capacity: int
    logits: Floats  # [batch, vocabulary] of the last tokens, written by every run
    token: Ints  # [batch, 1], bound with its position and the whole mask between single tokens
    place: Ints
    is_token_bound: bool = False


def start(decoder: Decoder, *, batch: int, capacity: int) -> State:
    """Empty caches for a batch."""
    if capacity > decoder.context:
        raise InputError(
            f"{capacity} tokens of prompt and answer are more than the model's context",
            where="length",
            allowed=f"up to {decoder.context} tokens together",
            next_step="shorten the prompt or ask for fewer new tokens",
        )
    binding = decoder.session.io_binding()
    sizes = [batch * heads * capacity * width for _, _, heads, width in decoder.caches]
    memory = _take_memory(decoder, sum(sizes))
    buffers, offset = [], 0
    for (past, present, heads, width), size in zip(decoder.caches, sizes, strict=True):
        part = memory[offset : offset + size].reshape(batch, heads, capacity, width)
        offset += size
        buffer = onnxruntime.OrtValue.ortvalue_from_numpy(part)
        binding.bind_ortvalue_input(past, buffer)
        binding.bind_ortvalue_output(present, buffer)
        buffers.append(buffer)
    logits = np.empty((batch, decoder.vocab_size), np.float32)
    if decoder.vocab_size:  # 0: blocks without a head
        binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits[:, None]))
    state = State(
        decoder=decoder,
        binding=binding,
        buffers=buffers,
        mask=np.zeros((batch, capacity), np.int64),
        lengths=[0] * batch,
        positions=[0] * batch,
        capacity=capacity,
        logits=logits,
        token=np.zeros((batch, 1), np.int64),
        place=np.zeros((batch, 1), np.int64),
    )
    weakref.finalize(state, decoder.spare.append, memory)
    return state


def _take_memory(decoder: Decoder, size: int) -> NDArray[Any]:
    """Memory for all layers of one batch, of an earlier batch if possible: fresh pages cost time.

    It is one array, since numpy asks for large pages under large arrays only. Values of an earlier text in it
    are never read, because the lengths bound the filled part of a cache.
    """
    decoder.spare.sort(key=len)
    fitting = next((number for number, memory in enumerate(decoder.spare) if len(memory) >= size), None)
    if fitting is not None:
        return decoder.spare.pop(fitting)
    decoder.spare.clear()  # all too small; the next one serves them too
    memory = np.empty(size, decoder.cache_type)
    memory.fill(0)  # every page is fetched now and not by the first prompt
    return memory


def step(state: State, ids: Ints, mask: Ints | None = None) -> Floats:
    """Feed tokens [batch, n]; logits of the last one of each row, which the next step overwrites.

    A prompt may be padded where `mask` is 0, on the right or on the left. Later tokens are appended at each
    row's own length, one at a time: onnxruntime's attention takes a later chunk for a single row only.
    """
    count, filled = ids.shape[1], max(state.lengths)
    assert filled + count <= state.capacity, "the cache is full"
    if not filled:
        return _read_prompt(state, ids, np.ones_like(ids) if mask is None else mask)
    assert mask is None or mask.all(), "only a prompt may be padded"
    assert count == 1 or len(ids) == 1, "later tokens of several rows come one at a time"
    for row, length in enumerate(state.lengths):
        state.mask[row, length : length + count] = 1
    if count == 1:
        _run_token(state, ids)
    else:
        _run(state, ids, np.array(state.positions)[:, None] + np.arange(count), filled + count)
    state.lengths = [length + count for length in state.lengths]
    state.positions = [position + count for position in state.positions]
    return state.logits


def _read_prompt(state: State, ids: Ints, mask: Ints) -> Floats:
    mask = mask.astype(np.int64)
    assert mask.any(axis=1).all(), "a row without a token"
    if ids.shape[1] < state.capacity:
        ids, mask = with_even_count(ids, mask)
    total = ids.shape[1]
    state.mask[:, :total] = mask
    _run(state, ids, positions_of(mask, total), total)
    state.lengths = (total - mask[:, ::-1].argmax(axis=1)).tolist()
    state.positions = mask.sum(axis=1).tolist()
    return state.logits


def _run(state: State, ids: Ints, positions: Ints, total: int) -> None:
    """Run tokens of every row, which fill the caches up to `total`."""
    _bind(state, np.ascontiguousarray(ids, np.int64), positions, np.ascontiguousarray(state.mask[:, :total]))
    state.is_token_bound = False
    state.decoder.session.run_with_iobinding(state.binding)


def _run_token(state: State, ids: Ints) -> None:
    """One token of every row, with as little Python as possible.

    The weights of a token flush the CPU's caches, so Python between two tokens is read from memory each time:
    the first numpy operation of a kind takes 25 us, and binding all inputs again took 5% of a token. So
    inputs stay bound, the mask as wide as the caches, and lengths are plain integers.
    """
    state.token[:] = ids
    for row, position in enumerate(state.positions):
        state.place[row, 0] = position
    if not state.is_token_bound:
        _bind(state, state.token, state.place, state.mask)
        state.is_token_bound = True
    state.decoder.session.run_with_iobinding(state.binding)


def _bind(state: State, ids: Ints, positions: Ints, mask: Ints) -> None:
    for name, values in (("input_ids", ids), ("position_ids", positions), ("attention_mask", mask)):
        state.binding.bind_cpu_input(name, values)


def with_even_count(ids: Ints, mask: Ints) -> tuple[Ints, Ints]:
    """The rows, padded on the right by one where their tokens together are an odd number.

    MatMuls over blocks of 128 and more take rows in pairs and sum an odd last row in another order; a value
    that is then rounded to another code differs by thousandths. The padding takes the place of that row.
    """
    if ids.size % 2 == 0:
        return ids, mask
    padding = ((0, 0), (0, 1))
    return np.pad(ids, padding), np.pad(mask, padding)


def positions_of(mask: Ints, count: int) -> Ints:
    """Positions of the last `count` tokens, counted from each row's first token that is not padding."""
    return np.ascontiguousarray((np.cumsum(mask, axis=1) - 1).clip(min=0)[:, -count:])


def last_logits(decoder: Decoder, ids: Ints, count: int) -> Floats:
    """Logits of the last `count` positions of texts from their beginning, [batch, count, vocabulary]."""
    logits: Floats = decoder.session.run(["logits"], _feeds(decoder, ids, np.ones_like(ids), count))[0]
    assert logits.shape[1] == count, (logits.shape, count)
    return logits


def cached_values(decoder: Decoder, ids: Ints) -> list[NDArray[Any]]:
    """Keys and values of every layer after a text."""
    names = [present for _, present, _, _ in decoder.caches]
    values: list[NDArray[Any]] = decoder.session.run(names, _feeds(decoder, ids, np.ones_like(ids), 1))
    return values


def _feeds(decoder: Decoder, ids: Ints, mask: Ints, num_logits: int) -> dict[str, NDArray[Any]]:
    """Inputs of whole texts; the largest number of the mask is that of last positions with logits."""
    pasts = {
        past: np.zeros((len(ids), heads, 0, width), decoder.cache_type)
        for past, _, heads, width in decoder.caches
    }
    positions = positions_of(mask, ids.shape[1])
    if any(value.name == NUM_LOGITS for value in decoder.session.get_overridable_initializers()):
        pasts[NUM_LOGITS] = np.array([num_logits], np.int64)
    else:
        mask = mask * num_logits
    return {
        "input_ids": np.ascontiguousarray(ids, np.int64),
        "attention_mask": mask,
        "position_ids": positions,
        **pasts,
    }
