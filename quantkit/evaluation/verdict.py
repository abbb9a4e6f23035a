"""The verdict on an artifact: faithful, degraded or broken, from what was measured.

A value is beyond a limit when it exceeds the limit by more than two of its standard errors. docs/verdict.md
has the measurements of real models that the limits come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quantkit.evaluation.measurements import Accuracy, FloatError, ProviderAccuracy, ProviderRun, Similarity

NUM_STANDARD_ERRORS = 2


class Verdict(StrEnum):
    FAITHFUL = "faithful"
    DEGRADED = "degraded"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Values of a metric from which on an artifact is degraded, and broken."""

    metric: str
    degraded: float
    broken: float
    show: str = "{:.1%}"


KL_DIVERGENCE = Limit(metric="KL divergence in nats", degraded=0.05, broken=0.5, show="{:.3g}")
OTHER_TOP1 = Limit(metric="tokens with another top-1 prediction", degraded=0.2, broken=0.5)
LABEL_KL = Limit(metric="KL divergence of labels in nats", degraded=0.005, broken=0.05, show="{:.3g}")
OTHER_LABEL = Limit(metric="texts, tokens or pictures with another label", degraded=0.02, broken=0.1)
RANKING_LOSS = Limit(
    metric="1 - nDCG@10 of the original's ranking", degraded=0.015, broken=0.1, show="{:.3g}"
)
OTHER_FIRST = Limit(metric="queries with another first passage", degraded=0.1, broken=0.3)
OUTPUT_ERROR = Limit(metric="relative RMS error of outputs", degraded=0.12, broken=0.5)
# The order of sums alone makes a float32 graph differ from transformers by 2e-5 in 30 blocks.
FLOAT_ERROR = Limit(
    metric="difference of the float32 graph from transformers", degraded=1e-3, broken=1e-3, show="{:.2g}"
)

Reading = tuple[Limit, float, float]  # limit, value, standard error


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    verdict: Verdict
    reasons: tuple[str, ...] = ()  # a line for each limit that is exceeded


def judge(*records: Accuracy | Similarity | ProviderAccuracy | FloatError | None) -> Judgement | None:
    """The worst verdict of all records; None where only a float graph was compared, and it is right."""
    readings = [reading for record in records if record for reading in READINGS[type(record)](record)]
    verdicts = [(verdict_of(*reading), reading) for reading in readings]
    reasons = tuple(_reason(verdict, reading) for verdict, reading in verdicts if verdict != Verdict.FAITHFUL)
    is_judged = reasons or any(limit is not FLOAT_ERROR for limit, _, _ in readings)
    verdict = _worst(verdict for verdict, _ in verdicts)
    return Judgement(verdict=verdict, reasons=reasons) if is_judged else None


def judge_providers(runs: Sequence[ProviderRun]) -> Judgement | None:
    """The worst verdict of all providers whose outputs were compared."""
    judgements = {run.provider: judge(run.accuracy) for run in runs if run.accuracy}
    judged = {provider: judgement for provider, judgement in judgements.items() if judgement}
    if not judged:
        return None
    return Judgement(
        verdict=_worst(judgement.verdict for judgement in judged.values()),
        reasons=tuple(
            f"{provider}: {reason}" for provider, judgement in judged.items() for reason in judgement.reasons
        ),
    )


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=list(Verdict).index, default=Verdict.FAITHFUL)


def is_broken(judgement: Judgement | None) -> bool:
    return judgement is not None and judgement.verdict is Verdict.BROKEN


def verdict_of(limit: Limit, value: float, standard_error: float) -> Verdict:
    certain = value - NUM_STANDARD_ERRORS * standard_error
    if certain > limit.broken:
        return Verdict.BROKEN
    return Verdict.DEGRADED if certain > limit.degraded else Verdict.FAITHFUL


def _reason(verdict: Verdict, reading: Reading) -> str:
    limit, value, standard_error = reading
    highest = limit.broken if verdict is Verdict.BROKEN else limit.degraded
    spread = f" ± {limit.show.format(standard_error)}" if standard_error else ""
    return f"{limit.metric} {limit.show.format(value)}{spread}, limit {limit.show.format(highest)}"


def _of_predictions(record: Accuracy) -> Iterator[Reading]:
    if record.is_meaningful:
        yield KL_DIVERGENCE, record.kl_divergence, record.kl_standard_error
        yield OTHER_TOP1, 1 - record.top1_agreement, record.top1_standard_error or 0.0


def _of_outputs(record: Similarity) -> Iterator[Reading]:
    labels, ranking = record.labels, record.ranking
    if not record.is_meaningful:
        return
    if labels:
        yield LABEL_KL, labels.kl_divergence, labels.kl_standard_error or 0.0
        yield OTHER_LABEL, labels.flips, labels.flips_standard_error or 0.0
    elif not (ranking and ranking.of_pairs):
        yield OUTPUT_ERROR, record.relative_rms_error, record.error_standard_error or 0.0
    if ranking:
        yield RANKING_LOSS, 1 - ranking.ndcg10, ranking.ndcg10_standard_error or 0.0
        yield OTHER_FIRST, ranking.other_first, ranking.other_first_standard_error or 0.0


def _of_provider(record: ProviderAccuracy) -> Iterator[Reading]:
    if record.kl_divergence is not None:
        yield KL_DIVERGENCE, record.kl_divergence, record.standard_error or 0.0
        yield OTHER_TOP1, 1 - record.top1_agreement, record.top1_standard_error or 0.0
    elif record.relative_rms_error is not None:
        yield OUTPUT_ERROR, record.relative_rms_error, record.standard_error or 0.0


def _of_float_graph(record: FloatError) -> Iterator[Reading]:
    yield FLOAT_ERROR, record.largest_error, 0.0


READINGS: Mapping[type, Callable[[Any], Iterator[Reading]]] = {
    Accuracy: _of_predictions,
    Similarity: _of_outputs,
    ProviderAccuracy: _of_provider,
    FloatError: _of_float_graph,
}
