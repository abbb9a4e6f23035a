"""Perplexity, KL divergence and top-1 agreement of a quantized model against its reference, on one text.

The text is read in windows that overlap: each window predicts only the tokens that no earlier one did, and
the rest is their context, so every token but the first counts exactly once. With a stride of a whole window
nothing overlaps, and the first token of each window is predicted by none and counted by none. Windows and
losses are those of https://huggingface.co/docs/transformers/perplexity; window and stride decide the figure
as much as the model does, and so belong to the result. One thing differs: that page weighs the mean of each
overlapping window as if it had predicted one token fewer than it did, while here every predicted token
weighs the same. On 16,384 tokens of the embedded model's text (window 512, stride 256) that moves its
perplexity by 0.001%; without overlap the two are equal.

Both models see a window before the next one is begun: of its logits a few numbers for each token are kept.

KL(reference || quantized) sees every change of a distribution, where perplexity sees only the one token that
came next and where errors of both signs cancel. The standard errors take tokens as independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.evaluation.measurements import Accuracy, Perplexity

# Letters: B rows, S positions, V vocabulary, T predicted tokens.
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Logits = Callable[[Ints], Floats]  # token ids [B, S] -> logits [B, S, V]

MIN_TOKENS = 3  # two predictions: one alone has no standard error
# Float64 working copies of this many logits stay in the cache; ten times more run at half the speed.
CHUNK_VALUES = 1 << 18
LARGEST_MEAN_NLL = 700.0  # exp of more is beyond float64


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Tokens [begin, end) go in; tokens [first_target, end) are predicted and counted."""

    begin: int
    end: int
    first_target: int


