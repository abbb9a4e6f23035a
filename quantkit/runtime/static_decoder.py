"""A decoder of two static graphs on any provider: one reads a prompt, the other a token at a time.

The KV cache lies in arrays of fixed length outside of the graphs, in the graphs' own number type: the keys
and values of the new tokens are copied to their places after each run. Compiled graphs are kept for later
sessions (`compiled.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.runtime.generate import RowByRow
from quantkit.runtime.graph import (
    DECODE_FILE,
    PAST,
    PRESENT,
    PROMPT_FILE,
    TYPES,
    Floats,
    Ints,
    Kind,
    metadata_of,
    threads_of,
)
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.providers import compiled
from quantkit.runtime.providers.table import PROVIDERS, open_on

# The CPU has no products of 16-bit codes: it dequantizes weights in every run, or with this setting once.
FOLDED_WEIGHTS = ("session.disable_quant_qdq", "1")
NO_FALLBACK = ("session.disable_cpu_ep_fallback", "1")
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True, kw_only=True)
class StaticDecoder:
    prompt: onnxruntime.InferenceSession
    decode: onnxruntime.InferenceSession
    fixed_length: int  # tokens that the prompt graph reads
    num_past: int  # tokens that the cache can hold
    vocab_size: int = 0
    folder: Path = Path()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    cache_type: Any = np.float32
    with_all_logits: Callable[[Path], bytes] | None = None  # rewrites the prompt graph
    kind: ClassVar[Kind] = "static"
    generates: ClassVar[bool] = True
    reads_and_answers: ClassVar[bool] = False
    start_ids: ClassVar[tuple[int, ...]] = ()

    @property
    def threads(self) -> int:
        return threads_of(self.prompt)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.num_past + 1

    @property
    def cache_number_bytes(self) -> int:
        return int(np.dtype(self.cache_type).itemsize)

    @cached_property
    def _whole_prompt(self) -> onnxruntime.InferenceSession:
        """The prompt graph with the logits of every token."""
        assert self.with_all_logits is not None, "a static prompt graph gives the logits of one token"
        return open_raw(self.with_all_logits(self.folder / PROMPT_FILE), self.folder, threads=self.threads)

    def logits(self, ids: Ints) -> Floats:
        return np.stack([run_prompt(self._whole_prompt, row)[0] for row in ids])

    def answer_logits(self, encoder_ids: Ints, ids: Ints) -> Floats:
        raise AssertionError("no encoder reads before this decoder")

    def begin(self, prompts: Sequence[Sequence[int]], num_new: int) -> RowByRow:
        needed = max(len(prompt) for prompt in prompts) + num_new
        if needed > self.context:
            raise InputError(
                f"{needed} tokens of prompt and answer are more than the cache of the graph holds",
                where="length",
                allowed=f"up to {self.context} tokens together",
                next_step="shorten the prompt or ask for less, or quantize with a longer --cache-length",
            )
        return RowByRow(rows=[StaticRow(decoder=self, prompt=prompt) for prompt in prompts])


@dataclass(kw_only=True, slots=True)
class StaticRow:
    decoder: StaticDecoder
    prompt: Sequence[int]
    # by the decode graph's input, [1, heads, num_past, head size]
    caches: dict[str, NDArray[Any]] = field(default_factory=dict)
    length: int = 0  # places filled

    def read(self) -> Floats:
        """Read the prompt; tokens beyond the prompt graph's length follow one by one."""
        most = self.decoder.fixed_length
        logits = self._fill(np.asarray(self.prompt[:most], np.int64))
        for token in self.prompt[most:]:
            logits = self.step(int(token))
        return logits

    def _fill(self, ids: Ints) -> Floats:
        logits_SV, values = run_prompt(self.decoder.prompt, ids)
        for past in self.decoder.decode.get_inputs():
            if past.name.startswith(PAST):
                new = values[past.name.replace(PAST, PRESENT)]
                # Empty places repeat the first: graphs of older artifacts add no more than -50 to a hidden
                # score, and codes that stand for no key at all may score higher than that.
                cache = self.caches[past.name] = np.empty(past.shape, TYPES[past.type])
                cache[:] = new[:, :, :1]
                cache[:, :, : len(ids)] = new[:, :, : len(ids)]
        self.length = len(ids)
        return logits_SV[-1:]

    def step(self, token: int) -> Floats:
        """Logits after one more token, which then lies in the cache."""
        decode, num_past, place = self.decoder.decode, self.decoder.num_past, self.length
        if place > num_past:
            raise InputError(
                f"{place} tokens before this one",
                where="length",
                allowed=f"up to {num_past}: the cache holds that many",
                next_step="ask for fewer new tokens, or quantize with a longer --cache-length",
            )
        # The new token stands behind all places of the cache, filled or not.
        mask = np.append(np.arange(num_past) < place, True)
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": np.array([[token]]),
            "attention_mask": mask[None],
            "position_ids": np.array([[place]]),
            **self.caches,
        }
        outputs = _run(decode, feeds)
        if place < num_past:
            for name, cache in self.caches.items():
                cache[:, :, place] = outputs[name.replace(PAST, PRESENT)][:, :, 0]
        self.length += 1
        logits: Floats = outputs["logits"][0, -1:]
        return logits


