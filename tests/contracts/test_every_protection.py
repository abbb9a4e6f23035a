"""Every decoder family, split and put out of order: the function stays, exactly where numbers are exact.

The oracle in float64 is transformers' own model. That of the integers is the same model in one piece: its
codes in the key's order, and its logits and cache bit for bit once sums in norms do not depend on an order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doubles import InDouble, logits_of, subject
from exporting import DECODERS, build_tiny, decoder_cases, error, slow_unless_of_a_kind
from protecting import ALL, orderless, split, split_run, whole_run, whole_text

from quantkit.export.fused.split import read_blocks
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.model.model_map import Role
from quantkit.model.weights.torch_model import torch_model
from quantkit.private.client.model import open_client
from quantkit.private.host.model import open_host
from quantkit.private.keys import Key
from quantkit.private.protect import in_secret_order
from quantkit.quantization.transforms.draft import opened
from quantkit.quantization.transforms.spaces import spaces_of
from quantkit.runtime.decoder import open_decoder

KEY = Key(secret=bytes(range(32)), model="ab" * 32)
IDS = np.random.default_rng(0).integers(1, 60, (2, 14))
CASES = [
    pytest.param(*case.values, id=case.id, marks=slow_unless_of_a_kind(case.values[0]))
    for case in decoder_cases(mixtures=False)
]
IN_DOUBLE = [
    pytest.param(name, index, id=f"{name}-{index}")
    for name in DECODERS
    if FAMILIES[name].stacks[0].mixture is None  # a mixture is not split
    for index in range(1 + len(FAMILIES[name].variants))
]


def cache_of(module):
    with torch.inference_mode(), InDouble():
        cache = module(input_ids=torch.from_numpy(IDS), use_cache=True).past_key_values
    cache = getattr(cache, "self_attention_cache", cache)  # transformers 4.57 gives GPT-BigCode one of two
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    return [each.numpy() for pair in layers for each in pair]


@pytest.mark.parametrize(("name", "variant"), IN_DOUBLE)
def test_in_float64_logits_and_cache_are_the_originals(name, variant, tmp_path):
    given = subject(name, variant, tmp_path)
    original = torch_model(given.source, given.map, given.tensors, torch.float64)
    for permutes in (("residual",), ALL):
        weights = in_secret_order(given.map, opened(given.map, given.tensors, np.float64), KEY, permutes)
        module = torch_model(given.source, given.map, weights, torch.float64)
        made = error(logits_of(module), given.logits)
        assert made.relative < 1e-11
        assert made.absolute < 1e-9
        pairs = zip(cache_of(module), cache_of(original), strict=True)
        same = [np.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in pairs]
        if permutes == ALL:
            assert all(same[::2]), "keys stay, and values are in another order"
            assert not any(same[1::2])
        else:
            assert all(same)


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_integers_are_exactly_the_unprotected_ones(name, sizes, tmp_path):
    build_tiny(FAMILIES[name].tiny_class, sizes).save_pretrained(tmp_path / "model")
    expected = None
    for permutes in (("residual",), ALL):
        out = tmp_path / "-".join(permutes)
        out.mkdir()
        pair = split(
            tmp_path / "model", out, scheme="int8_channel", permutes=permutes, makes_whole=not expected
        )
        if expected is None:
            expected = whole_run(orderless(pair.whole / "model.onnx"), IDS)
        logits, cache = split_run(*(orderless(path) for path in pair.parts), IDS)
        assert np.array_equal(logits, expected[0])
        equal = [np.array_equal(a, b) for a, b in zip(cache, expected[1], strict=True)]
        assert all(equal[::2])
        assert all(equal[1::2]) == (permutes != ALL), "values are in another order only if that was asked for"


@pytest.mark.once
@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_codes_are_the_unprotected_ones_in_the_keys_order(name, sizes, tmp_path):
    """Down projections, whose rows go with the residual and whose columns go with the FFN: by numpy alone."""
    build_tiny(FAMILIES[name].tiny_class, sizes).save_pretrained(tmp_path / "model")
    pair = split(tmp_path / "model", tmp_path, scheme="int8_channel")
    host, whole = (read_blocks(folder / "model.onnx") for folder in (pair.host, pair.whole))
    model_map = inspect(str(tmp_path / "model"))
    spaces = {space.block: space for space in spaces_of(model_map) if space.kind == "ffn_hidden"}
    order_O = pair.key.order("residual", model_map.hidden_size)
    for number, block in enumerate(model_map.blocks):
        down = next(
            each for each in model_map.layers if each.block == block.name and each.role is Role.FFN_DOWN
        )
        order_I = pair.key.order(spaces[block.name].name, down.in_features)
        wanted_IO = whole[f"{down.name}.codes_IO"][order_I][:, order_O]
        assert np.array_equal(host[f"block.{number}.ffn_down.codes_IO"], wanted_IO)
        assert np.array_equal(host[f"block.{number}.ffn_down.scales"], whole[f"{down.name}.scales"][order_O])
        assert not np.array_equal(wanted_IO, whole[f"{down.name}.codes_IO"])


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_in_blocks_it_is_as_accurate_as_unprotected(name, sizes, tmp_path):
    """Blocks see other neighbours, so numbers differ; no further from the original than in one piece."""
    model = build_tiny(FAMILIES[name].tiny_class, sizes)
    model.save_pretrained(tmp_path / "model")
    pair = split(tmp_path / "model", tmp_path, scheme="int8_block16")
    with torch.inference_mode():
        original = model(input_ids=torch.from_numpy(IDS), use_cache=False).logits.numpy()
    whole = open_decoder(pair.whole, threads=1).logits(IDS)
    client, host = open_client(pair.client, threads=1), open_host(pair.host, threads=1)
    features = np.stack([client.embed(row, 0) for row in IDS])
    made = client.logits(whole_text(host.decoder, features)[0])
    assert 0 < error(made, original).relative < 0.1
    assert np.abs(made - original).mean() < 1.5 * np.abs(whole - original).mean()
    # Token by token through the cache it says what it says at once. A sum in another order turns a code, and
    # on some processors in the first layer: all that follows moves, by less than the rounding moved it.
    session = host.open(IDS.shape[1])
    chunks = [features[0, :8], *features[0, 8:, None]]
    steps = [session.advance(chunk) for chunk in chunks]
    stepped = client.logits(np.stack(steps))[:, 0]
    off = [np.abs(each - original[0, 7:]).mean() for each in (stepped, whole[0, 7:])]
    assert off[0] < 2 * off[1]
    assert error(stepped, made[0, 7:]).relative < 0.03
