"""Classifiers and rerankers as a user has them: measured, scored, and opened by other tools."""

from __future__ import annotations

import json

import numpy as np
import pytest
from classifiers import change_json, save_classifier
from commands import quantkit, refused

import quantkit as api
from quantkit.report.stored import read_report

OPTIONS = ("--min-dim", "1", "--scheme", "int8_block32")
FAST = ("--no-eval",)
QUERY, TEXTS = "What is a tuple?", ("A tuple cannot be changed.", "Django is a framework.", "Why?")
CLASSES = {"reranker": 1, "classifier": 3, "tagger": 5}
MODULES = '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]'
TRANSFORMER = {  # as sentence-transformers 5.7 writes a CrossEncoder
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
PARTS = {"reranker": "ranking", "classifier": "labels", "tagger": "labels"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> (the original, the artifact), with accuracy measured on few tokens."""
    made = {}
    for kind, num_labels in CLASSES.items():
        folder = tmp_path_factory.mktemp(kind)
        of = "Token" if kind == "tagger" else "Sequence"
        save_classifier(folder / "model", f"BertFor{of}Classification", num_labels)
        if kind == "reranker":
            settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
            change_json(folder / "model/config_sentence_transformers.json", **settings)
            (folder / "model/modules.json").write_text(MODULES)
            change_json(folder / "model/sentence_bert_config.json", **TRANSFORMER)
        (folder / "recipe.yaml").write_text("measure: {latency: false, memory: false, max_tokens: 2000}\n")
        recipe = ("--recipe", str(folder / "recipe.yaml"))
        done = quantkit("quantize", str(folder / "model"), *OPTIONS, *recipe, "-o", str(folder / "out"))
        assert done.returncode == 0, done.stderr
        made[kind] = (folder / "model", folder / "out")
    return made


@pytest.mark.parametrize("kind", CLASSES)
def test_the_report_measures_what_its_users_see(folders, kind):
    _, out = folders[kind]
    document = json.loads((out / "report.json").read_text())
    part = document["similarity"][PARTS[kind]]
    assert document["judgement"]["verdict"] != "broken"
    assert read_report(out).similarity == api.load(out).report.similarity
    page, card = (out / "report.md").read_text(), (out / "README.md").read_text()
    html = (out / "report.html").read_text()
    if kind == "reranker":
        assert part["of_pairs"]
        assert part["num_passages"] == 12
        assert 0.9 < part["ndcg10"] <= 1
        assert "nDCG@10 of the reference's ranking" in page
        assert "nDCG@10 of" in html
        assert 'pipeline_tag: "text-ranking"' in card
    else:
        assert part["num_labels"] == CLASSES[kind]
        assert part["of_tokens"] == (kind == "tagger")
        assert 0 < part["kl_divergence"] < 1e-2
        assert "other labels" in page
        assert "Other labels" in html
        assert f'pipeline_tag: "{"token" if kind == "tagger" else "text"}-classification"' in card
    assert "cosine" not in page


def test_eval_measures_labels_on_the_lines_of_a_file(folders, tmp_path):
    _, out = folders["classifier"]
    (tmp_path / "lines.txt").write_text("A good day.\nA bad day.\n\nNo day at all.\n")
    done = quantkit("eval", str(out), "--text", str(tmp_path / "lines.txt"), "--json")
    assert done.returncode == 0, done.stderr
    similarity = json.loads(done.stdout)["similarity"]
    assert similarity["text"] == "lines.txt"
    assert similarity["labels"]["num_compared"] == 3


def test_damaged_weights_of_a_classifier_are_broken(folders, tmp_path):
    """Another model's labels."""
    _, out = folders["classifier"]
    save_classifier(tmp_path / "other", "BertForSequenceClassification", 3, intermediate_size=40)
    done = quantkit("eval", str(out), "--reference", str(tmp_path / "other"))
    assert done.returncode == 1
    assert "KL divergence of labels in nats" in done.stdout


def test_scores_and_labels_on_the_command_line(folders):
    _, out = folders["reranker"]
    artifact = api.load(out)
    scores = artifact.score(TEXTS, query=QUERY)
    assert scores.shape == (3, 1)
    alone = [artifact.score(text, query=QUERY)[0, 0] for text in TEXTS]
    np.testing.assert_allclose(scores[:, 0], alone, atol=1e-5)
    lines = quantkit("score", str(out), *TEXTS, "--query", QUERY).stdout.splitlines()
    best_first = [TEXTS[index] for index in np.argsort(-scores[:, 0])]
    assert [line.partition(": ")[2] for line in lines] == best_first
    _, out = folders["classifier"]
    document = json.loads(quantkit("score", str(out), *TEXTS, "--json").stdout)
    assert document["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    np.testing.assert_allclose(np.sum(document["scores"], axis=1), 1, atol=1e-6)
    line = quantkit("score", str(out), TEXTS[0]).stdout
    assert line == f"{max(document['scores'][0]):.4f} LABEL_{np.argmax(document['scores'][0])}: {TEXTS[0]}\n"


def test_what_is_refused(folders, tmp_path):
    assert "'quantkit score'" in refused("encode", str(folders["classifier"][1]), "a")
    assert "next: give --query" in refused("score", str(folders["reranker"][1]), "a")
    assert "pipeline('token-classification')" in refused("score", str(folders["tagger"][1]), "a")
    decoder = tmp_path / "decoder"
    save_classifier(decoder, "LlamaForSequenceClassification", 2, family="llama", has_padding=False)
    line = refused("quantize", str(decoder), *OPTIONS, *FAST, "-o", str(tmp_path / "out"))
    assert "'pad_token_id'" in line
    assert "config.json" in line


try:
    from optimum.onnxruntime import ORTModelForSequenceClassification, ORTModelForTokenClassification
except ImportError as error:
    why_no_optimum = str(error)
else:
    why_no_optimum = ""


@pytest.mark.skipif(bool(why_no_optimum), reason=f"optimum's runtime does not import here: {why_no_optimum}")
def test_optimum_and_pipelines_open_classifiers(folders):
    from transformers import AutoTokenizer, pipeline

    _, out = folders["classifier"]
    opened = ORTModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    (answers,) = pipeline("text-classification", model=opened[0], tokenizer=opened[1], top_k=None)([TEXTS[0]])
    ours = api.load(out).score(TEXTS[0])[0]
    theirs = {answer["label"]: answer["score"] for answer in answers}
    np.testing.assert_allclose([theirs[f"LABEL_{number}"] for number in range(3)], ours, atol=1e-6)
    _, out = folders["tagger"]
    opened = ORTModelForTokenClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    tagged = pipeline("token-classification", model=opened[0], tokenizer=opened[1])(TEXTS[0])
    ids = api.load(out).tokenizer.encode(TEXTS[0])
    best = api.load(out).logits(ids)[0].argmax(axis=-1)[1:-1]
    assert [token["entity"] for token in tagged] == [f"LABEL_{number}" for number in best]


def test_cross_encoder_gives_the_same_scores(folders):
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed here"
    )
    _, out = folders["reranker"]
    model = sentence_transformers.CrossEncoder(str(out), backend="onnx")
    theirs = model.predict([(QUERY, text) for text in TEXTS])
    np.testing.assert_allclose(theirs, api.load(out).score(TEXTS, query=QUERY)[:, 0], atol=1e-6)
