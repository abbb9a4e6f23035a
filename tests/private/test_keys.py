"""The key's file and its silence: owner only, never written over, for one model, and shown by nothing."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
import traceback

import numpy as np
import pytest
from exporting import build_tiny

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.private.keys import Key, create_key, open_key
from quantkit.private.protect import fingerprint

pytestmark = pytest.mark.once
MODEL = "ab" * 32


def test_a_new_key_is_its_owners_alone_whatever_the_mask(tmp_path):
    before = os.umask(0)
    try:
        create_key(tmp_path / "a.key", MODEL)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600
    with pytest.raises(InputError, match="File exists"):
        create_key(tmp_path / "a.key", MODEL)
    one, other = (create_key(tmp_path / name, MODEL) for name in ("b.key", "c.key"))
    assert len(one.secret) == 32
    assert one.secret != other.secret
    assert open_key(tmp_path / "b.key", MODEL) == one


def test_a_key_shows_itself_nowhere(tmp_path):
    key = create_key(tmp_path / "a.key", MODEL)
    shown = [repr(key), str(key), f"{key}", repr([key]), repr({"key": key})]
    try:
        {}[key]
    except KeyError:
        shown.append(traceback.format_exc())
    for text in shown:
        assert key.secret.hex() not in text
        assert repr(key.secret) not in text
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)
    with pytest.raises(TypeError, match="not pickled"):
        copy.copy(key)


def test_a_key_for_another_model_is_refused_by_name(tmp_path):
    create_key(tmp_path / "a.key", MODEL)
    with pytest.raises(InputError, match=r"the key is for another model.*cdcdcd.*abab"):
        open_key(tmp_path / "a.key", "cd" * 32)


def test_a_key_that_others_may_read_is_refused(tmp_path):
    create_key(tmp_path / "a.key", MODEL)
    (tmp_path / "a.key").chmod(0o640)
    with pytest.raises(InputError, match=r"mode 0640.*chmod 600"):
        open_key(tmp_path / "a.key", MODEL)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: {**document, "key": document["key"][:-2]},
        lambda document: {**document, "key": "zz" * 32},
        lambda document: {**document, "key": 7},
        lambda document: {**document, "version": 2},
        lambda document: {**document, "format": "x"},
        lambda document: {key: value for key, value in document.items() if key != "model"},
        lambda document: [document],
        lambda document: {**document, "more": "x" * 5000},
    ],
)
def test_a_damaged_key_is_refused_without_telling_it(change, tmp_path):
    path = tmp_path / "a.key"
    key = create_key(path, MODEL)
    path.write_text(json.dumps(change(json.loads(path.read_text()))), encoding="utf-8")
    with pytest.raises(InputError, match=r"damaged|not a key file|version") as raised:
        open_key(path, MODEL)
    assert key.secret.hex()[:-2] not in str(raised.value)


def test_fingerprints_tell_models_apart_and_forget_where_they_lay(tmp_path):
    def print_of(folder, change=None):
        model = build_tiny("GPT2LMHeadModel", dict(FAMILIES["gpt2"].tiny))
        if change:
            change(model)
        model.save_pretrained(folder)
        source = open_source(str(folder))
        model_map = inspect_source(source)
        return fingerprint(source.config, model_map, open_weights(source, model_map, random_weights=False))

    def nudge(model):
        model.transformer.h[1].mlp.c_proj.bias.data[3] += 1e-3

    plain = print_of(tmp_path / "a")
    assert plain == print_of(tmp_path / "b")
    assert plain != print_of(tmp_path / "c", nudge)
    assert len(bytes.fromhex(plain)) == 32


def test_a_keys_orders_are_the_spaces_own():
    key = Key(secret=bytes(32), model=MODEL)
    assert (key.order("a", 50) != key.order("b", 50)).any()
    assert (np.sort(key.order("a", 50)) == np.arange(50)).all()
