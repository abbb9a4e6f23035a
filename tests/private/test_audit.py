"""The attack by public weights: it finds what it must find, by chance nothing, and tells a wrong key."""

from __future__ import annotations

import numpy as np
import pytest
from exporting import build_tiny
from protecting import ALL, split

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.private import audit as audit_module
from quantkit.private.audit import (
    attack,
    audit,
    nearest,
    nearest_in_heads,
    sorted_values,
    unit_rows,
)
from quantkit.recipe import Recipe, override

pytestmark = pytest.mark.once
RANDOM = np.random.default_rng(0)


def test_matching_finds_rows_again_and_unrelated_ones_by_chance_alone():
    known = RANDOM.normal(size=(300, 64)).astype(np.float32)
    order = RANDOM.permutation(300)
    noisy = known[order] * RANDOM.uniform(0.5, 2, (300, 1)) + 0.05 * RANDOM.normal(size=known.shape)
    assert (nearest(unit_rows(noisy), unit_rows(known)) == order).all()
    unrelated = RANDOM.normal(size=known.shape).astype(np.float32)
    assert (nearest(unit_rows(unrelated), unit_rows(known)) == order).mean() < 0.03


def test_sorted_values_do_not_see_the_order_of_columns():
    known = RANDOM.normal(size=(200, 512)).astype(np.float32)
    order = RANDOM.permutation(200)
    shuffled = known[order][:, RANDOM.permutation(512)]
    assert (nearest(sorted_values(shuffled), sorted_values(known)) == order).all()
    assert (nearest(unit_rows(shuffled), unit_rows(known)) == order).mean() < 0.05, "directions do"


def test_values_are_looked_for_within_their_head():
    known = np.tile(RANDOM.normal(size=(8, 32)), (3, 1)).astype(np.float32)  # the same in every head
    orders = [RANDOM.permutation(8) + 8 * head for head in range(3)]
    found = nearest_in_heads(unit_rows(known[np.concatenate(orders)]), unit_rows(known), 8)
    assert (found == np.concatenate(orders)).all()


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    tiny = {**FAMILIES["llama"].tiny, **sizes}
    build_tiny("LlamaForCausalLM", tiny).save_pretrained(folder / "model")
    return folder, split(folder / "model", folder, scheme="int8_block64", makes_whole=False)


def recipe_of(folder):
    return override(
        Recipe(model=str(folder)), {"scheme": "int8_block64", "transforms": [], "select.min_dim": 1}
    )


def test_the_attack_recovers_everything_and_the_audit_says_so(attacked):
    """It is a warning that this holds. Were it ever to fail, the docs would have to be written anew."""
    folder, pair = attacked
    found = audit(recipe_of(folder / "model"), host=pair.host, key_file=pair.key_file, permutes=ALL)
    assert [each.space for each in found if each.is_given] == ["residual", "tokens", "ffn", "values"]
    cases = {(each.weights, each.permutes) for each in found}
    assert cases == {
        ("as given", ALL),
        *((weights, names) for weights in ("float32", "int8_block64") for names in (ALL, ("residual",))),
    }
    for each in found:
        assert each.by_known_rows > 0.99, each
        assert each.positions == {
            "residual": 128,
            "ffn": 2 * FAMILIES["llama"].tiny["intermediate_size"],
            "tokens": FAMILIES["llama"].tiny["vocab_size"],
        }.get(each.space, 2 * 64)
    in_float = [each for each in found if each.weights == "float32"]
    assert all(each.by_sorted_values > 0.95 for each in in_float)


def test_a_wrong_key_or_permute_is_no_failed_attack(attacked, tmp_path):
    folder, pair = attacked
    model = folder / "model"
    other = split(model, tmp_path, scheme="int8_block64", makes_whole=False)
    with pytest.raises(InputError, match="not in the order of this key"):
        audit(recipe_of(model), host=pair.host, key_file=other.key_file, permutes=ALL)
    (tmp_path / "plain").mkdir()
    plain = split(model, tmp_path / "plain", permutes=("residual",), makes_whole=False)
    with pytest.raises(InputError, match="not in the order of this key"):
        audit(recipe_of(model), host=plain.host, key_file=plain.key_file, permutes=ALL)
    with pytest.raises(InputError, match="side"):
        audit(recipe_of(model), host=pair.client, key_file=pair.key_file, permutes=ALL)


def test_another_models_weights_recover_nothing(attacked, monkeypatch):
    """The same shapes with other numbers: what the attack finds, it finds in the weights."""
    folder, pair = attacked
    source, model_map = open_source(str(folder / "model")), inspect(str(folder / "model"))
    others = open_weights(source, model_map, random_weights=True, seed=5)
    monkeypatch.setattr(audit_module, "MIN_AGREEMENT", -1.0)  # which would say that this key is wrong
    found = attack(model_map, others, pair.host / "model.onnx", pair.key, ALL, weights="others")
    for each in found:
        assert each.by_known_rows < 0.1, each
        # A prompt's features are made from the given weights, whatever the host's are.
        assert each.by_sorted_values < 0.1 or each.space == "tokens", each
    assert len(found) == 4
