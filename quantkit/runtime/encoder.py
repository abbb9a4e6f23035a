"""Graphs that read a whole text at once: encoders, and decoders traced without a cache.

A graph is fed the inputs that it declares: token types are zeros by default, and positions follow the
padding. A graph of one fixed length reads one text at a time, which stands at the beginning of its places;
its outputs behind the text are dropped. A graph that reads pictures takes a batch of their pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.files import expect
from quantkit.runtime.graph import (
    TYPES,
    Floats,
    Ints,
    Kind,
    NotTextError,
    metadata_of,
    open_model_file,
    threads_of,
)

ENDS = ("start_logits", "end_logits")  # one number a token; other outputs of tokens have three dimensions
VECTOR = "sentence_embedding"
PIXELS = "pixel_values"
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    session: onnxruntime.InferenceSession
    inputs: Mapping[str, tuple[int | str, ...]]  # name -> shape; a name stands for a free size
    outputs: tuple[str, ...]
    folder: Path = Path()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    fixed_length: int | None = None
    kind: ClassVar[Kind] = "encoder"
    generates: ClassVar[bool] = False
    reads_and_answers: ClassVar[bool] = False
    vocab_size: ClassVar[int | None] = None
    start_ids: ClassVar[tuple[int, ...]] = ()
    cache_number_bytes: ClassVar[int] = FLOAT_BYTES

    @property
    def threads(self) -> int:
        return threads_of(self.session)

    @property
    def context(self) -> int | None:
        return self.metadata.get("max_positions")

    @property
    def types(self) -> Mapping[str, Any]:
        return {value.name: TYPES.get(value.type, np.int64) for value in self.session.get_inputs()}

    @property
    def reads_pictures(self) -> bool:
        return PIXELS in self.inputs

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of a picture; where the graph takes any size, those of its training."""
        _, *shape = self.inputs[PIXELS]
        where = "the metadata 'quantkit' of the graph"
        usual = expect(dict(self.metadata), "picture", list, where=where) or []
        sizes = [
            size if isinstance(size, int) else other
            for size, other in zip(shape, usual or shape, strict=True)
        ]
        if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
            raise InputError(f"pictures of the shape {sizes}", where=where, allowed="three whole numbers")
        channels, height, width = map(int, sizes)
        return channels, height, width

    @property
    def picture_size(self) -> tuple[int, int] | None:
        """Height and width of every picture; None where the graph takes any."""
        height, width = self.inputs[PIXELS][2:]
        return (height, width) if isinstance(height, int) and isinstance(width, int) else None

    def logits(self, ids: NDArray[Any], token_types: Ints | None = None) -> Floats:
        return encode(self, ids, token_types=token_types)[self.outputs[0]]

    @property
    def vector_output(self) -> str | None:
        """The output with one vector a text or a picture."""
        return next((name for name in (VECTOR, self.metadata.get("vector")) if name in self.outputs), None)

    @property
    def pools(self) -> bool:
        """Whether the graph gives one vector a text or a picture."""
        return self.vector_output is not None

    def vectors(self, ids: NDArray[Any], mask: Ints | None = None, token_types: Ints | None = None) -> Floats:
        """Embeddings, [batch, width]; else the mean of the states, or a classifier's logits."""
        outputs = encode(self, ids, mask, token_types=token_types)
        values = outputs[self.vector_output or self.outputs[0]]
        if values.ndim < 3:
            return values
        weights_BT1 = (np.ones_like(ids) if mask is None else mask)[..., None].astype(np.float32)
        mean: Floats = (values * weights_BT1).sum(axis=1) / weights_BT1.sum(axis=1).clip(1)
        return mean

    def answer_logits(self, encoder_ids: Ints, ids: Ints) -> Floats:
        raise AssertionError("no decoder answers behind this encoder")

    def begin(self, prompts: Sequence[Sequence[int]], num_new: int) -> NoReturn:
        raise InputError(
            "an encoder writes no text",
            where=str(self.folder),
            allowed="a decoder",
            next_step="'quantkit package' brings a runner that prints its outputs for a text",
        )


