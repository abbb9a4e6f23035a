"""Perplexity against the algorithm of Hugging Face's documentation, written out with torch."""

from __future__ import annotations

import math
from importlib import resources

import numpy as np
import pytest
import torch
import transformers

from quantkit.evaluation.accuracy import measure_perplexity
from quantkit.model.load import open_source
from quantkit.model.reference import reference_logits
from quantkit.runtime.tokenizer import open_text

pytestmark = pytest.mark.once

NUM_TOKENS = 1500  # not a whole number of windows: the last one is short


@pytest.fixture(scope="module")
def demo():
    """(token ids of the held-out text, the model's loss with labels, its logits as quantkit reads them)."""
    source = open_source("demo")
    text = (resources.files("quantkit") / "assets" / "demo" / "evaluation.txt").read_text(encoding="utf-8")
    ids = np.array(open_text(source.folder).encode(text)[:NUM_TOKENS], np.int64)
    model = transformers.GPT2LMHeadModel.from_pretrained(source.folder, dtype=torch.float32).eval()

    def loss(inputs, labels):
        with torch.no_grad():
            return float(model(inputs, labels=labels).loss)

    return ids, loss, reference_logits(source)


def documented(ids, loss, window, stride):
    """(perplexity as the page averages it, the same with every predicted token weighing the same)."""
    inputs = torch.from_numpy(ids)[None]
    totals, counts, end_before = [0.0, 0.0], [0, 0], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        labels = inputs[:, begin:end].clone()
        labels[:, : -(end - end_before)] = -100  # what an earlier window predicted is only context
        mean = loss(inputs[:, begin:end], labels)
        page_weight = int((labels != -100).sum()) - 1
        weight = int((labels[:, 1:] != -100).sum())  # the model itself shifts labels by one
        for place, number in enumerate((page_weight, weight)):
            totals[place] += mean * number
            counts[place] += number
        end_before = end
        if end == len(ids):
            break
    assert counts[1] == len(ids) - 1 if stride < window else counts[0] == counts[1]
    return [math.exp(total / count) for total, count in zip(totals, counts, strict=True)]


@pytest.mark.parametrize(("window", "stride"), [(512, 256), (512, 512), (256, 200), (128, 64)])
def test_the_figure_is_the_documented_one(demo, window, stride):
    ids, loss, logits = demo
    found = measure_perplexity(model=logits, token_ids=ids, window=window, stride=stride, text="held out")
    page, per_token = documented(ids, loss, window, stride)
    assert found.perplexity.value == pytest.approx(per_token, rel=1e-5)
    # The page gives a window that overlaps one token less than it predicted; without overlap nothing differs.
    assert found.perplexity.value == pytest.approx(page, rel=1e-5 if stride == window else 5e-4)
