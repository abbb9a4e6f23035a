"""Traced models with a KV cache: a decoder in one file, or an encoder and its decoder in three.

The caches of a traced graph grow: each step reads the past and returns past and present joined. Between steps
they stay values of onnxruntime, so that only token ids and logits pass through numpy. Prompts of unequal
length run one by one and are never padded: a padded row sums over another length, which now and then flips
an integer code and changes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.files import read_json
from quantkit.runtime.generate import RowByRow
from quantkit.runtime.graph import (
    ENCODER_FILE,
    FIRST_FILE,
    LATER_FILE,
    PAST,
    PRESENT,
    Floats,
    Ints,
    Kind,
    NotTextError,
    metadata_of,
    open_graph,
    threads_of,
)
from quantkit.runtime.tokenizer import token_ids

FIRST_TOKEN_KEYS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")  # the first that is set
FLOAT_BYTES = 4
Values = dict[str, Any]  # name -> OrtValue


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    session: onnxruntime.InferenceSession
    inputs: Mapping[str, tuple[int | str, ...]]  # name -> shape; a name stands for a free size
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """An open decoder, with its encoder where it has one."""

    first: Part  # begins a text
    later: Part  # continues from a cache; the same file where there is no encoder
    encoder: Part | None
    vocab_size: int
    folder: Path = Path()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    start_ids: tuple[int, ...] = ()  # tokens that a decoder behind an encoder begins with
    generates: ClassVar[bool] = True
    fixed_length: ClassVar[int | None] = None
    cache_number_bytes: ClassVar[int] = FLOAT_BYTES

    @property
    def kind(self) -> Kind:
        return "encoder_decoder" if self.encoder else "traced"

    @property
    def reads_and_answers(self) -> bool:
        return self.encoder is not None

    @property
    def threads(self) -> int:
        return threads_of(self.first.session)

    @property
    def context(self) -> int | None:
        return self.metadata.get("max_positions")

    def logits(self, ids: Ints) -> Floats:
        assert self.encoder is None, "the encoder has nothing to read"
        return _first_logits(self.first, _empty_caches(self.first, len(ids)), ids)

    def answer_logits(self, encoder_ids: Ints, ids: Ints) -> Floats:
        assert self.encoder is not None, "no encoder reads before this decoder"
        return _first_logits(self.first, _encoded(self.encoder, encoder_ids), ids)

    def begin(self, prompts: Sequence[Sequence[int]], num_new: int) -> RowByRow:
        _check_lengths(self, prompts, num_new)
        return RowByRow(
            rows=[TracedTexts(model=self, ids=np.array([prompt], np.int64)) for prompt in prompts]
        )


@dataclass(kw_only=True, slots=True)
class TracedTexts:
    """A batch of equally long prompts and their caches, which onnxruntime grows from step to step."""

    model: Traced
    ids: Ints  # the prompts, [batch, sequence]
    caches: Values = field(default_factory=dict)  # and the inputs from an encoder
    length: int = 0  # positions of the decoder in the caches

    def read(self) -> Floats:
        """Read the prompts; logits of the first new token, [batch, vocabulary]."""
        encoder = self.model.encoder
        if encoder is None:
            self.caches = _empty_caches(self.model.first, len(self.ids))
            return self.feed(self.ids)
        self.caches = _encoded(encoder, self.ids)
        return self.feed(np.tile(np.array(self.model.start_ids, np.int64), (len(self.ids), 1)))

    def feed(self, ids: Ints) -> Floats:
        """Feed the decoder tokens [batch, n]; logits of the last position, [batch, vocabulary]."""
        part = self.model.later if self.length else self.model.first
        outputs = _run(part, {**self.caches, **_tokens(ids, self.length)}, part.outputs)
        logits: Floats = outputs.pop("logits").numpy()
        # Behind an encoder, its keys and values come from the first step alone and stay as they are.
        self.caches |= {name.replace(PRESENT, PAST): value for name, value in outputs.items()}
        self.length += ids.shape[1]
        return logits[:, -1].copy()  # else a long prompt's logits would live on behind the view

    def step(self, token: int) -> Floats:
        return self.feed(np.array([[token]], np.int64))


def open_encoder_decoder(folder: Path, *, threads: int | None = None) -> Traced:
    names = (ENCODER_FILE, FIRST_FILE, LATER_FILE)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise NotTextError(
            f"there is no {', no '.join(missing)}", where=str(folder), allowed=", ".join(names)
        )
    encoder, first, later = (part_of(open_graph(folder / name, threads=threads)) for name in names)
    if "input_ids" not in encoder.inputs or "logits" not in first.outputs:
        raise NotTextError(
            "its encoder takes no input_ids, or its decoder makes no logits",
            where=str(folder),
            allowed="a decoder, or an encoder and a decoder of text",
        )
    return _opened(encoder, first, later, folder, start_ids=read_start_ids(folder))


def traced_decoder(session: onnxruntime.InferenceSession, folder: Path = Path()) -> Traced:
    """A decoder in one file, on any provider."""
    part = part_of(session)
    return _opened(None, part, part, folder)


def part_of(session: onnxruntime.InferenceSession) -> Part:
    return Part(
        session=session,
        inputs={value.name: tuple(value.shape) for value in session.get_inputs()},
        outputs=tuple(value.name for value in session.get_outputs()),
    )


def _opened(
    encoder: Part | None, first: Part, later: Part, folder: Path, start_ids: tuple[int, ...] = ()
) -> Traced:
    logits = next(value for value in first.session.get_outputs() if value.name == "logits")
    return Traced(
        first=first,
        later=later,
        encoder=encoder,
        vocab_size=int(logits.shape[-1]),
        folder=folder,
        metadata=metadata_of(first.session),
        start_ids=start_ids,
    )


def read_start_ids(folder: Path) -> tuple[int, ...]:
    """First tokens of a decoder behind an encoder; generation_config.json goes before config.json."""
    paths = [folder / name for name in ("generation_config.json", "config.json")]
    contents = {path: read_json(path) for path in paths if path.exists()}

    def first_set(*keys: str) -> tuple[int, ...]:
        ids = (token_ids(content, key, where=path) for key in keys for path, content in contents.items())
        return next(filter(None, ids), ())[:1]

    first = first_set(*FIRST_TOKEN_KEYS)
    if first:
        return (*first, *first_set("forced_bos_token_id"))  # the latter is the language of several
    raise NotTextError(
        "no key names the token that the decoder begins with",
        where=str(folder / "config.json"),
        allowed=", ".join(FIRST_TOKEN_KEYS),
        next_step="set decoder_start_token_id as the model was trained",
    )


def _empty_caches(part: Part, batch: int) -> Values:
    """Caches without a past; the free size of a cache is its length."""
    shapes = {name: shape[1:] for name, shape in part.inputs.items() if name.startswith(PAST)}
    return {
        name: _value(np.zeros((batch, *(size if isinstance(size, int) else 0 for size in shape)), np.float32))
        for name, shape in shapes.items()
    }


def _encoded(encoder: Part, ids: Ints) -> Values:
    """The decoder's inputs from the encoder."""
    mask = _value(np.ones(ids.shape, np.int64))
    outputs = _run(encoder, {"input_ids": _value(ids), "attention_mask": mask}, encoder.outputs)
    return {"encoder_hidden_states": outputs["last_hidden_state"], "encoder_attention_mask": mask}


def _first_logits(part: Part, caches: Values, ids: Ints) -> Floats:
    """Logits of every position of texts from their beginning, [batch, sequence, vocabulary]."""
    logits: Floats = _run(part, {**caches, **_tokens(ids, 0)}, ("logits",))["logits"].numpy()
    return logits


def _tokens(ids: Ints, past: int) -> Values:
    """Inputs of a step; a graph reads those that it declares."""
    batch, count = ids.shape
    positions = np.arange(past, past + count, dtype=np.int64)[None].repeat(batch, axis=0)
    mask = np.ones((batch, past + count), np.int64)
    return {
        name: _value(values)
        for name, values in {"input_ids": ids, "attention_mask": mask, "position_ids": positions}.items()
    }


def _run(part: Part, inputs: Values, outputs: Sequence[str]) -> Values:
    feeds = {name: inputs[name] for name in part.inputs}
    return dict(zip(outputs, part.session.run_with_ort_values(list(outputs), feeds), strict=True))


def _value(values: NDArray[Any]) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values))


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
