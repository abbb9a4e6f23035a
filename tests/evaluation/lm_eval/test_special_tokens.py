"""First and last tokens, file by file, as transformers finds them."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models

from quantkit.errors import InputError
from quantkit.evaluation.lm_eval.special_tokens import SpecialTokens, read_special_tokens
from quantkit.runtime.tokenizer import Text

pytestmark = pytest.mark.once
VOCABULARY = {"<s>": 1, "</s>": 2, "<eot>": 3}


def found(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    text = Text(tokenizer=Tokenizer(models.WordLevel(VOCABULARY, unk_token="<s>")), stop_ids=frozenset())
    return read_special_tokens(folder, text)


def test_the_tokenizer_config_goes_first(tmp_path):
    config = {"bos_token_id": 7, "eos_token_id": 8}
    assert found(tmp_path, config=config) == SpecialTokens(begin=7, end=8)
    named = {"bos_token": "<s>", "eos_token": {"content": "<eot>", "special": True}}
    assert found(tmp_path, special_tokens_map=named) == SpecialTokens(begin=1, end=3)
    other = {"bos_token": None, "eos_token": "</s>"}
    assert found(tmp_path, tokenizer_config=other) == SpecialTokens(begin=None, end=2)


def test_lists_absent_files_and_unknown_tokens(tmp_path):
    assert found(tmp_path) == SpecialTokens(begin=None, end=None)
    assert found(tmp_path, config={"eos_token_id": [5, 6]}) == SpecialTokens(begin=None, end=5)
    assert found(tmp_path, tokenizer_config={"eos_token": "<other>"}).end is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        found(tmp_path)
