"""Files of sentence-transformers: what they say, in either form, and what is refused in one line."""

from __future__ import annotations

import json

import pytest
from sentences import save_sentence_model, write

from quantkit.errors import InputError
from quantkit.model.inspect import inspect
from quantkit.model.sentence import NORMALIZE, Dense

POOLING, MODULES, DENSE = "1_Pooling/config.json", "modules.json", "2_Dense/config.json"
SETTINGS, TEXTS = "config_sentence_transformers.json", "sentence_bert_config.json"


@pytest.fixture
def folder(tmp_path):
    save_sentence_model(tmp_path, ("cls", "mean"), ((8, True, "Tanh"), "Normalize"))
    return tmp_path


def change(path, **changes):
    content = json.loads(path.read_text())
    write(path, {**content, **changes})


def test_what_the_files_say(folder):
    change(folder / SETTINGS, prompts={"query": "query: ", "none": None}, default_prompt_name="query")
    read = inspect(folder).sentence
    assert (read.poolings, read.max_tokens, read.lowercases) == (("cls", "mean"), 32, False)
    dense = Dense(name="2_Dense", in_features=64, out_features=8, has_bias=True, activation="Tanh")
    assert read.steps == (dense, NORMALIZE)
    assert (read.prompts, read.default_prompt) == ({"query": "query: "}, "query")


@pytest.mark.parametrize(
    ("content", "poolings"),
    [
        ({"pooling_mode": "lasttoken", "embedding_dimension": 32}, ("lasttoken",)),
        ({"pooling_mode": ["mean", "cls"], "embedding_dimension": 32}, ("mean", "cls")),
        ({"embedding_dimension": 32}, ("mean",)),
        ({"pooling_mode": "max", "pooling_mode_max_tokens": True}, ("max",)),
    ],
)
def test_the_newer_form_of_a_pooling(folder, content, poolings):
    write(folder / POOLING, content)
    modules = json.loads((folder / MODULES).read_text())[:2]
    write(folder / MODULES, modules)
    assert inspect(folder).sentence.poolings == poolings


def test_a_classifier_of_two_texts_and_a_plain_folder_have_no_pooling(folder):
    change(folder / SETTINGS, model_type="CrossEncoder")
    assert inspect(folder).sentence is None
    (folder / MODULES).unlink()
    assert inspect(folder).sentence is None


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        (
            POOLING,
            {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False},
            "no pooling is chosen",
        ),
        (POOLING, {"pooling_mode_median_tokens": True}, "'pooling_mode_median_tokens' is no known pooling"),
        (POOLING, {"pooling_mode_mean_tokens": "yes"}, "'pooling_mode_mean_tokens' is no known pooling"),
        (POOLING, {"pooling_mode": "max"}, "'pooling_mode' is 'max', and the flags say cls, mean"),
        (POOLING, {"pooling_mode": [["max"]]}, r"\['max'\]' is no known pooling"),
        (POOLING, {"word_embedding_dimension": 7}, "the pooling reads 7 values of a token; .*allowed: 32"),
        (POOLING, {"word_embedding_dimension": "32"}, "'word_embedding_dimension' is '32'"),
        (DENSE, {"in_features": 32}, "'2_Dense' reads 32 values; .*allowed: 64"),
        (DENSE, {"in_features": 0}, "'in_features' and 'out_features' are needed"),
        (DENSE, {"activation_function": "evil.Code"}, "the activation 'evil.Code'"),
        (DENSE, {"module_output_name": "token_embeddings"}, "'module_output_name' is 'token_embeddings'"),
        (SETTINGS, {"default_prompt_name": "query"}, "'default_prompt_name' is 'query'"),
        (SETTINGS, {"prompts": {"query": 3}}, "the prompt 'query' is 3"),
    ],
)
def test_files_that_contradict_each_other(folder, file, changes, said):
    change(folder / file, **changes)
    with pytest.raises(InputError, match=said) as refused:
        inspect(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("types", "said"),
    [
        (
            ["models.Transformer", "models.WordWeights"],
            "the module 'sentence_transformers.models.WordWeights'",
        ),
        (["models.Transformer"], "its modules are Transformer"),
        (["models.Pooling", "models.Transformer"], "its modules are Pooling, Transformer"),
        ([], "its modules are none"),
    ],
)
def test_modules_that_are_not_known(folder, types, said):
    paths = ["", "1_Pooling"]
    write(
        folder / MODULES,
        [
            {"type": f"sentence_transformers.{kind}", "path": path}
            for kind, path in zip(types, paths, strict=False)
        ],
    )
    with pytest.raises(InputError, match=said):
        inspect(folder)


@pytest.mark.parametrize("content", ["", "{}x", "3", "[3]", '[{"type": "a"}]', "[" * 5000])
def test_a_damaged_list_of_modules(folder, content):
    (folder / MODULES).write_text(content)
    with pytest.raises(InputError, match=r"modules\.json"):
        inspect(folder)


@pytest.mark.parametrize("place", ["../elsewhere", "..", ".", "/etc", "a\\b", "a\0", "x" * 400])
def test_a_path_outside_of_the_folder(folder, place):
    """Files beside a module are copied to the same place in the artifact."""
    modules = json.loads((folder / MODULES).read_text())
    modules[1]["path"] = place
    write(folder / MODULES, modules)
    with pytest.raises(InputError, match="the path '") as refused:
        inspect(folder)
    assert len(str(refused.value)) < 500


def test_a_prompt_that_is_not_pooled(folder):
    change(folder / SETTINGS, prompts={"query": "query: "})
    change(folder / POOLING, include_prompt=False)
    with pytest.raises(InputError, match="'include_prompt' is false"):
        inspect(folder)
