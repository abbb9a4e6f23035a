"""The output `sentence_embedding` against transformers' states pooled by numpy in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
from exporting import NOTHING, error, export
from sentences import ACTIVATIONS, LEGACY, reference, save_sentence_model

from quantkit.export.sentence import ACTIVATION_OPS, POOLINGS
from quantkit.model import sentence
from quantkit.runtime.encoder import encode, open_encoder

IDS = np.random.default_rng(0).integers(3, 60, (4, 12))
MASK = np.ones_like(IDS)
MASK[1, 7:] = MASK[3, 1:] = 0
LEFT = MASK.copy()
LEFT[2, :5] = 0  # padding in front
ALL = tuple(LEGACY)
DENSES = [(8, True, activation) for activation in ACTIVATIONS]
CASES = [
    *(pytest.param((mode,), (), id=mode) for mode in ALL),
    *(pytest.param((mode,), ("Normalize",), id=f"{mode}, unit") for mode in ("mean", "max")),
    pytest.param(ALL, (), id="all side by side"),
    pytest.param(
        ("cls", "mean"), ((8, False, "Tanh"), (5, True, "Identity"), "Normalize"), id="two projections"
    ),
    *(pytest.param(("mean",), (dense, "Dropout"), id=dense[2]) for dense in DENSES),
]


@pytest.mark.parametrize("mask", [MASK, LEFT], ids=["behind", "in front"])
@pytest.mark.parametrize(("poolings", "steps"), CASES)
def test_every_pooling_and_step(poolings, steps, mask, tmp_path):
    save_sentence_model(tmp_path / "model", poolings, steps)
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    encoder = open_encoder(tmp_path / "out", threads=1)
    outputs = encode(encoder, IDS, mask)
    expected = reference(tmp_path / "model", IDS, mask, poolings, steps)
    assert list(outputs) == ["last_hidden_state", "pooler_output", "sentence_embedding"]
    assert error(outputs["sentence_embedding"], expected).relative < 1e-5


@pytest.mark.parametrize(
    ("class_name", "family"), [("RobertaForMaskedLM", "roberta"), ("BertForMaskedLM", "bert")]
)
def test_a_head_in_front_of_the_pooling_is_left_out(class_name, family, tmp_path):
    save_sentence_model(tmp_path / "model", ("mean",), class_name=class_name, family=family, pad_token_id=1)
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    ids = np.where(MASK, IDS, 1)
    made = encode(open_encoder(tmp_path / "out", threads=1), ids, MASK)["sentence_embedding"]
    assert error(made, reference(tmp_path / "model", ids, MASK, ("mean",))).relative < 1e-5


def test_padding_costs_a_row_nothing(tmp_path):
    save_sentence_model(tmp_path / "model", ("weightedmean", "max"), ("Normalize",))
    export(tmp_path / "model", tmp_path / "out", scheme="int8_block32")
    encoder = open_encoder(tmp_path / "out", threads=1)
    together = encode(encoder, IDS, MASK)["sentence_embedding"]
    for row, kept in enumerate(MASK):
        alone = encode(encoder, IDS[row : row + 1, : kept.sum()])["sentence_embedding"][0]
        assert error(together[row], alone).relative < 1e-5


def test_the_tables_name_the_same():
    assert set(POOLINGS) == set(sentence.POOLING_KEYS.values()) == set(LEGACY)
    assert set(ACTIVATION_OPS) == set(sentence.ACTIVATIONS) == set(ACTIVATIONS)


def test_files_of_sentence_transformers_go_with_the_graph(tmp_path):
    save_sentence_model(tmp_path / "model", ("mean",), ((8, True, "Tanh"), "Normalize"))
    export(tmp_path / "model", tmp_path / "out")
    for name in ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
                 "sentence_bert_config.json", "config_sentence_transformers.json"):  # fmt: skip
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    settings = open_encoder(tmp_path / "out").metadata["sentence"]
    assert json.dumps(settings) == json.dumps(
        {"default_prompt": None, "lowercases": False, "max_tokens": 32, "prompts": {}}
    )
