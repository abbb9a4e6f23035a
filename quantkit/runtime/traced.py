"""Traced models with a cache: a decoder in one file, or an encoder and its decoder in three.

A tracer's caches grow: each step reads the past and puts out past and present joined. Between steps they
stay values of onnxruntime, so that only token ids and logits pass through numpy. Texts of unequal length
are never padded, each runs in a state of its own: a padded row sums over another length, which now and then
flips an integer code, and would not say what the row says alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.runtime.generate import Sampling, checked, continue_rows
from quantkit.runtime.session import MODEL_FILE, Decoder, Floats, Ints, open_decoder, open_session
from quantkit.runtime.static_decoder import StaticDecoder, holds_static, open_static_decoder

ENCODER_FILE = "encoder_model.onnx"
FIRST_FILE = "decoder_model.onnx"
LATER_FILE = "decoder_with_past_model.onnx"
PAST, PRESENT = "past_key_values", "present"
FIRST_TOKEN_KEYS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")  # the first that is set
Values = dict[str, Any]  # name -> OrtValue


class NotTextError(InputError):
    """Sound files that read or write other things than text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One open file."""

    session: onnxruntime.InferenceSession
    inputs: Mapping[str, tuple[int | str, ...]]  # name -> shape; a name stands for a free size
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """An open model."""

    first: Part  # begins a text
    later: Part  # goes on from a cache; the same file where there is no encoder
    encoder: Part | None
    context: int | None  # None: the model names no limit
    vocab_size: int
    start_ids: tuple[int, ...] = ()  # what a decoder behind an encoder begins with


@dataclass(kw_only=True, slots=True)
class TracedState:
    """The caches of one batch of equally long texts, and how many of the decoder's positions they hold."""

    model: Traced
    held: Values
    length: int = 0


def holds_model(folder: Path) -> bool:
    """Whether the folder is an exported model and not a checkpoint."""
    return any(each.exists() for each in (folder / MODEL_FILE, folder / ENCODER_FILE)) or holds_static(folder)


def open_generator(
    folder: Path, *, threads: int | None = None, provider: str | None = None
) -> Decoder | Traced | StaticDecoder:
    """Open whatever continues a text; only graphs of fixed shapes run on other providers than the CPU."""
    if holds_static(folder):
        return open_static_decoder(folder, threads=threads, provider=provider or "cpu")
    if provider not in (None, "cpu"):
        raise InputError(
            f"provider '{provider}'",
            where="--provider",
            allowed="cpu, or for graphs of fixed shapes (--target npu) any that runs all of them",
            next_step="'quantkit bench --provider' times any artifact on any provider",
        )
    if not (folder / MODEL_FILE).exists() and (folder / ENCODER_FILE).exists():
        return open_traced(folder, threads=threads)
    decoder = open_decoder(folder, threads=threads)
    kind = decoder.metadata.get("kind")
    if kind == "encoder" or not decoder.caches:
        raise InputError(
            "an encoder writes no text",
            where=str(folder),
            allowed="a decoder",
            next_step="'quantkit package' brings a runner that prints what it says of a text",
        )
    return traced_decoder(decoder.session) if kind == "traced" else decoder


def open_traced(folder: Path, *, threads: int | None = None) -> Traced:
    """Open an artifact's traced decoder, with its encoder where it has one."""
    if (folder / MODEL_FILE).exists():
        return traced_decoder(open_session(folder / MODEL_FILE, threads=threads))
    names = (ENCODER_FILE, FIRST_FILE, LATER_FILE)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise NotTextError(
            f"there is no {', no '.join(missing)}", where=str(folder), allowed=", ".join(names)
        )
    encoder, first, later = (part_of(open_session(folder / name, threads=threads)) for name in names)
    if "input_ids" not in encoder.inputs or "logits" not in first.outputs:
        raise NotTextError(
            "its encoder takes no input_ids, or its decoder makes no logits",
            where=str(folder),
            allowed="a decoder, or an encoder and a decoder of text",
        )
    return _opened(encoder, first, later, start_ids=read_start_ids(folder))


def traced_decoder(session: onnxruntime.InferenceSession) -> Traced:
    """A decoder in one file."""
    part = part_of(session)
    return _opened(None, part, part)


def part_of(session: onnxruntime.InferenceSession) -> Part:
    """A file's names and shapes, asked for once."""
    return Part(
        session=session,
        inputs={each.name: tuple(each.shape) for each in session.get_inputs()},
        outputs=tuple(each.name for each in session.get_outputs()),
    )


def _opened(encoder: Part | None, first: Part, later: Part, start_ids: tuple[int, ...] = ()) -> Traced:
    stored = first.session.get_modelmeta().custom_metadata_map.get("quantkit", "{}")
    logits = next(each for each in first.session.get_outputs() if each.name == "logits")
    return Traced(
        first=first,
        later=later,
        encoder=encoder,
        context=json.loads(stored).get("max_positions"),
        vocab_size=int(logits.shape[-1]),
        start_ids=start_ids,
    )


