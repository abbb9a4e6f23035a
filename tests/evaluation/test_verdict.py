"""The verdict as a table: measured values on both sides of each limit, with and without a spread."""

from __future__ import annotations

import pytest

from quantkit.evaluation.measurements import (
    Accuracy,
    FloatError,
    Labels,
    Perplexity,
    ProviderAccuracy,
    ProviderRun,
    Ranking,
    Similarity,
)
from quantkit.evaluation.verdict import judge, judge_providers

pytestmark = pytest.mark.once
PERPLEXITY = Perplexity(value=20.0, standard_error=0.1)


def accuracy(kl: float, kl_error: float = 0.0, top1: float = 1.0, top1_error: float = 0.0) -> Accuracy:
    return Accuracy(
        reference=PERPLEXITY, quantized=PERPLEXITY, increase=0.0, increase_standard_error=0.0,
        kl_divergence=kl, kl_standard_error=kl_error, kl_99th_percentile=kl,
        top1_agreement=top1, top1_standard_error=top1_error, max_relative_logit_error=0.0,
        num_tokens=1000, window=100, stride=50, text="a text",
    )  # fmt: skip


def similarity(
    error: float, standard_error: float | None = None, *, is_meaningful: bool = True, **parts
) -> Similarity:
    return Similarity(
        mean_cosine=1.0, lowest_cosine=1.0, relative_rms_error=error, max_relative_error=error,
        num_windows=9, window=128, text="a text", is_meaningful=is_meaningful,
        error_standard_error=standard_error, **parts,
    )  # fmt: skip


def labels(kl: float, flips: float, kl_error: float = 0.0, flips_error: float = 0.0) -> Similarity:
    """Of a classifier, whose error of outputs does not count."""
    part = Labels(
        flips=flips, flips_standard_error=flips_error, kl_divergence=kl, kl_standard_error=kl_error,
        num_labels=157, num_compared=289,
    )  # fmt: skip
    return similarity(0.9, labels=part)


def ranking(ndcg: float, ndcg_error: float, other: float, *, of_pairs: bool = True, error=0.9) -> Similarity:
    """Of a reranker, whose error of outputs does not count, or of vectors, whose error counts too."""
    part = Ranking(
        ndcg10=ndcg, ndcg10_standard_error=ndcg_error, lowest_ndcg10=ndcg, other_first=other,
        other_first_standard_error=0.04, num_queries=40, num_passages=249, of_pairs=of_pairs,
    )  # fmt: skip
    return similarity(error, ranking=part)


