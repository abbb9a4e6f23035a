"""Perplexity, KL divergence and top-1 agreement of a quantized model and its reference on one text.

The text is read in overlapping windows. A window predicts only the tokens that no earlier window predicted;
its other tokens are context. Every token but the first therefore counts once. A stride of a whole window
gives no overlap: the first token of each window is then neither predicted nor counted. Perplexity depends on
window and stride, so both are part of the result.

Windows and losses follow https://huggingface.co/docs/transformers/perplexity, with one difference. That page
weights the mean of an overlapping window by one token fewer than the window predicted; here every predicted
token has the same weight. On 16,384 tokens of the embedded model's text (window 512, stride 256) the
difference is 0.001% of perplexity; without overlap it is zero.

Both models read a window before the next window begins. Only a few numbers for each token are kept.

KL(reference || quantized) covers the whole distribution. Perplexity covers only the probability of the next
token, where errors of opposite sign cancel. Standard errors of perplexities assume independent tokens. Those
of KL divergence and top-1 agreement are over windows, because tokens of one window are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.measurements import Accuracy, Perplexity

# Letters: B rows, S positions, V vocabulary, T predicted tokens.
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Logits = Callable[[NDArray[Any]], Floats]  # token ids [B, S] -> logits [B, S, V]; pictures -> outputs

MIN_TOKENS = 3  # two predictions: one alone has no standard error
# Logits of a chunk: their float64 copies fit in the cache. Chunks ten times larger take twice the time.
CHUNK_VALUES = 1 << 18
LARGEST_MEAN_NLL = 700.0  # exp of more is beyond float64


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Tokens [begin, end) are read; tokens [first_target, end) are predicted and counted."""

    begin: int
    end: int
    first_target: int

    @property
    def num_targets(self) -> int:
        return self.end - self.first_target


def windows(num_tokens: int, *, window: int, stride: int) -> Iterator[Window]:
    """Windows of a text; the last window is the first that reaches the last token."""
    if window < 2 or not 1 <= stride <= window:
        raise InputError(
            f"window {window} with stride {stride}",
            where="accuracy",
            allowed="a window of at least 2 tokens, a stride from 1 to the window",
        )
    predicted = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + window, num_tokens)
        first_target = max(predicted, begin + 1)  # the first token of a window has no context
        if end > first_target:
            yield Window(begin=begin, end=end, first_target=first_target)
        predicted = end
        if end == num_tokens:
            return


