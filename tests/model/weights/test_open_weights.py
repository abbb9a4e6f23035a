"""Opening the weights of whatever was named, and every tensor that a quantized model needs found in them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from exporting import build_tiny
from published_configs import write_tiny
from safetensors.torch import load_file, save_file

from quantkit.errors import InputError
from quantkit.model.companions import config_for_artifact, make_fast_tokenizer, tokenizer_files
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.reference import reference_logits, reference_model
from quantkit.model.weights.as_mapped import MappedTensors
from quantkit.model.weights.open import open_weights, with_weights
from quantkit.model.weights.tensors import RandomTensors
from quantkit.pipeline.stages.export import require_tensors
from quantkit.plan.formats import in_blocks
from quantkit.plan.select import choose
from quantkit.quantization.layout import contents_of
from quantkit.quantization.projections import weight_name


def saved(folder, family, **changes):
    row = FAMILIES[family]
    model = build_tiny(row.tiny_class, {**dict(row.tiny), **changes})
    model.save_pretrained(folder)
    return model


def opened(folder, **options):
    model_map = inspect(str(folder))
    settings = {"random_weights": False, **options}
    return model_map, open_weights(open_source(str(folder)), model_map, **settings)


def needed(model_map):
    return contents_of(model_map, choose(model_map, min_dim=1), in_blocks(32))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_of_every_family_has_every_tensor(family, tmp_path):
    model = saved(tmp_path, family)
    model_map, source = opened(tmp_path)
    require_tensors(needed(model_map), source, "here")
    state = model.state_dict()
    for layer in model_map.layers:  # the stored shape is the matrix's, whichever way round
        stored = sorted(source.shape(weight_name(layer)))
        assert layer.in_features in stored
        assert max(stored) >= layer.out_features or layer.out_features in stored
    if model_map.picture and model_map.picture.probe:  # keys and values of its pooling are no layers
        return
    largest = max((tuple(tensor.shape) for tensor in state.values() if tensor.dim() == 2), key=np.prod)
    assert largest in {source.shape(weight_name(layer)) for layer in model_map.layers} | {
        source.shape(f"{table.name}.weight") for table in model_map.embeddings
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_every_family_have_every_tensor(family, tmp_path):
    saved(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    model_map, source = opened(tmp_path, random_weights=True, seed=5)
    random = source.stored if isinstance(source, MappedTensors) else source
    assert isinstance(random, RandomTensors)
    assert random.seed == 5
    require_tensors(needed(model_map), source, "here")


def test_a_lost_tensor_is_named_before_anything_is_written(tmp_path):
    saved(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    model_map, source = opened(tmp_path)
    with pytest.raises(InputError) as caught:
        require_tensors(needed(model_map), source, str(tmp_path))
    assert "lacks 1 tensors: transformer.h.1.mlp.c_fc.bias" in str(caught.value)


@pytest.fixture
def marian(tmp_path):
    """A checkpoint as published: without the sinusoids and the bias that the class makes."""
    write_tiny("Helsinki-NLP/opus-mt-en-de", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: values for name, values in tensors.items() if "embed_pos" not in name}
    kept.pop("final_logits_bias", None)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path, kept


def test_sinusoids_that_no_checkpoint_stores_come_from_the_class(marian):
    folder, _ = marian
    model_map, source = opened(folder)
    require_tensors(needed(model_map), source, "here")
    table = next(t for t in model_map.embeddings if t.name == "model.decoder.embed_positions")
    positions = np.arange(table.num_rows)[:, None]
    half = table.num_columns // 2
    angles = positions / 10000.0 ** (np.arange(half) / half)
    expected = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    np.testing.assert_allclose(source.read(f"{table.name}.weight"), expected, atol=1e-6)
    np.testing.assert_allclose(source.read(f"{table.name}.weight", 3, 2), expected[3:5], atol=1e-6)
    assert source.shape(f"{table.name}.weight") == expected.shape
    assert not any("embed_positions" in note for note in model_map.notes)
    loaded = reference_model(open_source(str(folder))).get_parameter(f"{table.name}.weight")
    np.testing.assert_allclose(loaded.detach().numpy(), expected, atol=1e-6)


def test_a_trained_table_or_norm_is_not_taken_from_the_class(marian):
    folder, kept = marian
    lost = ("model.shared.weight", "model.encoder.layers.0.final_layer_norm.bias")
    tied = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    tensors = {name: values for name, values in kept.items() if name not in (*lost, *tied)}
    save_file(tensors, folder / "model.safetensors")
    model_map, source = opened(folder)
    with pytest.raises(InputError, match=r"lacks .*(embed_tokens|shared)"):
        require_tensors(needed(model_map), source, "here")
    assert not source.has(lost[1])


def test_a_lost_parameter_of_a_traced_model_is_named_whatever_its_kind(tmp_path):
    """Mamba's A_log is no projection, table or norm."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    build_tiny("MambaForCausalLM", sizes).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["backbone.layers.1.mixer.A_log"]
    save_file(tensors, tmp_path / "model.safetensors")
    model_map, source = opened(tmp_path)
    with pytest.raises(InputError, match=r"lacks 1 tensors: backbone\.layers\.1\.mixer\.A_log"):
        require_tensors(needed(model_map), source, str(tmp_path))


