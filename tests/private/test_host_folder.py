"""A hunt through the host's folder for what must not be there, on every decoder family.

Looked for, as bytes anywhere in any file: tensors and rows of the original, codes of the unprotected model,
the key, every order and its inverse in every width of integers, names, and what is as long as the vocabulary.
"""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import onnx
import pytest
from exporting import build_tiny, decoder_cases
from onnx import numpy_helper
from protecting import ALL, split

from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.model.model_map import NormPlace, Role
from quantkit.private.client.model import open_client
from quantkit.private.host.model import open_host
from quantkit.quantization.transforms.spaces import spaces_of

pytestmark = pytest.mark.once
# Queries and keys are exactly the original's, since the cache is: so is what is added to them, and the gain
# that stands on them. docs/private-inference.md says so.
STAYS_ROLES = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY)
STAYS_PLACES = (NormPlace.QUERY, NormPlace.KEY)
LEAST_VALUES = 8  # fewer may be alike by chance


def contents_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tensors_of(path):
    model = onnx.load(str(path))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def original_tensors(model, model_map):
    """(what it is, its values) of every parameter and of the logical parts of fused ones."""
    stays = {
        f"{norm.name}.{part}"
        for norm in model_map.norms
        if norm.place in STAYS_PLACES
        for part in ("weight", "bias")
    }
    stays |= {
        f"{each.matrix}.bias" for each in model_map.layers if each.role in STAYS_ROLES and not each.is_fused
    }
    parameters = dict(model.state_dict())
    for name, parameter in parameters.items():
        values = parameter.numpy()
        for gain in {values.tobytes(): values, (values + 1).tobytes(): values + 1}.values():  # Gemma's gains
            if not any(name.endswith(each) for each in stays):
                yield name, gain
    for layer in model_map.layers:
        biases = [each for each in parameters if each.endswith(f"{layer.matrix}.bias")]
        if layer.role not in STAYS_ROLES and layer.is_fused and biases:
            rows = layer.rows
            places = (rows.start + rows.stride * np.arange(rows.count))[:, None] + np.arange(rows.length)
            yield f"{layer.name}.bias", parameters[biases[0]].numpy()[places.reshape(-1)]


def is_telling(values):
    return values.size >= LEAST_VALUES and len(np.unique(values)) >= LEAST_VALUES


def secrets_of(pair, model_map):
    """Everything that gives an order away, as bytes."""
    key = pair.key.secret
    yield from (key, key[:16], key[16:], key.hex().encode(), base64.b64encode(key)[:-2])
    yield pair.key.model.encode()
    yield bytes.fromhex(pair.key.model)
    orders = []
    for space in spaces_of(model_map):
        if space.kind in ("residual", "ffn_hidden"):
            orders.append(pair.key.order(space.name, space.width))
        elif space.kind == "value_heads":
            parts = [
                pair.key.order(f"{space.name}/head{h}", space.head_dim) for h in range(space.num_kv_heads)
            ]
            whole = np.concatenate([part + h * space.head_dim for h, part in enumerate(parts)])
            orders.extend([whole, *(part for part in parts if len(part) >= 16)])
    for order in orders:
        for each in (order, np.argsort(order)):
            for dtype in (np.int64, np.int32, np.uint16, np.float32, np.float64):
                yield each[:16].astype(dtype).tobytes()
            yield json.dumps(each[:8].tolist()).encode()[1:-1]