def provider(kl: float | None, error: float | None = None) -> ProviderAccuracy:
    return ProviderAccuracy(
        reference="r", max_relative_logit_error=0.0, top1_agreement=1.0, num_tokens=256,
        kl_divergence=kl, relative_rms_error=error,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("record", "verdict"),
    [
        # Figures of real models, as docs/verdict.md lists them.
        pytest.param(accuracy(0.00262, top1=0.954), "faithful", id="SmolLM2 int8_block32"),
        pytest.param(accuracy(0.0194, top1=0.892), "faithful", id="SmolLM2 int8_mixed"),
        pytest.param(accuracy(0.1326, top1=0.745), "degraded", id="SmolLM2 int8_channel"),
        pytest.param(accuracy(0.2547, top1=0.693), "degraded", id="SmolLM2 int4_block32"),
        pytest.param(accuracy(0.5527, top1=0.542), "broken", id="SmolLM2 int8_channel without smoothing"),
        pytest.param(similarity(0.0384), "faithful", id="MiniLM int8_block64"),
        pytest.param(similarity(0.1123), "faithful", id="MiniLM int8_mixed"),
        pytest.param(similarity(0.1525), "degraded", id="MiniLM int8_channel"),
        pytest.param(similarity(0.3105), "degraded", id="MiniLM int4_block32"),
        pytest.param(similarity(0.83), "broken", id="an encoder with wrong positions"),
        pytest.param(labels(0.0032, 0.003, 0.0002, 0.003), "faithful", id="intents int8_mixed"),
        pytest.param(labels(0.0075, 0.035, 0.0004, 0.011), "degraded", id="intents int8_channel"),
        pytest.param(labels(0.0186, 0.073, 0.0008, 0.015), "degraded", id="intents int4_block32"),
        pytest.param(labels(0.2, 0.01), "broken", id="probabilities that thresholds no longer fit"),
        pytest.param(labels(0.001, 0.3, 0, 0.02), "broken", id="other labels alone"),
        pytest.param(ranking(0.9855, 0.0021, 0.025), "faithful", id="order of int8_mixed"),
        pytest.param(ranking(0.9779, 0.0033, 0.025), "degraded", id="order of int8_channel"),
        pytest.param(ranking(0.72, 0.01, 0.92), "broken", id="twelve passages in any order"),
        pytest.param(ranking(0.99, 0.002, 0.2), "degraded", id="first passages alone"),
        pytest.param(ranking(1, 0, 0, of_pairs=False, error=0.2), "degraded", id="vectors in the same order"),
        # A value beyond a limit by less than two standard errors is not.
        pytest.param(accuracy(0.06, 0.006), "faithful", id="0.06 within the spread"),
        pytest.param(accuracy(0.06, 0.004), "degraded", id="0.06 beyond the spread"),
        pytest.param(accuracy(0.6, 0.06), "degraded", id="0.6 within the spread"),
        pytest.param(similarity(0.15, 0.02), "faithful", id="15% within the spread"),
        pytest.param(accuracy(0.0, top1=0.7), "degraded", id="top-1 alone"),
        pytest.param(accuracy(0.0, top1=0.7, top1_error=0.06), "faithful", id="top-1 within the spread"),
        pytest.param(accuracy(0.0, top1=0.4), "broken", id="top-1 of fewer than half"),
        pytest.param(provider(0.001), "faithful", id="a provider's logits"),
        pytest.param(provider(0.9), "broken", id="wrong logits of a provider"),
        pytest.param(provider(None, 0.7), "broken", id="wrong states of a provider"),
        pytest.param(FloatError(largest_error=2e-3, num_tokens=9), "broken", id="a wrong float graph"),
    ],
)
def test_the_verdict_on_a_record(record, verdict):
    judgement = judge(record)
    assert judgement is not None
    assert judgement.verdict == verdict
    assert bool(judgement.reasons) == (verdict != "faithful"), "each limit that is exceeded is a line"


def test_the_worst_record_decides_and_every_limit_has_its_line():
    judgement = judge(FloatError(largest_error=0.83, num_tokens=9), accuracy(0.1, top1=0.5), None)
    assert judgement is not None
    assert judgement.verdict == "broken"
    assert judgement.reasons == (
        "difference of the float32 graph from transformers 0.83, limit 0.001",
        "KL divergence in nats 0.1, limit 0.05",
        "tokens with another top-1 prediction 50.0%, limit 20.0%",
    )


@pytest.mark.parametrize(
    "records",
    [(), (None,), (similarity(0.9, is_meaningful=False),), (FloatError(largest_error=1e-6, num_tokens=9),)],
)
def test_no_verdict_without_a_comparison_of_the_quantized_model(records):
    assert judge(*records) is None


def test_providers_are_named_in_the_lines():
    runs = [
        ProviderRun(provider="cpu", outcome="ran", accuracy=provider(0.001)),
        ProviderRun(provider="qnn", outcome="ran", accuracy=provider(0.9)),
        ProviderRun(provider="cuda", outcome="failed"),
    ]
    judgement = judge_providers(runs)
    assert judgement is not None
    assert (judgement.verdict, judgement.reasons) == (
        "broken",
        ("qnn: KL divergence in nats 0.9, limit 0.5",),
    )
    assert judge_providers(runs[2:]) is None
