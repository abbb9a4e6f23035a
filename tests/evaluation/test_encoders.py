"""The order of passages by sentence embeddings, against pooling in numpy and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from commands import quantkit
from sentences import reference, save_sentence_model
from test_ranking import naive_ndcg, ranked

import quantkit as api
from quantkit.evaluation.text import bundled_questions

pytestmark = pytest.mark.once
MAX_TOKENS = 3000
PROMPTS = {"prompts": {"query": "find: ", "passage": "text: "}, "default_prompt_name": "passage"}


def test_questions_and_passages_behind_their_prompts(tmp_path):
    save_sentence_model(tmp_path / "model", ("mean",), ("Normalize",), settings=PROMPTS)
    (tmp_path / "recipe.yaml").write_text(
        f"measure: {{latency: false, memory: false, max_tokens: {MAX_TOKENS}}}\n"
    )
    options = (
        "--min-dim",
        "1",
        "--scheme",
        "int4_block32",
        "--fit",
        "rtn",
        "--recipe",
        str(tmp_path / "recipe.yaml"),
    )
    done = quantkit("quantize", str(tmp_path / "model"), *options, "-o", str(tmp_path / "out"))
    assert done.returncode in (0, 1), done.stderr
    artifact = api.load(tmp_path / "out")
    similarity = artifact.report.similarity
    assert similarity is not None
    ranking = similarity.ranking
    passages, questions = bundled_questions()
    texts = [f"find: {question}" for question, _ in questions] + [f"text: {passage}" for passage in passages]
    rows, left = [], MAX_TOKENS
    for text in texts:
        rows.append(artifact.tokenizer.encode(text)[:32])
        left -= len(rows[-1])
        if left < 0:
            rows.pop()
            break
    ids = np.zeros((len(rows), 32), np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
    originals = reference(tmp_path / "model", ids, mask, ("mean",), ("Normalize",))
    quantized = np.stack([artifact.session.vectors(np.array([row]))[0] for row in rows])
    count = len(questions)
    scores = [list(vectors[:count] @ vectors[count:].T) for vectors in (originals, quantized)]
    expected = [naive_ndcg(*pair) for pair in zip(*scores, strict=True)]
    assert ranking.ndcg10 == pytest.approx(np.mean(expected), abs=2e-3)  # close scores may change places
    assert ranking.ndcg10 < 0.999
    others = [ranked(a)[0] != ranked(b)[0] for a, b in zip(*scores, strict=True)]
    assert ranking.other_first == pytest.approx(np.mean(others), abs=0.03)
    assert (ranking.num_queries, ranking.num_passages) == (count, len(rows) - count)
