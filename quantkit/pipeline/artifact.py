"""A quantized model in a folder, ready to generate, to be evaluated and to be benchmarked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Unpack, overload

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.artifact import (
    OpenArtifact,
    open_measured,
    require_model,
    require_room,
    stored_recipe,
)
from quantkit.evaluation.benchmark import Benchmark, benchmark, benchmark_providers
from quantkit.evaluation.evaluate import Evaluation, evaluate
from quantkit.evaluation.measurements import ProviderRun
from quantkit.evaluation.verdict import Judgement
from quantkit.pipeline.options import Options, with_options
from quantkit.progress import Progress
from quantkit.recipe import Recipe
from quantkit.report.document import Report
from quantkit.report.stored import REPORT_FILE, read_report
from quantkit.runtime.chat import Message, check_messages, conversation, open_chat_template
from quantkit.runtime.encoder import Encoder
from quantkit.runtime.generate import Sampling, generate
from quantkit.runtime.labels import head_of, score, score_pictures
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.manifest import require_whole
from quantkit.runtime.picture_batches import picture_vectors
from quantkit.runtime.providers.trial import ProviderChoice
from quantkit.runtime.sentence import token_rows, vectors
from quantkit.runtime.session import Session
from quantkit.runtime.tokenizer import Text, open_text


class Artifact:
    """A folder that `quantize` wrote. Session and tokenizer are opened when first needed."""

    def __init__(
        self,
        folder: str | Path,
        *,
        threads: int | None = None,
        provider: str | None = None,
        report: Report | None = None,
        check: str = "quick",
    ) -> None:
        self.folder = Path(folder).expanduser()
        require_model(self.folder)
        require_whole(self.folder, check)
        self.recipe: Recipe = with_options(stored_recipe(self.folder), {"threads": threads})
        self.threads = read_cpu().threads_for(self.recipe.measure.threads)
        self._provider = provider
        self._report = report

    def __repr__(self) -> str:
        return f"Artifact({str(self.folder)!r})"

    @property
    def described(self) -> dict[str, str]:
        """Folder, model and scheme, as reports name them."""
        return self._opened().described

    @property
    def size_bytes(self) -> int:
        """Bytes of graphs and weights."""
        return self._opened().size_bytes

    @cached_property
    def session(self) -> Session:
        """The open model; it runs token ids."""
        return open_measured(self.folder, threads=self.threads, provider=self._provider)

    @cached_property
    def tokenizer(self) -> Text:
        return open_text(self.folder)

    @cached_property
    def report(self) -> Report:
        """The report that was written with the artifact."""
        return self._report or read_report(self.folder)

    @property
    def judgement(self) -> Judgement | None:
        """The verdict of the report; None without a report, or where accuracy was not measured."""
        return self.report.judgement if self._report or (self.folder / REPORT_FILE).exists() else None

    @overload
    def generate(
        self, prompts: str, *, max_new_tokens: int = ..., sampling: Sampling | None = ...
    ) -> str: ...
    @overload
    def generate(
        self, prompts: list[str], *, max_new_tokens: int = ..., sampling: Sampling | None = ...
    ) -> list[str]: ...
    def generate(
        self,
        prompts: str | list[str],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
    ) -> str | list[str]:
        """Continue a text, or several as a batch; prompts are not repeated. Sampling is greedy by default."""
        batch = [prompts] if isinstance(prompts, str) else prompts
        token_rows: list[list[int]] = [[] for _ in batch]
        for step in self.stream_tokens(batch, max_new_tokens=max_new_tokens, sampling=sampling):
            for row, token in zip(token_rows, step, strict=True):
                if token is not None:
                    row.append(token)
        texts = [self.tokenizer.decode(row) for row in token_rows]
        return texts[0] if isinstance(prompts, str) else texts

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
    ) -> str:
        """Answer a conversation in the form of the model's chat template; a text is one turn of a user.

        A message is `{"role": "user", "content": "..."}`; roles are system, user and assistant.
        """
        turns = conversation(messages) if isinstance(messages, str) else check_messages(messages)
        text = open_chat_template(self.folder).render(turns)
        ids = self.tokenizer.encode(text, adds_special_tokens=False)
        steps = self._steps([ids], max_new_tokens=max_new_tokens, sampling=sampling)
        return self.tokenizer.decode([token for (token,) in steps if token is not None])

    def stream_tokens(
        self, prompts: Sequence[str], *, max_new_tokens: int = 64, sampling: Sampling | None = None
    ) -> Iterator[list[int | None]]:
        """Token ids step by step, one for each prompt; None for a text that has ended."""
        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        return self._steps(ids, max_new_tokens=max_new_tokens, sampling=sampling)

    def _steps(
        self, ids: Sequence[list[int]], *, max_new_tokens: int, sampling: Sampling | None
    ) -> Iterator[list[int | None]]:
        return generate(
            self.session,
            ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=self.tokenizer.stop_ids,
        )

    def logits(self, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits [B, T, V] of token ids [B, T] or [T]; of an encoder its first output."""
        return self.session.logits(np.atleast_2d(np.asarray(ids, np.int64)))

    def encode(
        self, texts: str | Path | Sequence[str | Path], *, prompt: str | None = None
    ) -> NDArray[np.float32]:
        """Vectors [N, D]: sentence embeddings, else means of an encoder's states.

        `prompt` names a prompt of the model, which is put before each text. A model of pictures reads the
        files of these paths.
        """
        if not isinstance(self.session, Encoder):
            raise InputError(
                "a decoder gives no vectors of texts",
                where=str(self.folder),
                allowed="an artifact of an encoder",
                next_step="artifact.logits(ids) gives a decoder's logits",
            )
        if self.labels:
            raise InputError(
                "a classifier gives no vectors of texts",
                where=str(self.folder),
                allowed="an encoder without labels",
                next_step="'quantkit score' or artifact.score(texts) gives labels, and a reranker's scores",
            )
        if self.session.reads_pictures:
            return picture_vectors(self.session, _paths(texts))
        batch = _texts(texts)
        return vectors(self.session, token_rows(self.session, self.tokenizer, batch, prompt))

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's labels; of a reranker one, of another model none."""
        head = head_of(self.session) if isinstance(self.session, Encoder) else None
        return head.labels if head else ()

    def score(
        self, texts: str | Path | Sequence[str | Path], *, query: str | None = None
    ) -> NDArray[np.float32]:
        """Probabilities of labels, or a reranker's scores of texts for a query, [N, labels].

        A model of pictures reads the files of these paths.
        """
        if not isinstance(self.session, Encoder):
            raise InputError(
                "a decoder gives no labels", where=str(self.folder), allowed="a classifier or a reranker"
            )
        if self.session.reads_pictures:
            return score_pictures(self.session, _paths(texts), query)
        return score(self.session, self.tokenizer, _texts(texts), query)

    def evaluate(
        self,
        *,
        text: str | Path | None = None,
        max_tokens: int | None = None,
        window: int | None = None,
        stride: int | None = None,
        reference: str | None = None,
        quiet: bool = True,
    ) -> Evaluation:
        """Measure accuracy: perplexity, and beside the original KL divergence and agreement."""
        artifact = self._opened(
            text=str(text) if text else None, max_tokens=max_tokens, window=window, stride=stride
        )
        require_room(artifact, {"--window": window})
        return evaluate(artifact, reference=reference, progress=Progress(quiet=quiet))

    def benchmark(
        self, *, prompt: int | None = None, decode: int | None = None, quiet: bool = True
    ) -> Benchmark:
        """Measure prompt and token latency and peak memory on the CPU."""
        artifact = self._opened(prompt=prompt, decode=decode)
        require_room(artifact, {"--prompt": prompt, "--decode": decode})
        return benchmark(artifact, progress=Progress(quiet=quiet))

    def benchmark_providers(
        self,
        providers: Sequence[ProviderChoice],
        *,
        prompt: int | None = None,
        decode: int | None = None,
        time_limit: float = 300.0,
        quiet: bool = True,
    ) -> tuple[tuple[ProviderRun, ...], tuple[str, ...]]:
        """(speed, placement and accuracy on each execution provider, notes); one process a provider."""
        artifact = self._opened(prompt=prompt, decode=decode)
        require_room(artifact, {"--prompt": prompt, "--decode": decode})
        return benchmark_providers(artifact, providers, time_limit=time_limit, progress=Progress(quiet=quiet))

    def _opened(self, **options: Unpack[Options]) -> OpenArtifact:
        recipe = with_options(self.recipe, {**options, "threads": self.threads})
        return OpenArtifact(folder=self.folder, recipe=recipe, session=self.session)


def _texts(texts: str | Path | Sequence[str | Path]) -> list[str]:
    return [texts] if isinstance(texts, str) else [str(text) for text in _as_list(texts)]


def _paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    return [Path(path).expanduser() for path in _as_list(paths)]


def _as_list(values: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [values] if isinstance(values, (str, Path)) else list(values)


def load(
    folder: str | Path,
    *,
    threads: int | None = None,
    provider: str | None = None,
    check: str = "quick",
) -> Artifact:
    """Open an artifact folder, after a check of its files: "all", "quick" or "none".

    >>> artifact = load(demo_artifact)
    >>> artifact.generate("The king", max_new_tokens=4) != ""
    True
    """
    return Artifact(folder, threads=threads, provider=provider, check=check)