@pytest.mark.parametrize("kept", ["transformer.wte.weight", "lm_head.weight"])
def test_a_tied_table_under_either_of_its_names(kept, tmp_path):
    model = saved(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop("transformer.wte.weight")
    tensors.pop("lm_head.weight", None)
    save_file({**tensors, kept: table}, tmp_path / "model.safetensors")
    model_map, source = opened(tmp_path)
    head = model_map.layers[-1]
    assert (source.read(weight_name(head)) == model.lm_head.weight.detach().numpy()).all()


def test_a_base_model_without_the_prefix(tmp_path):
    model = saved(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors")
    _, source = opened(tmp_path)
    wanted = model.transformer.h[1].mlp.c_fc.weight.detach().numpy()
    assert (source.read("transformer.h.1.mlp.c_fc.weight") == wanted).all()


def test_the_reference_is_the_original_in_float32(tmp_path):
    model = saved(tmp_path, "gpt2").half()
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(0).integers(0, 61, (2, 9))
    with torch.inference_mode():
        wanted = model.float()(input_ids=torch.from_numpy(ids)).logits.numpy()
    made = reference_logits(open_source(str(tmp_path)))(ids)
    assert made.dtype == np.float32
    assert np.abs(made - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_well_known_names_without_weights_say_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = open_source("gpt2")
    assert with_weights(source, random_weights=True) is source
    monkeypatch.setattr("quantkit.model.weights.open.hub_is_reachable", lambda _: False)
    monkeypatch.setenv("HF_HOME", "/nowhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")
    with pytest.raises(InputError) as caught:
        with_weights(source, random_weights=False)
    assert "--random-weights" in str(caught.value)
    assert "hf download gpt2" in str(caught.value)
    demo = open_source("demo")
    assert with_weights(demo, random_weights=False) is demo


def test_code_of_the_checkpoint_is_left_behind(tmp_path):
    saved(tmp_path, "gpt2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoConfig": "x.Y"}}))
    config = config_for_artifact(open_source(str(tmp_path)))
    assert "auto_map" not in config
    assert config["model_type"] == "gpt2"


def test_the_files_of_the_tokenizer_and_no_weights(tmp_path):
    demo = tokenizer_files(open_source("demo"))
    names = {path.name for path in demo}
    assert {"tokenizer.json", "vocab.json", "merges.txt"} <= names
    assert not any(name.endswith(".safetensors") or name == "config.json" for name in names)
    assert tokenizer_files(open_source("gpt2")) == ()


def test_a_fast_tokenizer_is_made_of_the_older_files(tmp_path):
    original, model, out = open_source("demo"), tmp_path / "model", tmp_path / "out"
    saved(model, "gpt2")
    out.mkdir()
    assert not make_fast_tokenizer(open_source(str(model)), out), "there is nothing to make it of"
    for name in ("vocab.json", "merges.txt"):
        (model / name).write_bytes((original.folder / name).read_bytes())
    assert make_fast_tokenizer(open_source(str(model)), out)
    text = "The river, 12 boats and a bridge."
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"))
    wanted = transformers.AutoTokenizer.from_pretrained(str(original.folder))
    assert made(text)["input_ids"] == wanted(text)["input_ids"]
    assert made.decode(made(text)["input_ids"]) == text


def test_integer_buffers_and_names_of_2018_are_no_obstacle(tmp_path):
    """As the published all-MiniLM-L6-v2 and bert-base-uncased are stored."""
    build_tiny("BertModel", FAMILIES["bert"].tiny).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    counted = 4 * sum(tensor.numel() for tensor in tensors.values())
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): t for name, t in tensors.items()}
    old = {f"bert.{name.replace('LayerNorm.bias', 'LayerNorm.beta')}": t for name, t in old.items()}
    buffers = {
        "bert.embeddings.position_ids": torch.arange(40)[None],
        "cls.seq_relationship.bias": torch.ones(2),
    }
    save_file({**old, **buffers}, path)
    model_map, weights = opened(tmp_path)
    assert model_map.notes == ("1 tensors of the checkpoint are not used: cls.seq_relationship.bias",)
    assert weights.source_bytes() == counted
    for name, tensor in tensors.items():
        assert (weights.read(name) == tensor.numpy()).all(), name
    assert not weights.has("embeddings.position_ids")