def windows(num_tokens: int, *, window: int, stride: int) -> Iterator[Window]:
    """The windows of a text; they end with the one that reaches its last token."""
    if window < 2 or not 1 <= stride <= window:
        raise InputError(
            f"window {window} with stride {stride}",
            where="accuracy",
            allowed="a window of at least 2 tokens, a stride from 1 to the window",
        )
    done = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + window, num_tokens)
        first_target = max(done, begin + 1)  # nothing predicts the first token of a window
        if end > first_target:
            yield Window(begin=begin, end=end, first_target=first_target)
        done = end
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
    """Compare two models on a text; `progress` is told how many more tokens were predicted."""
    ids, spans = _read(token_ids, window=window, stride=stride, text=text)
    num_predicted = sum(each.end - each.first_target for each in spans)
    nll_T = {"reference": np.empty(num_predicted), "quantized": np.empty(num_predicted)}
    kl_T = np.empty(num_predicted)
    is_same_T = np.empty(num_predicted, np.bool_)
    largest_logit = largest_difference = 0.0
    done = 0
    for each in spans:
        inputs_BS = ids[None, each.begin : each.end]
        reference_SV = _predictions(reference(inputs_BS), each, "reference")
        quantized_SV = _predictions(quantized(inputs_BS), each, "quantized")
        if reference_SV.shape != quantized_SV.shape:
            raise InputError(
                f"the vocabularies differ: {reference_SV.shape[1]} tokens in the reference, "
                f"{quantized_SV.shape[1]} in the quantized model",
                where="accuracy",
                next_step="compare a model with the one that it was made from",
            )
        count, first = each.end - each.first_target, each.first_target
        step = max(1, CHUNK_VALUES // reference_SV.shape[1])
        for start in range(0, count, step):
            stop = min(start + step, count)
            place = slice(done + start, done + stop)
            chunk = _compare(
                reference_SV[start:stop],
                quantized_SV[start:stop],
                ids[first + start : first + stop],
                first_target=first + start,
            )
            nll_T["reference"][place], nll_T["quantized"][place] = chunk.reference_nll, chunk.quantized_nll
            kl_T[place], is_same_T[place] = chunk.kl, chunk.is_same_top1
            largest_logit = max(largest_logit, chunk.largest_logit)
            largest_difference = max(largest_difference, chunk.largest_difference)
        done += count
        progress(count)
    difference, difference_error = _mean_and_error(nll_T["quantized"] - nll_T["reference"])
    kl_divergence, kl_standard_error = _mean_and_error(kl_T)
    perplexity = {name: _perplexity(values, name) for name, values in nll_T.items()}
    return Accuracy(
        reference=perplexity["reference"],
        quantized=perplexity["quantized"],
        increase=math.expm1(difference),
        increase_standard_error=math.exp(difference) * difference_error,
        kl_divergence=kl_divergence,
        kl_standard_error=kl_standard_error,
        kl_99th_percentile=float(np.percentile(kl_T, 99)),
        top1_agreement=float(is_same_T.mean()),
        max_relative_logit_error=largest_difference / largest_logit if largest_logit else 0.0,
        num_tokens=num_predicted,
        window=window,
        stride=stride,
        text=text,
        is_meaningful=is_meaningful,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPerplexity:
    """One model alone on a text, with the protocol that its figure depends on."""

    perplexity: Perplexity
    num_tokens: int  # predicted ones
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
    """The same windows and the same figure as `measure_accuracy`, without a reference."""
    ids, spans = _read(token_ids, window=window, stride=stride, text=text)
    parts = []
    for each in spans:
        logits_SV = _predictions(model(ids[None, each.begin : each.end]), each, "quantized")
        nll_S, _ = score_tokens(logits_SV, ids[each.first_target : each.end], first_target=each.first_target)
        parts.append(nll_S)
        progress(len(nll_S))
    nll_T = np.concatenate(parts)
    return TextPerplexity(
        perplexity=_perplexity(nll_T, "quantized"),
        num_tokens=len(nll_T),
        window=window,
        stride=stride,
        text=text,
    )


def score_tokens(
    logits_SV: Floats, targets_S: Ints, *, first_target: int = 0, name: str = "quantized"
) -> tuple[Doubles, NDArray[np.bool_]]:
    """(negative log-likelihood of each target in nats, whether it is the likeliest token)."""
    nll_S, is_top_S = np.empty(len(targets_S)), np.empty(len(targets_S), np.bool_)
    step = max(1, CHUNK_VALUES // logits_SV.shape[1])
    for start in range(0, len(targets_S), step):
        values_SV, targets = logits_SV[start : start + step], targets_S[start : start + step]
        rows, top_S = np.arange(len(targets)), values_SV.argmax(axis=1)
        _check_finite(values_SV, top_S, first_target=first_target + start, name=name)
        shifted_SV = np.subtract(values_SV, values_SV[rows, top_S][:, None], dtype=np.float64)
        chosen_S = shifted_SV[rows, targets]
        nll_S[start : start + step] = np.log(np.exp(shifted_SV, out=shifted_SV).sum(axis=1)) - chosen_S
        is_top_S[start : start + step] = top_S == targets
    return nll_S, is_top_S


def _read(token_ids: Ints, *, window: int, stride: int, text: str) -> tuple[Ints, tuple[Window, ...]]:
    """The ids as they are fed, and the windows over them."""
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
    if sum(each.end - each.first_target for each in spans) < MIN_TOKENS - 1:
        raise InputError(
            f"window {window} with stride {stride} predicts too few of the text's {len(ids)} tokens",
            where="accuracy",
            allowed=f"{MIN_TOKENS - 1} predicted tokens or more",
            next_step="take a longer text or a smaller stride",
        )
    return ids, spans


def _predictions(logits_BSV: Floats, window: Window, name: str) -> Floats:
    """The positions that predict the window's counted tokens: each stands one before its token."""
    expected = (1, window.end - window.begin)
    assert logits_BSV.ndim == 3, (name, logits_BSV.shape)
    assert logits_BSV.shape[:2] == expected, (name, logits_BSV.shape, expected)
    return logits_BSV[0, window.first_target - 1 - window.begin : -1]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """The few numbers that are kept of each position."""

    reference_nll: Doubles
    quantized_nll: Doubles
    kl: Doubles
    is_same_top1: NDArray[np.bool_]
    largest_logit: float
    largest_difference: float


def _compare(reference_SV: Floats, quantized_SV: Floats, targets_S: Ints, *, first_target: int) -> _Chunk:
    rows = np.arange(len(targets_S))
    top_S, quantized_top_S = reference_SV.argmax(axis=1), quantized_SV.argmax(axis=1)
    shifted = {}
    largest_logit = 0.0
    for name, values_SV, best_S in (
        ("reference", reference_SV, top_S),
        ("quantized", quantized_SV, quantized_top_S),
    ):
        highest_S, lowest_S = _check_finite(values_SV, best_S, first_target=first_target, name=name)
        if name == "reference":
            largest_logit = float(max(abs(highest_S).max(), abs(lowest_S).max()))
        # Shifted by the largest, no exponential overflows and the sum is at least 1.
        shifted[name] = np.subtract(values_SV, highest_S[:, None], dtype=np.float64)
    reference_ZSV, quantized_ZSV = shifted["reference"], shifted["quantized"]
    reference_nll, quantized_nll = -reference_ZSV[rows, targets_S], -quantized_ZSV[rows, targets_S]
    weight_SV = np.exp(reference_ZSV)
    total_S = weight_SV.sum(axis=1)
    reference_log_S = np.log(total_S)
    difference_SV = np.subtract(reference_ZSV, quantized_ZSV, out=reference_ZSV)
    np.exp(quantized_ZSV, out=quantized_ZSV)
    quantized_log_S = np.log(quantized_ZSV.sum(axis=1))
    # The shift of each model back in: logit differences as they were.
    offset_S = (reference_SV[rows, top_S] - quantized_SV[rows, quantized_top_S].astype(np.float64))[:, None]
    kl_S = np.einsum("sv,sv->s", weight_SV, difference_SV) / total_S - reference_log_S + quantized_log_S
    difference_SV += offset_S
    return _Chunk(
        reference_nll=reference_nll + reference_log_S,
        quantized_nll=quantized_nll + quantized_log_S,
        kl=np.maximum(kl_S, 0.0),  # rounding can leave -1e-16
        is_same_top1=top_S == quantized_top_S,
        largest_logit=largest_logit,
        largest_difference=float(max(difference_SV.max(), -difference_SV.min())),
    )


def _check_finite(
    values_SV: Floats, top_S: NDArray[np.intp], *, first_target: int, name: str
) -> tuple[Floats, Floats]:
    """(highest, lowest logit of each position); a position with one that is no finite number is named."""
    highest_S, lowest_S = values_SV[np.arange(len(top_S)), top_S], values_SV.min(axis=1)
    is_finite_S = np.isfinite(highest_S) & np.isfinite(lowest_S)  # argmax and min both find a NaN
    if not is_finite_S.all():
        raise InputError(
            f"the {name} model's logits for token {first_target + int(is_finite_S.argmin())} are "
            "infinite or no numbers",
            where="accuracy",
            next_step="half precision overflowed or weights are damaged; start from a sound checkpoint",
        )
    return highest_S, lowest_S


def _mean_and_error(values: Doubles) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _perplexity(nll_T: Doubles, name: str) -> Perplexity:
    mean, standard_error = _mean_and_error(nll_T)
    if mean > LARGEST_MEAN_NLL:
        raise InputError(
            f"the {name} model gives the text a negative log-likelihood of {mean:.0f} a token",
            where="accuracy",
            next_step="its weights are damaged, or its tokenizer is another model's",
        )
    # d exp(x) = exp(x) dx carries the error of the mean over to perplexity.
    return Perplexity(value=math.exp(mean), standard_error=math.exp(mean) * standard_error)
