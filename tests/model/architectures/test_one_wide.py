"""The encoder-decoder with one wide FFN as transformers sees it, and as the map does."""

from __future__ import annotations

import pytest
import torch
from exporting import build_tiny
from safetensors import safe_open
from transformers import AutoModelForSeq2SeqLM

from quantkit.errors import InputError
from quantkit.model.architectures.one_wide import OneWideConfig
from quantkit.model.inspect import inspect, map_module
from quantkit.plan.select import choose
from quantkit.quantization.transforms.spaces import spaces_of
from quantkit.report.inspection import inspection_page

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
READ = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(0))
WRITTEN = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(READ)
MASK[1, 6:] = 0
FFN = "model.encoder.layers.0.mlp"


def build(**changes):
    return build_tiny("OneWideForConditionalGeneration", {**SIZES, **changes})


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_checkpoint_holds_the_shared_ffn_once(is_tied, tmp_path):
    model = build(tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        stored = sum(file.get_tensor(name).numel() for name in names)
    assert stored == sum(parameter.numel() for parameter in model.parameters())
    assert len([name for name in names if "mlp.up_proj" in name]) == 1
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert loaded.model.encoder.layers[0].mlp is loaded.model.encoder.layers[2].mlp
    inputs = {"input_ids": READ, "attention_mask": MASK, "decoder_input_ids": WRITTEN}
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert inspect(str(tmp_path)).notes == ()


def test_generation_is_one_pass_over_all_of_it():
    model = build()
    made = model.generate(READ, attention_mask=MASK, max_new_tokens=6, do_sample=False, eos_token_id=None)
    whole = model(READ, attention_mask=MASK, decoder_input_ids=made, use_cache=False).logits.argmax(-1)
    assert torch.equal(whole[:, :-1], made[:, 1:])
    alone = model(READ[1:, :6], decoder_input_ids=WRITTEN[1:]).logits
    padded = model(READ, attention_mask=MASK, decoder_input_ids=WRITTEN).logits[1:]
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)
    loss = model(READ, labels=WRITTEN).loss
    shifted = torch.cat([torch.zeros((2, 1), dtype=torch.int64), WRITTEN[:, :-1]], 1)
    logits = model(READ, decoder_input_ids=shifted).logits.log_softmax(-1)
    torch.testing.assert_close(loss, -logits.gather(-1, WRITTEN[..., None]).mean())


@pytest.mark.once
def test_the_map_says_who_shares_what():
    model_map = map_module(build(), name="one wide")
    shared = [layer for layer in model_map.layers if layer.calls > 1]
    assert {layer.name for layer in shared} == {f"{FFN}.{part}_proj" for part in ("gate", "up", "down")}
    assert all(layer.calls == 3 and len(layer.aliases) == 2 for layer in shared)
    feeding = [norm.name for norm in model_map.norms if f"{FFN}.up_proj" in norm.feeds]
    assert feeding == [f"model.encoder.layers.{index}.ffn_norm" for index in range(3)]
    spaces = {space.name: space for space in spaces_of(model_map)}
    for name in feeding:  # scales of one norm would change what the others give
        assert "diagonal" not in spaces[name].permits
        assert "shared" in spaces[name].forbidden["diagonal"]
    head = "\n".join(inspection_page(model_map, choose(model_map, min_dim=1)).head)
    assert "gated FFN SwiGLU 96, stored once and run 3 times" in head
    assert "the FFN of model.encoder.layers.0" in head
    assert "2 x decoder block" in head
    assert "no FFN" in head


@pytest.mark.once
@pytest.mark.parametrize(
    "changes",
    [{"encoder_ffn": "some"}, {"decoder_ffn": "wide"}, {"norm_placement": "post"}, {"ffn_kind": "none"}],
)
def test_what_means_nothing_is_refused_in_one_line(changes):
    with pytest.raises(InputError, match=r"OneWideConfig: .* allowed: ") as refused:
        OneWideConfig(**{**SIZES, **changes})
    assert "\n" not in str(refused.value)
