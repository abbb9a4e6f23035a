"""A provider's logits beside a reference's: against torch in float64, and against formulas written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.evaluation.agreement import agreement

pytestmark = pytest.mark.once


def case(seed: int, size: float, positions: int = 6) -> dict:
    random = np.random.default_rng(seed)
    reference = random.normal(size=(3, positions, 17)).astype(np.float32) * 4
    made = reference + random.normal(size=reference.shape).astype(np.float32) * np.float32(size)
    return {
        "outputs_WPV": made,
        "reference_WPV": reference,
        "ids_WS": random.integers(0, 17, (3, 6)),
        "positions": list(range(positions)),
        "reference": "a float model",
    }


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), size=st.sampled_from([0.0, 0.01, 0.3, 5.0]))
def test_a_decoder_is_measured_as_torch_measures_it(seed: int, size: float) -> None:
    given_ = case(seed, size)
    found = agreement(**given_, predicts_tokens=True)
    made, reference = (
        torch.log_softmax(torch.from_numpy(given_[key]).double(), -1)
        for key in ("outputs_WPV", "reference_WPV")
    )
    divergence = torch.nn.functional.kl_div(made, reference, log_target=True, reduction="none").sum(-1).mean()
    assert found.kl_divergence == pytest.approx(float(divergence), rel=1e-9, abs=1e-12)
    targets = torch.from_numpy(given_["ids_WS"])[:, 1:, None]
    losses = [-each[:, :-1].gather(-1, targets).mean() for each in (made, reference)]
    assert found.perplexity_ratio == pytest.approx(float(torch.exp(losses[0] - losses[1])), rel=1e-9)
    difference = given_["outputs_WPV"].astype(np.float64) - given_["reference_WPV"]
    expected = np.abs(difference).max() / np.abs(given_["reference_WPV"]).max()
    assert found.max_relative_logit_error == pytest.approx(expected, rel=1e-6)
    assert found.num_tokens == 18 and found.lowest_cosine is None
    if size == 0:
        assert (found.top1_agreement, found.perplexity_ratio, found.kl_divergence) == (1, 1, 0)


def test_only_the_positions_that_were_given_count() -> None:
    given_ = case(3, 0.3)
    chosen = [1, 4, 5]
    part = {key: given_[key][:, chosen] for key in ("outputs_WPV", "reference_WPV")}
    found = agreement(**{**given_, **part, "positions": chosen}, predicts_tokens=True)
    made, reference = (
        torch.log_softmax(torch.from_numpy(given_[key]).double(), -1)
        for key in ("outputs_WPV", "reference_WPV")
    )
    targets = torch.from_numpy(given_["ids_WS"])[:, [2, 5], None]  # the last position predicts no known token
    losses = [-each[:, [1, 4]].gather(-1, targets).mean() for each in (made, reference)]
    assert found.perplexity_ratio == pytest.approx(float(torch.exp(losses[0] - losses[1])), rel=1e-9)
    last = {key: given_[key][:, [5]] for key in ("outputs_WPV", "reference_WPV")}
    assert agreement(**{**given_, **last, "positions": [5]}, predicts_tokens=True).perplexity_ratio is None


def test_an_encoder_is_measured_by_its_least_cosine() -> None:
    given_ = case(4, 0.2)
    found = agreement(**given_, predicts_tokens=False)
    made, reference = (given_[key].astype(np.float64).mean(1) for key in ("outputs_WPV", "reference_WPV"))
    cosines = [a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in zip(made, reference, strict=True)]
    assert found.lowest_cosine == pytest.approx(min(cosines), rel=1e-12)
    assert found.kl_divergence is None and found.perplexity_ratio is None
