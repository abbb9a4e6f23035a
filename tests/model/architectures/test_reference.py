"""The configurable decoder as transformers sees it: saved, loaded, generated from, trained, streamed."""

from __future__ import annotations

import pytest
import torch
from exporting import build_tiny
from transformers import AutoModelForCausalLM

from quantkit.errors import InputError
from quantkit.model.architectures.reference import FFNS, ReferenceConfig, ReferenceForCausalLM, make_ffn
from quantkit.model.load import make_config, model_class, open_source

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
IDS = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(0))
PLACEMENTS = pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])


def build(**changes):
    return build_tiny("ReferenceForCausalLM", {**SIZES, **changes})


@PLACEMENTS
@pytest.mark.parametrize("is_tied", [False, True])
def test_what_is_saved_is_what_is_loaded(placement, is_tied, tmp_path):
    model = build(norm_placement=placement, tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is ReferenceForCausalLM is model_class("ReferenceForCausalLM")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == is_tied
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert make_config(open_source(str(tmp_path))).to_dict()["norm_placement"] == placement


@PLACEMENTS
def test_generation_through_the_cache_is_one_pass_over_all_of_it(placement):
    """Token by token, alone and padded on the left, against the whole text at once."""
    model = build(norm_placement=placement)
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    made = model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    alone = model.generate(IDS[1:, 4:], max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(made[1, 4:], alone[0])
    whole = model(made[:1], use_cache=False).logits.argmax(-1)
    assert torch.equal(whole[0, 8:-1], made[0, 9:])
    assert torch.equal(model(IDS, logits_to_keep=2).logits, model(IDS).logits[:, -2:])


@PLACEMENTS
def test_no_token_sees_a_later_one(placement):
    model = build(norm_placement=placement).double()
    changed = IDS.clone()
    changed[:, 5:] = 7
    assert torch.equal(model(IDS).logits[:, :5], model(changed).logits[:, :5])
    assert not torch.allclose(model(IDS).logits[:, 5:], model(changed).logits[:, 5:])


def test_the_loss_is_the_cross_entropy_of_the_next_token_and_trains():
    model = build()
    logits = model(IDS).logits[:, :-1].log_softmax(-1)
    wanted = -logits.gather(-1, IDS[:, 1:, None]).mean()
    loss = model(IDS, labels=IDS).loss
    torch.testing.assert_close(loss, wanted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        made = model(IDS, labels=IDS).loss
        made.backward()
        optimizer.step()
    assert made < 0.3 * loss


def test_another_model_may_bring_its_own_ffn():
    made = []

    def twice_as_wide(config):
        made.append(FFNS["standard"](config))
        return made[-1]

    model = ReferenceForCausalLM(ReferenceConfig(**SIZES), twice_as_wide)
    assert [layer.mlp for layer in model.model.layers] == made
    assert make_ffn(ReferenceConfig(**SIZES, ffn_kind="none")) is None


def test_a_config_that_means_nothing_is_refused_when_its_folder_is_opened(tmp_path):
    build().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"rms_norm"', '"batch_norm"'))
    with pytest.raises(InputError, match="layer_norm, rms_norm") as refused:
        make_config(open_source(str(tmp_path)))
    assert "transformers refuses" not in str(refused.value)