@pytest.mark.parametrize(("name", "sizes"), decoder_cases(mixtures=False))
def test_nothing_of_the_model_or_the_key_is_there(name, sizes, tmp_path):
    model = build_tiny(FAMILIES[name].tiny_class, {**sizes, "vocab_size": 97})
    model.save_pretrained(tmp_path / "the-model-of-acme")
    model_map = inspect(str(tmp_path / "the-model-of-acme"))
    pair = split(tmp_path / "the-model-of-acme", tmp_path, scheme="int8_channel")
    files = contents_of(pair.host)
    assert set(files) == {"model.onnx", "manifest.json"}
    everything = b"".join(files.values())

    for what, values in original_tensors(model, model_map):
        if is_telling(values):
            assert values.tobytes() not in everything, what
            assert np.ascontiguousarray(values.T).tobytes() not in everything, what
        if values.ndim == 2 and "bias" not in what:
            for row in values[::5]:
                assert not is_telling(row) or row.tobytes() not in everything, f"a row of {what}"

    whole, host = tensors_of(pair.whole / "model.onnx"), tensors_of(pair.host / "model.onnx")
    coded = {values.tobytes() for key, values in whole.items() if ".codes" in key and is_telling(values)}
    assert coded
    assert not coded & {values.tobytes() for values in host.values()}
    for key, codes in host.items():
        if key.endswith(".codes_IO"):  # as floats again, either way round
            made_IO = codes * host[key.replace(".codes_IO", ".scales")]
            for _, values in original_tensors(model, model_map):
                for each in (made_IO, made_IO.T):
                    assert each.shape != values.shape or not np.allclose(each, values, atol=0.02), key

    for secret in secrets_of(pair, model_map):
        assert secret not in everything

    vocab = model_map.vocab_size
    assert vocab == 97
    assert all(vocab not in values.shape for values in host.values())
    graph = onnx.load(str(pair.host / "model.onnx"))
    for tensor in graph.graph.initializer:
        tensor.ClearField("raw_data")
    words = graph.SerializeToString() + files["manifest.json"]
    for word in (
        *(
            "acme",
            "lm_head",
            "embed",
            "wte",
            "vocab",
            "token",
            "logits",
            "input_ids",
            "permut",
            "order",
            "key.",
        ),
        *(model_map.model_type, model_map.architecture, model_map.blocks[0].name),
        *(each.matrix for each in model_map.layers),
        *(each.name for each in model_map.norms),
    ):
        pattern = rb"(?<![a-z_])" + re.escape(word.encode()) + rb"(?![a-z_])"
        assert not re.search(pattern, words, re.IGNORECASE), word
    described = json.loads(files["manifest.json"])
    assert set(described) == {"kind", "quantkit", "pair", "width", "context", "files", "sums"}


def test_the_hunt_finds_what_is_there(tmp_path):
    """With the residual alone in another order, an FFN's bias stays: the hunt must see it."""
    model = build_tiny("GPT2LMHeadModel", {**FAMILIES["gpt2"].tiny, "vocab_size": 97})
    model.save_pretrained(tmp_path / "model")
    pair = split(tmp_path / "model", tmp_path, scheme="int8_channel", permutes=("residual",))
    everything = b"".join(contents_of(pair.host).values())
    model_map = inspect(str(tmp_path / "model"))
    found = [what for what, values in original_tensors(model, model_map) if values.tobytes() in everything]
    assert any(what.endswith("c_fc.bias") for what in found)
    client = b"".join(contents_of(pair.client).values())
    assert any(secret in client for secret in secrets_of(pair, model_map)), "the order lies with the client"
    assert pair.key.secret not in client
    assert pair.key.secret.hex().encode() not in client


def test_weights_beside_the_graph_say_no_more_than_those_inside(tmp_path):
    """A large model's weights lie in a file of their own, whose header describes them."""
    model = build_tiny("LlamaForCausalLM", {**FAMILIES["llama"].tiny, "vocab_size": 97})
    model.save_pretrained(tmp_path / "the-model-of-acme")
    pair = split(tmp_path / "the-model-of-acme", tmp_path, single_file_mb=0, makes_whole=False)
    files = contents_of(pair.host)
    assert set(files) == {"model.onnx", "manifest.json", "weights.safetensors"}
    stored = files["weights.safetensors"]
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
    described = json.dumps(header).lower()
    for word in ("acme", "llama", "model.layers", "embed", "lm_head", "self_attn", "mlp"):
        assert word not in described, word
    assert json.loads(header["__metadata__"]["quantkit"])["tables"] == []
    assert all(97 not in entry["shape"] for name, entry in header.items() if name != "__metadata__")
    for secret in secrets_of(pair, inspect(str(tmp_path / "the-model-of-acme"))):
        assert secret not in b"".join(files.values())
    host = open_host(pair.host, threads=1)
    client = open_client(pair.client, threads=1)
    assert np.isfinite(host.open(4).advance(client.embed(np.array([5, 6, 7]), 0))).all()


def test_both_sides_are_planned_and_done(tmp_path):
    build_tiny("LlamaForCausalLM", dict(FAMILIES["llama"].tiny)).save_pretrained(tmp_path / "model")
    pair = split(tmp_path / "model", tmp_path, permutes=ALL)
    manifest = json.loads((pair.client / "manifest.json").read_text())
    planned = [each["name"] for each in manifest["plan"]["layers"] if each["quantized"]]
    assert len(planned) == sum(sum(each.values()) for each in manifest["integer_operators"].values()) + 4
    assert manifest["plan"]["projections"]["quantized"] == len(planned)
