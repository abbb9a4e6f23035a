"""Error of the original as a float32 graph: its outputs compared with those of transformers on two prompts.

Wrong positions, masks and scales show here whatever the family. A short and a long prompt are read alone and
in one padded batch. A decoder also continues them from its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import InputError
from quantkit.evaluation.accuracy import Floats, Ints
from quantkit.evaluation.artifact import open_measured
from quantkit.evaluation.measurements import FloatError
from quantkit.evaluation.reference import Reference
from quantkit.runtime.encoder import Encoder, encode
from quantkit.runtime.session import Session

SHORT, LONG = 5, 320  # tokens of the prompts
NUM_PICTURES = 2
NUM_STEPS = 2  # tokens that continue a decoder's prompt
# Tokens x parameters of the long prompt: some seconds. It has MIN_LONG tokens at least.
WORK, MIN_LONG = 1 << 34, 32

# Inputs of the reference, and outputs of the graph with the rows of the reference's output that they equal.
Compared = tuple[tuple[Ints, ...], list[tuple[slice, Floats]]]


def check_prompts(
    config: Mapping[str, Any], *, vocab_size: int, num_parameters: int, most_tokens: int
) -> tuple[Ints, Ints]:
    """Prompts of random tokens that are no special ones: models treat padding and images differently."""
    special = {value for key, value in config.items() if key.endswith("_token_id") and isinstance(value, int)}
    plain = np.setdiff1d(np.arange(vocab_size), list(special))
    random = np.random.default_rng(0)
    short, long = check_lengths(num_parameters, most_tokens)
    return random.choice(plain, short), random.choice(plain, long)


def check_lengths(num_parameters: int, most_tokens: int) -> tuple[int, int]:
    """Tokens of the short and of the long prompt."""
    long = min(LONG, max(MIN_LONG, WORK // num_parameters), most_tokens - NUM_STEPS)
    short, long = (max(1, min(length, long)) for length in (SHORT, long))
    return short, long


def float_error(folder: Path, reference: Reference, prompts: Sequence[Ints], *, pad_id: int) -> FloatError:
    """Compare the float graphs of a folder with the reference; one of the two is in memory at a time."""
    session = open_measured(folder)
    try:
        compared = list(
            _continued(session, prompts) if session.generates else _padded(session, prompts, pad_id)
        )
    except InputError:
        raise
    except Exception as failure:  # onnxruntime's own exceptions share no useful base class
        return FloatError(largest_error=1.0, num_tokens=0, failure=" ".join(str(failure).split())[:300])
    del session
    run = reference.answer_logits() if reference.reads_and_answers else reference.logits()
    largest, differences = 0.0, []
    for inputs, parts in compared:
        expected = run(*inputs)[0]
        largest = max(largest, float(np.abs(expected).max()))
        differences += [float(np.abs(outputs - expected[rows]).max()) for rows, outputs in parts]
    error = float(np.max(differences)) / (largest or 1.0)
    num_tokens = sum(inputs[-1].size for inputs, _ in compared)
    return FloatError(largest_error=error if np.isfinite(error) else 1.0, num_tokens=num_tokens)


def _continued(session: Session, prompts: Sequence[Ints]) -> Iterator[Compared]:
    """A decoder: logits of each prompt alone, and of a batch of prompts continued from its cache."""
    steps_PN = np.stack([np.resize(prompt, NUM_STEPS) for prompt in prompts])
    batch, rows = session.begin([prompt.tolist() for prompt in prompts], NUM_STEPS), range(len(prompts))
    logits = [batch.read().copy(), *(batch.step(tokens_P, rows).copy() for tokens_P in steps_PN.T)]
    start = np.array(session.start_ids, np.int64)
    for prompt, steps_N, continued in zip(prompts, steps_PN, np.stack(logits, axis=1), strict=True):
        first = start if session.reads_and_answers else prompt
        read = np.concatenate([first, steps_N])[None]
        parts = [(slice(len(first) - 1, None), continued)]
        if session.reads_and_answers:
            yield (prompt[None], read), [*parts, (slice(None), session.answer_logits(prompt[None], read)[0])]
        else:
            yield (read,), [*parts, (slice(len(prompt)), session.logits(prompt[None])[0])]


def picture_error(folder: Path, reference: Reference) -> FloatError:
    """Compare the float graph of a model of pictures with the reference on two random pictures."""
    session = open_measured(folder)
    assert isinstance(session, Encoder)
    random = np.random.default_rng(0)
    pictures = random.standard_normal((NUM_PICTURES, *session.picture_shape), np.float32)
    try:
        outputs = session.logits(pictures)
    except Exception as failure:  # onnxruntime's own exceptions share no useful base class
        return FloatError(largest_error=1.0, num_tokens=0, failure=" ".join(str(failure).split())[:300])
    num_tokens = NUM_PICTURES * (session.context or 1)
    del session
    expected = reference.logits()(pictures)
    error = float(np.abs(outputs - expected).max()) / (float(np.abs(expected).max()) or 1.0)
    return FloatError(largest_error=error if np.isfinite(error) else 1.0, num_tokens=num_tokens)


def _padded(session: Session, prompts: Sequence[Ints], pad_id: int) -> Iterator[Compared]:
    """An encoder: each prompt alone, and all in one batch with padding behind the shorter ones."""
    assert isinstance(session, Encoder)
    longest = max(map(len, prompts))
    ids, mask = (
        np.stack([np.pad(row, (0, longest - len(row)), constant_values=fill) for row in rows])
        for rows, fill in ((prompts, pad_id), ([np.ones_like(prompt) for prompt in prompts], 0))
    )
    batch = encode(session, ids, mask)[session.outputs[0]]
    for prompt, outputs in zip(prompts, batch, strict=True):
        padded = outputs[: len(prompt)] if outputs.ndim > 1 else outputs  # a classifier: [V]
        yield (prompt[None],), [(slice(None), values) for values in (padded, session.logits(prompt[None])[0])]
