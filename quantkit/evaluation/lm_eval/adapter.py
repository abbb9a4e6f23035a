"""A quantkit artifact as a model of EleutherAI's lm-evaluation-harness, under the name `quantkit`.

    quantkit lm-eval --model quantkit --model_args path=DIR --tasks ...

Tokens, first tokens, windows and truncation follow the harness's own `hf` model, so that the float reference
under `hf` and its artifact here differ by the quantization alone. The artifact runs in quantkit's runtime
with its own tokenizer.json: neither torch nor transformers is loaded.

The harness reads no entry points of other packages (true of 0.4.13): a model is known once its class is
registered. Importing this module does that, and `quantkit lm-eval` imports it before it hands over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401 - the harness lists its own models only while it knows none
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from quantkit.errors import InputError
from quantkit.evaluation.lm_eval.scoring import continue_prompts, rolling_windows, score_continuations
from quantkit.evaluation.lm_eval.special_tokens import read_special_tokens
from quantkit.runtime.decoder import Decoder, open_decoder
from quantkit.runtime.generate import Sampling
from quantkit.runtime.manifest import require_whole
from quantkit.runtime.tokenizer import open_text

MODEL_NAME = "quantkit"
ALLOWED = "path, batch_size, max_length, max_gen_toks, threads, prefix_token_id, add_bos_token"
MOST_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
# Settings of other runtimes at the value that changes nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "use_cache": (True,),
    "num_return_sequences": (1,),
}


@register_model(MODEL_NAME)
class QuantkitLM(TemplateLM):  # type: ignore[misc]
    """One open artifact."""

    def __init__(
        self,
        path: str = "",
        *,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        threads: int | None = None,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **others: Any,
    ) -> None:
        """The arguments are those of --model_args.

        Two more come from the harness itself: `max_batch_size`, and `device`, which defaults to a GPU there
        and has no effect here, as artifacts run on the CPU provider.
        """
        super().__init__()
        if others or not str(path):
            what = f"unknown: {', '.join(others)}" if others else "no path"
            raise InputError(what, where="--model_args", allowed=ALLOWED, next_step="path=DIR is required")
        self.folder = Path(str(path)).expanduser()
        self.decoder = _open(self.folder, threads)
        self.text = open_text(self.folder)
        if self.text.tokenizer.get_vocab_size() > self.decoder.vocab_size:
            used = max(self.text.tokenizer.get_vocab().values())
            if used >= self.decoder.vocab_size:
                raise InputError(
                    f"its tokenizer makes id {used}, and the model has {self.decoder.vocab_size} tokens",
                    where=str(self.folder),
                    next_step="copy the tokenizer.json that the checkpoint came with",
                )
        special = read_special_tokens(self.folder, self.text)
        ends = (special.end, *sorted(self.text.stop_ids))
        self._end = next((token for token in ends if token is not None), None)
        begins = (prefix_token_id, special.begin, self._end)
        self._prefix = next((token for token in begins if token is not None), None)
        self._add_bos = add_bos_token
        self.max_length = _within(max_length, self.decoder.context)
        self.max_gen_toks = max_gen_toks
        self.batch_size = batch_size
        self._rows = _batch_rows(batch_size, max_batch_size)

    @property
    def eot_token_id(self) -> int:
        return self._require(self._end)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context; the first token of a text where the model has one."""
        return self._require(self._prefix)

    @property
    def tokenizer_name(self) -> str:
        """Name in the harness's cache of requests."""
        return str(self.folder.resolve()).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness writes beside its results."""
        keys = ("model", "scheme")
        return {f"quantkit_{key}": self.decoder.metadata[key] for key in keys if key in self.decoder.metadata}

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; a text that brings its own first token gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = True if self._add_bos is None else self._add_bos
            if self._prefix is not None and string.startswith(self._prefix_text()):
                add_special_tokens = False
        encoded = self.text.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded: str = self.text.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return decoded

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_others: Any,
    ) -> list[tuple[float, bool]]:
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            answers = score_continuations(
                self.decoder,
                [(context, continuation) for _, context, continuation in requests],
                max_length=self.max_length,
                batch_size=self._rows,
                progress=bar.update,
            )
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows that count each token once."""
        pieces: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for request in requests:
            windows = rolling_windows(
                self.tok_encode(request.args[0]), prefix=self.prefix_token_id, max_length=self.max_length
            )
            before = len(pieces)
            pieces.extend((None, context, targets) for context, targets in windows)
            counts.append(len(pieces) - before)
        answers = iter(self._loglikelihood_tokens(pieces, disable_tqdm=disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            total = sum(next(answers)[0] for _ in range(count))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            totals.append(total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to a stop text or the token limit."""
        answers = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for numbers, settings in self._alike(requests):
                batch = self._generate([requests[number].args[0] for number in numbers], settings)
                for number, answer in zip(numbers, batch, strict=True):
                    answers[number] = answer
                    self.cache_hook.add_partial("generate_until", requests[number].args, answer)
                bar.update(len(numbers))
        return answers

    def _alike(self, requests: Sequence[Any]) -> list[tuple[list[int], Mapping[str, Any]]]:
        """Batches of requests with the same settings, the longest contexts first."""
        grouped: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            grouped.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        rows = self._rows or 8
        batches = []
        for numbers in grouped.values():
            ordered = sorted(numbers, key=lambda number: -len(requests[number].args[0]))
            starts = range(0, len(ordered), rows)
            batches += [(ordered[start : start + rows], requests[numbers[0]].args[1]) for start in starts]
        return batches

    def _generate(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        num_new, sampling, stop_texts = read_settings(settings, self.max_gen_toks)
        room = self.max_length - num_new
        if room < 1:
            raise InputError(
                f"{num_new} new tokens leave no room for a prompt",
                where="max_gen_toks",
                allowed=f"up to {self.max_length - 1}",
                next_step="pass max_gen_toks=N in --model_args, or in --gen_kwargs where the task sets it",
            )
        prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
        ends = self.text.stop_ids | ({self._end} if self._end is not None else set())
        return continue_prompts(
            self.decoder,
            self.text,
            prompts,
            max_new_tokens=num_new,
            sampling=sampling,
            stop_texts=stop_texts,
            stop_ids=frozenset(ends),
        )

    def _prefix_text(self) -> str:
        return self.tok_decode([self.prefix_token_id], skip_special_tokens=False)

    def _require(self, token: int | None) -> int:
        if token is None:
            raise InputError(
                "its tokenizer names no token that begins or ends a text",
                where=str(self.folder),
                next_step="pass prefix_token_id=N in --model_args",
            )
        return token


def read_settings(settings: Mapping[str, Any], most_new: int) -> tuple[int, Sampling, list[str]]:
    """(token limit, sampling, stop texts) of a task's generation settings; unknown settings are refused."""
    rest = dict(settings)
    limits = [value for name in MOST_NEW_TOKENS if (value := rest.pop(name, None)) is not None]
    num_new = int(limits[0] if limits else most_new)
    stops = rest.pop("until", None) or []
    stop_texts = [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]
    do_sample, temperature, top_k, top_p = (rest.pop(name, None) for name in SAMPLING)
    unknown = [name for name, value in rest.items() if value not in NEUTRAL.get(name, ())]
    if unknown:
        raise InputError(
            f"cannot follow {', '.join(f'{name}={rest[name]}' for name in unknown)}",
            where="generation settings",
            allowed=", ".join(("until", MOST_NEW_TOKENS[0], *SAMPLING)),
            next_step="take them out of the task or of --gen_kwargs",
        )
    if do_sample is None:
        do_sample = bool(temperature)
    if not do_sample:
        return num_new, Sampling(), stop_texts
    sampling = Sampling(
        temperature=float(1.0 if temperature is None else temperature),
        top_k=int(top_k or 0),
        top_p=float(1.0 if top_p is None else top_p),
        seed=int(np.random.randint(1 << 31)),  # the harness seeds numpy, so --seed repeats the draws
    )
    return num_new, sampling, stop_texts


def _open(folder: Path, threads: int | None) -> Decoder:
    require_whole(folder)
    decoder = open_decoder(folder, threads=threads)
    kind = decoder.metadata.get("kind", "decoder")
    if kind != "decoder":
        raise InputError(
            f"{'an' if kind == 'encoder' else 'a'} {kind} model cannot be scored token by token",
            where=str(folder),
            allowed="the artifact of a decoder that 'quantkit quantize' fused",
        )
    return decoder


def _within(max_length: int | None, context: int) -> int:
    if max_length is not None and not 1 <= int(max_length) <= context:
        raise InputError(
            f"{max_length}", where="max_length", allowed=f"1 to the model's context of {context}"
        )
    return int(max_length or context)


def _batch_rows(batch_size: int | str, largest: int | None) -> int | None:
    """Rows of a batch; None where the size of the logits decides."""
    if str(batch_size).partition(":")[0] == "auto":
        return None if largest is None else int(largest)
    try:
        rows = int(batch_size)
    except ValueError:
        rows = 0
    if rows < 1:
        raise InputError(f"'{batch_size}'", where="--batch_size", allowed="a whole number from 1 up, or auto")
    return rows