def read_start_ids(folder: Path) -> tuple[int, ...]:
    """What the decoder behind an encoder begins with: generation_config.json goes before config.json."""
    contents = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in (folder / "generation_config.json", folder / "config.json")
        if path.exists()
    ]

    def told(*keys: str) -> tuple[int, ...]:
        found = (content[key] for key in keys for content in contents if content.get(key) is not None)
        return tuple(itertools.islice(found, 1))

    first = told(*FIRST_TOKEN_KEYS)
    if first:
        return (*first, *told("forced_bos_token_id"))  # the latter is the language, where there are several
    raise NotTextError(
        "nothing says which token the decoder begins with",
        where=str(folder / "config.json"),
        allowed=", ".join(FIRST_TOKEN_KEYS),
        next_step="set decoder_start_token_id as the model was trained",
    )


def read_prompt(model: Traced, ids: Ints) -> tuple[TracedState, Floats]:
    """Read texts [batch, sequence]: (their state, logits of the first new token)."""
    if model.encoder is None:
        state = TracedState(model=model, held=_empty_caches(model.first, len(ids)))
        return state, go_on(state, ids)
    state = TracedState(model=model, held=_encoded(model.encoder, ids))
    return state, go_on(state, np.tile(np.array(model.start_ids, np.int64), (len(ids), 1)))


def _empty_caches(part: Part, batch: int) -> Values:
    """No past yet; a free size of a cache is its length."""
    shapes = {name: shape[1:] for name, shape in part.inputs.items() if name.startswith(PAST)}
    return {
        name: _value(np.zeros((batch, *(size if isinstance(size, int) else 0 for size in shape)), np.float32))
        for name, shape in shapes.items()
    }


def _encoded(encoder: Part, ids: Ints) -> Values:
    """What the decoder reads of the encoder."""
    shown = _value(np.ones(ids.shape, np.int64))
    made = _run(encoder, {"input_ids": _value(ids), "attention_mask": shown}, encoder.outputs)
    return {"encoder_hidden_states": made["last_hidden_state"], "encoder_attention_mask": shown}


def go_on(state: TracedState, ids: Ints) -> Floats:
    """Feed the decoder tokens [batch, n]; logits of the last position, [batch, vocabulary]."""
    part = state.model.later if state.length else state.model.first
    made = _run(part, {**state.held, **_tokens(ids, state.length)}, part.outputs)
    logits: Floats = made.pop("logits").numpy()
    # Behind an encoder, its keys and values are made by the first step alone and stay as they are.
    state.held |= {name.replace(PRESENT, PAST): value for name, value in made.items()}
    state.length += ids.shape[1]
    return logits[:, -1].copy()  # else a long prompt's logits would live on behind the view


def traced_logits(model: Traced, ids: Ints, *, encoder_ids: Ints | None = None) -> Floats:
    """Logits of every position, [batch, sequence, vocabulary]; `encoder_ids` are what an encoder reads."""
    held: Values = {}
    if model.encoder is not None:
        assert encoder_ids is not None, "the encoder has nothing to read"
        held = _encoded(model.encoder, encoder_ids)
    else:
        held = _empty_caches(model.first, len(ids))
    logits: Floats = _run(model.first, {**held, **_tokens(ids, 0)}, ("logits",))["logits"].numpy()
    return logits


def _tokens(ids: Ints, past: int) -> Values:
    """What every step is told, whether or not its graph asks for it."""
    batch, count = ids.shape
    positions = np.arange(past, past + count, dtype=np.int64)[None].repeat(batch, axis=0)
    shown = np.ones((batch, past + count), np.int64)
    return {
        name: _value(values)
        for name, values in {"input_ids": ids, "attention_mask": shown, "position_ids": positions}.items()
    }


def _run(part: Part, offered: Values, outputs: Sequence[str]) -> Values:
    feeds = {name: offered[name] for name in part.inputs}
    return dict(zip(outputs, part.session.run_with_ort_values(list(outputs), feeds), strict=True))


def _value(values: NDArray[Any]) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values))


def generate_traced(
    model: Traced,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[list[int | None]]:
    """The next token of every row, step by step; None for a row that has ended."""
    sampling = checked(sampling, prompts, model.vocab_size)
    _check_lengths(model, prompts, max_new_tokens)
    rows = [read_prompt(model, np.array([prompt], np.int64)) for prompt in prompts]
    states, logits = [state for state, _ in rows], np.concatenate([last for _, last in rows])

    def advance(tokens: Ints, open_rows: list[int]) -> Floats:
        for row in open_rows:
            logits[row] = go_on(states[row], tokens[None, row : row + 1])[0]
        return logits

    yield from continue_rows(
        logits, advance, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids
    )


def _check_lengths(model: Traced, prompts: Sequence[Sequence[int]], num_new: int) -> None:
    longest = max(len(prompt) for prompt in prompts)
    # An encoder and its decoder each have the whole context for themselves.
    needed = longest + num_new if model.encoder is None else max(longest, len(model.start_ids) + num_new)
    if model.context is not None and needed > model.context:
        together = "together" if model.encoder is None else "of the prompt, and as many of the answer"
        raise InputError(
            f"{needed} tokens of prompt {'and' if model.encoder is None else 'or'} answer are more than the "
            "model's context",
            where="length",
            allowed=f"up to {model.context} tokens {together}",
            next_step="shorten the prompt or ask for fewer new tokens",
        )