def open_encoder(folder: Path, *, threads: int | None = None) -> Encoder:
    return encoder_of(open_model_file(folder, threads=threads), folder)


def encoder_of(session: onnxruntime.InferenceSession, folder: Path = Path()) -> Encoder:
    """An encoder on any provider."""
    inputs = {value.name: tuple(value.shape) for value in session.get_inputs()}
    if "input_ids" not in inputs and [*inputs] != [PIXELS]:
        raise NotTextError(
            "not a model that reads tokens or pictures (no input_ids or pixel_values alone)",
            where=str(folder),
            allowed="an encoder, or a decoder from the beginning of a text",
        )
    if PIXELS in inputs and len(inputs[PIXELS]) != 4:
        raise NotTextError(
            f"its pictures have the shape {list(inputs[PIXELS])}",
            where=str(folder),
            allowed="batch, channels, height and width",
        )
    size = inputs["input_ids"][-1] if "input_ids" in inputs else None
    return Encoder(
        session=session,
        inputs=inputs,
        outputs=tuple(value.name for value in session.get_outputs()),
        folder=folder,
        metadata=metadata_of(session),
        fixed_length=size if isinstance(size, int) else None,
    )


def encode(
    encoder: Encoder,
    ids: NDArray[Any],
    mask: Ints | None = None,
    *,
    token_types: Ints | None = None,
) -> dict[str, Floats]:
    """Every output for a batch of texts, [batch, sequence], or pictures, [batch, channels, rows, columns]."""
    if encoder.reads_pictures:
        pixels = np.ascontiguousarray(ids, encoder.types[PIXELS])
        return dict(zip(encoder.outputs, encoder.session.run(None, {PIXELS: pixels}), strict=True))
    mask = np.ones_like(ids) if mask is None else mask
    types = np.zeros_like(ids) if token_types is None else token_types
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    if encoder.fixed_length is not None:
        return _encode_fixed(encoder, feeds)
    feeds["position_ids"] = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    missing = [name for name in encoder.inputs if name not in feeds]
    if missing:
        raise NotTextError(
            f"the graph also needs {', '.join(missing)}",
            where="inputs",
            allowed="a graph of token ids, their mask, types and positions",
        )
    declared = {name: np.ascontiguousarray(feeds[name]) for name in encoder.inputs}
    return dict(zip(encoder.outputs, encoder.session.run(None, declared), strict=True))


def _encode_fixed(encoder: Encoder, batch: Mapping[str, Ints]) -> dict[str, Floats]:
    """Text by text, each padded behind its end to the graph's length."""
    count, length = batch["input_ids"].shape[1], encoder.fixed_length or 0
    if count > length:
        raise InputError(
            f"a text of {count} tokens",
            where="input_ids",
            allowed=f"1 to {length} tokens: the graph reads that many at once",
            next_step="shorten the text, or quantize again with a longer static.prompt",
        )
    if (np.diff(batch["attention_mask"], axis=1) > 0).any():
        raise InputError(
            "padding in front of a text or inside of it",
            where="attention_mask",
            allowed="texts that begin at the first place, with their padding behind them",
        )
    types = encoder.types
    padded = {
        name: np.pad(batch[name], ((0, 0), (0, length - count))).astype(types[name])
        for name in encoder.inputs
    }
    runs = [
        encoder.session.run(None, {name: values[row : row + 1] for name, values in padded.items()})
        for row in range(len(batch["input_ids"]))
    ]
    return {
        name: np.concatenate([values[:, :count] if _has_tokens(name, values) else values for values in rows])
        for name, rows in zip(encoder.outputs, zip(*runs, strict=True), strict=True)
    }


def _has_tokens(name: str, values: Floats) -> bool:
    return name in ENDS or values.ndim == 3