def _settings(provider: str, threads: int | None) -> onnxruntime.SessionOptions:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = read_cpu().threads_for(threads)
    settings.add_session_config_entry(*(FOLDED_WEIGHTS if provider == "cpu" else NO_FALLBACK))
    return settings


def open_static_session(
    model: Path, *, provider: str = "cpu", threads: int | None = None
) -> onnxruntime.InferenceSession:
    """A session on one provider; an error where a node would fall back to the CPU.

    A provider that compiles starts from its kept graph, or reports why that no longer fits.
    """
    row = PROVIDERS[provider]
    session: onnxruntime.InferenceSession
    try:
        if row.keeps_compiled:
            started = compiled.start(row, model, lambda: _settings(provider, threads))
            session = started.session
            if started.message:
                print(started.message, file=sys.stderr)
        else:
            session = open_on(row, str(model), _settings(provider, threads))
    except Exception as error:  # onnxruntime's own exceptions share no useful base class
        raise InputError(
            f"provider '{provider}' cannot run all of it ({' '.join(str(error).split())[:300]})",
            where=str(model),
            next_step="'quantkit doctor' lists what each provider needs",
        ) from error
    return session


def open_static_decoder(
    folder: Path,
    *,
    provider: str = "cpu",
    threads: int | None = None,
    with_all_logits: Callable[[Path], bytes] | None = None,
) -> StaticDecoder:
    with stdout_to_stderr():
        prompt, decode = (
            open_static_session(folder / name, provider=provider, threads=threads)
            for name in (PROMPT_FILE, DECODE_FILE)
        )
    return join(prompt, decode, folder=folder, with_all_logits=with_all_logits)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Vendors' libraries print when they load; standard output is the caller's, JSON perhaps."""
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
    folder: Path = Path(),
    with_all_logits: Callable[[Path], bytes] | None = None,
) -> StaticDecoder:
    past = next(value for value in decode.get_inputs() if value.name.startswith(PAST))
    return StaticDecoder(
        prompt=prompt,
        decode=decode,
        fixed_length=_shape(prompt, "input_ids")[1],
        num_past=past.shape[2],
        vocab_size=next(value.shape[-1] for value in decode.get_outputs() if value.name == "logits"),
        folder=folder,
        metadata=metadata_of(prompt),
        cache_type=TYPES[past.type],
        with_all_logits=with_all_logits,
    )


def open_raw(graph: bytes, folder: Path, *, threads: int | None = None) -> onnxruntime.InferenceSession:
    """A graph from memory on the CPU, with its weights from the folder."""
    settings = _settings("cpu", threads)
    settings.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    return onnxruntime.InferenceSession(graph, settings, providers=["CPUExecutionProvider"])


def _shape(session: onnxruntime.InferenceSession, name: str) -> list[int]:
    return next(list(value.shape) for value in session.get_inputs() if value.name == name)


def _run(session: onnxruntime.InferenceSession, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Outputs by name; `feeds` are cast to the types of the inputs that the graph has."""
    names = [value.name for value in session.get_outputs()]
    typed = {
        value.name: np.ascontiguousarray(feeds[value.name], TYPES[value.type])
        for value in session.get_inputs()
    }
    return dict(zip(names, session.run(names, typed), strict=True))


def run_prompt(
    session: onnxruntime.InferenceSession, ids: Sequence[int] | Ints
) -> tuple[Floats, dict[str, NDArray[Any]]]:
    """(logits of all tokens or of the last one, keys and values of all places), padded on the right."""
    size, row = _shape(session, "input_ids")[1], np.asarray(ids, np.int64).reshape(-1)
    if not 0 < len(row) <= size:
        raise InputError(
            f"a prompt of {len(row)} tokens",
            where="prompt",
            allowed=f"1 to {size} tokens: the graph reads that many at once",
            next_step="shorten the prompt, or quantize with a longer --prompt-length",
        )
    padding = (0, size - len(row))
    feeds = {
        "input_ids": np.pad(row, padding)[None],
        "attention_mask": np.pad(np.ones_like(row), padding)[None],
        "logit_position": np.array([len(row) - 1]),
    }
    outputs = _run(session, feeds)
    logits: Floats = outputs.pop("logits")
    return logits[0, : len(row)], outputs