def measure_accuracy(
    *,
    reference: Logits,
    quantized: Logits,
    token_ids: Ints,
    window: int,
    stride: int,
    text: str,
    is_meaningful: bool = True,
    progress: Callable[[int], None] = lambda count: None,
) -> Accuracy:
    """Compare two models on a text; `progress` receives the number of tokens predicted in each window."""
    models = {"reference": reference, "quantized": quantized}
    chunks = [
        _compare(reference_SV, quantized_SV, targets_S, first_target=first_target)
        for first_target, targets_S, (reference_SV, quantized_SV) in _predictions(
            models, token_ids, window=window, stride=stride, text=text, progress=progress
        )
    ]
    reference_T, quantized_T = np.concatenate([chunk.nll_MS for chunk in chunks], axis=1)
    kl_T = np.concatenate([chunk.kl_S for chunk in chunks])
    largest_logit = max(chunk.largest_logit for chunk in chunks)
    difference, difference_error = _mean_and_error(quantized_T - reference_T)
    is_same_T = np.concatenate([chunk.is_same_top1_S for chunk in chunks]).astype(np.float64)
    counts = [span.num_targets for span in windows(len(token_ids), window=window, stride=stride)]
    return Accuracy(
        reference=_perplexity(reference_T, "reference"),
        quantized=_perplexity(quantized_T, "quantized"),
        increase=math.expm1(difference),
        increase_standard_error=math.exp(difference) * difference_error,
        kl_divergence=float(kl_T.mean()),
        kl_standard_error=error_over_windows(kl_T, counts),
        kl_99th_percentile=float(np.percentile(kl_T, 99)),
        top1_agreement=float(is_same_T.mean()),
        top1_standard_error=error_over_windows(is_same_T, counts),
        max_relative_logit_error=(
            max(chunk.largest_difference for chunk in chunks) / largest_logit if largest_logit else 0.0
        ),
        num_tokens=len(kl_T),
        window=window,
        stride=stride,
        text=text,
        is_meaningful=is_meaningful,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPerplexity:
    """Perplexity of one model on a text, with the windows that it depends on."""

    perplexity: Perplexity
    num_tokens: int  # predicted tokens
    window: int
    stride: int
    text: str


def measure_perplexity(
    *,
    model: Logits,
    token_ids: Ints,
    window: int,
    stride: int,
    text: str,
    progress: Callable[[int], None] = lambda count: None,
) -> TextPerplexity:
    """Measure one model on the windows of `measure_accuracy`."""
    chunks = _predictions(
        {"quantized": model}, token_ids, window=window, stride=stride, text=text, progress=progress
    )
    nll_T = np.concatenate(
        [
            score_tokens(logits_SV, targets_S, first_target=first_target)[0]
            for first_target, targets_S, (logits_SV,) in chunks
        ]
    )
    return TextPerplexity(
        perplexity=_perplexity(nll_T, "quantized"),
        num_tokens=len(nll_T),
        window=window,
        stride=stride,
        text=text,
    )


def score_tokens(
    logits_SV: Floats, targets_S: Ints, *, first_target: int = 0
) -> tuple[Doubles, NDArray[np.bool_]]:
    """(negative log-likelihood of each target in nats, whether the target has the largest logit)."""
    nll_S, is_top_S = np.empty(len(targets_S)), np.empty(len(targets_S), np.bool_)
    step = max(1, CHUNK_VALUES // logits_SV.shape[1])
    for start in range(0, len(targets_S), step):
        values_SV, targets = logits_SV[start : start + step], targets_S[start : start + step]
        shifted_SV, top_S = _shifted(values_SV, first_target=first_target + start, name="quantized")
        chosen_S = shifted_SV[np.arange(len(targets)), targets]
        nll_S[start : start + step] = np.log(np.exp(shifted_SV, out=shifted_SV).sum(axis=1)) - chosen_S
        is_top_S[start : start + step] = top_S == targets
    return nll_S, is_top_S


def _predictions(
    models: Mapping[str, Logits],
    token_ids: Ints,
    *,
    window: int,
    stride: int,
    text: str,
    progress: Callable[[int], None],
) -> Iterator[tuple[int, Ints, list[Floats]]]:
    """Chunks of predicted tokens: (index of the first target, targets [S], logits [S, V] of every model)."""
    ids = np.ascontiguousarray(token_ids, np.int64)
    assert ids.ndim == 1, ids.shape
    if len(ids) < MIN_TOKENS:
        raise InputError(
            f"the text has {len(ids)} tokens",
            where=text,
            allowed=f"{MIN_TOKENS} tokens or more",
            next_step="give a longer text",
        )
    spans = tuple(windows(len(ids), window=window, stride=stride))
    if sum(span.num_targets for span in spans) < MIN_TOKENS - 1:
        raise InputError(
            f"window {window} with stride {stride} predicts too few of the text's {len(ids)} tokens",
            where="accuracy",
            allowed=f"{MIN_TOKENS - 1} predicted tokens or more",
            next_step="take a longer text or a smaller stride",
        )
    for span in spans:
        outputs = []
        for name, model in models.items():
            logits_BSV = model(ids[None, span.begin : span.end])
            expected = (1, span.end - span.begin)
            assert logits_BSV.ndim == 3, (name, logits_BSV.shape)
            assert logits_BSV.shape[:2] == expected, (name, logits_BSV.shape, expected)
            # Position t predicts token t + 1.
            outputs.append(logits_BSV[0, span.first_target - 1 - span.begin : -1])
        step = max(1, CHUNK_VALUES // outputs[0].shape[1])
        for start in range(0, span.num_targets, step):
            first = span.first_target + start
            chunk = [logits_SV[start : start + step] for logits_SV in outputs]
            yield first, ids[first : min(first + step, span.end)], chunk
        progress(span.num_targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Scores of a few positions."""

    nll_MS: Doubles  # M: reference, quantized
    kl_S: Doubles
    is_same_top1_S: NDArray[np.bool_]
    largest_logit: float  # of the reference
    largest_difference: float


def _compare(reference_SV: Floats, quantized_SV: Floats, targets_S: Ints, *, first_target: int) -> _Chunk:
    if reference_SV.shape != quantized_SV.shape:
        raise InputError(
            f"the vocabularies differ: {reference_SV.shape[1]} tokens in the reference, "
            f"{quantized_SV.shape[1]} in the quantized model",
            where="accuracy",
            next_step="compare the model with its own original",
        )
    rows = np.arange(len(targets_S))
    reference_ZSV, top_S = _shifted(reference_SV, first_target=first_target, name="reference")
    quantized_ZSV, quantized_top_S = _shifted(quantized_SV, first_target=first_target, name="quantized")
    chosen_MS = np.stack([reference_ZSV[rows, targets_S], quantized_ZSV[rows, targets_S]])
    weight_SV = np.exp(reference_ZSV)
    total_S = weight_SV.sum(axis=1)
    reference_log_S = np.log(total_S)
    difference_SV = np.subtract(reference_ZSV, quantized_ZSV, out=reference_ZSV)
    np.exp(quantized_ZSV, out=quantized_ZSV)
    quantized_log_S = np.log(quantized_ZSV.sum(axis=1))
    kl_S = np.einsum("sv,sv->s", weight_SV, difference_SV) / total_S - reference_log_S + quantized_log_S
    # Adds the two maxima back: differences of the original logits.
    offset_S = reference_SV[rows, top_S] - quantized_SV[rows, quantized_top_S].astype(np.float64)
    difference_SV += offset_S[:, None]
    return _Chunk(
        nll_MS=np.stack([reference_log_S, quantized_log_S]) - chosen_MS,
        kl_S=np.maximum(kl_S, 0.0),  # rounding can leave -1e-16
        is_same_top1_S=top_S == quantized_top_S,
        largest_logit=float(np.abs(reference_SV).max()),
        largest_difference=float(max(difference_SV.max(), -difference_SV.min())),
    )


def _shifted(values_SV: Floats, *, first_target: int, name: str) -> tuple[Doubles, NDArray[np.intp]]:
    """(logits minus the maximum of their position, index of the maximum); logits that are not finite raise.

    After the shift no exponential overflows, and the sum of exponentials is at least 1.
    """
    top_S = values_SV.argmax(axis=1)
    highest_S = values_SV[np.arange(len(top_S)), top_S]
    is_finite_S = np.isfinite(highest_S) & np.isfinite(values_SV.min(axis=1))  # argmax and min return a NaN
    if not is_finite_S.all():
        raise InputError(
            f"the {name} model's logits for token {first_target + int(is_finite_S.argmin())} are not finite",
            where="accuracy",
            next_step="half precision overflowed, or weights are damaged; start from an intact checkpoint",
        )
    return np.subtract(values_SV, highest_S[:, None], dtype=np.float64), top_S


def _mean_and_error(values: Doubles) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def error_over_windows(values_T: Doubles, counts: Sequence[int]) -> float:
    """Standard error of the mean over tokens, from the spread of windows; of a single window, over tokens."""
    if len(counts) < 2:
        return _mean_and_error(values_T)[1]
    excess_W = np.array(
        [part_T.sum() for part_T in np.split(values_T - values_T.mean(), np.cumsum(counts)[:-1])]
    )
    return float(np.sqrt((excess_W**2).sum() * len(counts) / (len(counts) - 1)) / len(values_T))


def _perplexity(nll_T: Doubles, name: str) -> Perplexity:
    mean, standard_error = _mean_and_error(nll_T)
    if mean > LARGEST_MEAN_NLL:
        raise InputError(
            f"the {name} model gives the text a negative log-likelihood of {mean:.0f} per token",
            where="accuracy",
            next_step="its weights are damaged, or the tokenizer belongs to another model",
        )
    # Error of exp(mean): d exp(x) = exp(x) dx.
    return Perplexity(value=math.exp(mean), standard_error=math.exp(mean) * standard_error)
