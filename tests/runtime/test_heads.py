"""Heads of classifiers: how pairs are read, and which probabilities come of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from classifiers import change_json, save_classifier, softmax
from exporting import NOTHING, export

from quantkit.errors import InputError
from quantkit.runtime.encoder import open_encoder
from quantkit.runtime.labels import head_of, pair_rows, score
from quantkit.runtime.tokenizer import open_text

QUERY = "What is a tuple?"
TEXTS = ["A tuple cannot be changed.", "Django is a framework.", "word " * 80]


@pytest.fixture
def classifier(tmp_path):
    """Makes (the original, the float artifact as an encoder, its tokenizer)."""

    def make(num_labels=1, class_name="BertForSequenceClassification", files=None, **options):
        model, out = tmp_path / "model", tmp_path / "out"
        save_classifier(model, class_name, num_labels, **options)
        export(model, out, min_dim=NOTHING)
        for name, changes in (files or {}).items():
            change_json(out / name, **changes)
        return model, open_encoder(out), open_text(out)

    return make


def original_logits(model, *texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    run = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    rows = []
    for pair in texts:
        inputs = tokenizer(*pair, truncation=True, return_tensors="pt")
        with torch.inference_mode():
            rows.append(run(**inputs).logits[0].double().numpy())
    return np.stack(rows)


def test_pairs_are_read_as_transformers_reads_them(classifier):
    """Token types of the passage, and a passage that is cut."""
    model, encoder, text = classifier()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for passage, ids, types in zip(TEXTS, *pair_rows(encoder, text, QUERY, TEXTS), strict=True):
        read = tokenizer(QUERY, passage, truncation=True)
        assert (ids, types) == (read["input_ids"], read["token_type_ids"])
        assert sum(types) > 0
    assert len(ids) == 64


def test_scores_of_a_reranker_are_those_of_the_original(classifier):
    model, encoder, text = classifier()
    logits = original_logits(model, *((QUERY, passage) for passage in TEXTS))
    expected = [1 / (1 + np.exp(-value)) for (value,) in logits]
    np.testing.assert_allclose(score(encoder, text, TEXTS, QUERY)[:, 0], expected, atol=1e-5)
    head = head_of(encoder)
    assert head is not None
    assert head.ranks


IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {"sentence_transformers": {"activation_fn": IDENTITY}}},
        {"config.json": {"sbert_ce_default_activation_function": IDENTITY}},
        {"config_sentence_transformers.json": {"activation_fn": IDENTITY}, "modules.json": {}},
        {"config.json": {"problem_type": "regression"}},
    ],
)
def test_a_reranker_whose_files_ask_for_plain_scores(classifier, files):
    model, encoder, text = classifier(files=files)
    logits = original_logits(model, *((QUERY, passage) for passage in TEXTS))
    np.testing.assert_allclose(score(encoder, text, TEXTS, QUERY), logits, atol=1e-5)


def test_probabilities_of_a_classifier_and_names_of_its_labels(classifier):
    names = {"0": "good", "1": "bad", "2": "neither"}
    model, encoder, text = classifier(3, files={"config.json": {"id2label": names}})
    expected = [softmax(row) for row in original_logits(model, *((text,) for text in TEXTS))]
    np.testing.assert_allclose(score(encoder, text, TEXTS), expected, atol=1e-5)
    head = head_of(encoder)
    assert head is not None
    assert head.labels == ("good", "bad", "neither")


def test_labels_that_do_not_exclude_each_other(classifier):
    files = {"config.json": {"problem_type": "multi_label_classification"}}
    model, encoder, text = classifier(3, files=files)
    logits = original_logits(model, *((text,) for text in TEXTS))
    np.testing.assert_allclose(score(encoder, text, TEXTS), 1 / (1 + np.exp(-logits)), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a query and passages"),
        ({"class_name": "BertForTokenClassification"}, "labels its tokens"),
        ({"class_name": "BertModel"}, "has no labels"),
        ({"num_labels": 3, "files": {"config.json": {"id2label": []}}}, "'id2label'"),
        ({"files": {"config.json": {"sbert_ce_default_activation_function": "torch.nn.Tanh"}}}, "'Tanh'"),
    ],
)
def test_what_is_refused(classifier, options, words):
    _, encoder, text = classifier(**options)
    with pytest.raises(InputError, match=words):
        score(encoder, text, TEXTS, None if not options else QUERY)
