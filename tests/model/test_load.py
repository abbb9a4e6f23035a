"""What a user can get wrong when naming a model, each refused in one line; and the ways to name one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from exporting import build_tiny
from published_configs import write_tiny
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect, map_module
from quantkit.model.load import build_on_meta, open_source
from quantkit.model.reference import reference_model
from quantkit.plan.select import choose

TINY = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=40)


@pytest.fixture
def folder(tmp_path) -> Path:
    torch.manual_seed(0)
    GPT2LMHeadModel(TINY).save_pretrained(tmp_path / "model", safe_serialization=True)
    return tmp_path / "model"


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, members in halves.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, members in halves.items() for name in members},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(name) -> str:
    with pytest.raises(InputError) as caught:
        inspect(str(name))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_way_to_name_a_model_gives_the_same_map(folder):
    whole = inspect(str(folder))
    assert inspect(str(folder / "config.json")) == whole
    shard(folder)
    assert inspect(str(folder)) == whole
    assert inspect(str(folder / "model.safetensors.index.json")) == whole
    for file in folder.glob("*safetensors*"):
        file.unlink()
    assert inspect(str(folder)) == whole  # a config alone
    assert map_module(GPT2LMHeadModel(TINY), name=folder.name) == whole


def test_the_embedded_model():
    model = inspect("demo")
    assert model.num_parameters == 5_918_720
    assert model.family == "gpt2"
    assert model.notes == ()


def test_no_config(tmp_path):
    assert "no config.json" in refused(tmp_path)


def test_no_such_folder():
    assert "no such folder" in refused("./nowhere/at/all")


def test_broken_config(folder):
    (folder / "config.json").write_text("{")
    assert "not JSON" in refused(folder)
    (folder / "config.json").write_text("[1]")
    assert "not an object" in refused(folder)
    (folder / "config.json").write_text("{}")
    assert "model_type" in refused(folder)


def test_unknown_model_type(folder):
    edit(folder / "config.json", model_type="gpt9")
    assert "does not know the model type 'gpt9'" in refused(folder)


@pytest.mark.parametrize(
    "changes", [{"n_embd": 33}, {"n_embd": "wide"}, {"n_layer": -1, "n_embd": -32}, {"vocab_size": None}]
)
def test_impossible_sizes(folder, changes):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    edit(folder / "config.json", **changes)
    assert "config.json" in refused(folder)


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "not a complete safetensors file" in refused(folder)


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"\xff" * 64])
def test_garbage_weights(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert "not a complete safetensors file" in refused(folder)


def test_tampered_header(folder):
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[raw.index(b'"data_offsets":[') + 16] = ord("9")
    file.write_bytes(bytes(raw))
    assert "not a complete safetensors file" in refused(folder)


def test_weights_of_another_model(folder):
    edit(folder / "config.json", n_embd=64)
    message = refused(folder)
    assert "another shape" in message
    assert "[61, 32] and not [61, 64]" in message


def test_missing_and_extra_tensors_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["stray.weight"] = tensors.pop("transformer.h.1.mlp.c_fc.weight")
    save_file(tensors, folder / "model.safetensors")
    notes = inspect(str(folder)).notes
    assert any("missing" in note and "transformer.h.1.mlp.c_fc.weight" in note for note in notes)
    assert any("not used" in note and "stray.weight" in note for note in notes)


def test_a_base_model_checkpoint_has_no_prefix(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): t for name, t in tensors.items()}, folder / "model.safetensors"
    )
    assert inspect(str(folder)).notes == ()


def test_broken_index(folder):
    shard(folder)
    index = folder / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text("{}")
    assert "not a safetensors index" in refused(folder)
    index.write_text(good.replace("a.safetensors", "../a.safetensors"))
    assert "outside of its folder" in refused(folder)
    index.write_text(good.replace('"b.safetensors"', '"a.safetensors"'))
    assert "not in the shard" in refused(folder)
    index.write_text(good)
    (folder / "b.safetensors").unlink()
    assert "shards are missing (b.safetensors)" in refused(folder)


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    message = refused(folder)
    assert "pickle" in message
    assert "safe_serialization=True" in message


def test_remote_code_is_refused(folder):
    edit(
        folder / "config.json",
        model_type="strange",
        auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"},
    )
    message = refused(folder)
    assert "--trust-remote-code" in message
    edit(folder / "config.json", model_type="gpt2")
    model = inspect(str(folder))
    assert not model.used_remote_code
    assert any("refused" in note for note in model.notes)


def test_trusted_remote_code_runs_and_is_recorded(folder):
    (folder / "code_config.py").write_text(
        "from transformers import GPT2Config\nclass C(GPT2Config):\n    model_type = 'strange'\n"
    )
    (folder / "code_model.py").write_text(
        "from transformers import GPT2LMHeadModel\nfrom .code_config import C\n"
        "class M(GPT2LMHeadModel):\n    config_class = C\n"
    )
    edit(
        folder / "config.json",
        model_type="strange",
        architectures=["M"],
        auto_map={"AutoConfig": "code_config.C", "AutoModelForCausalLM": "code_model.M"},
    )
    model = inspect(str(folder), trust_remote_code=True)
    assert model.used_remote_code
    assert model.architecture == "M"
    assert model.family is None
    assert any("no row" in note for note in model.notes)
    assert len(model.layers) == 9  # 4 matrices a block and the head: no row, so fused ones stay whole


def test_an_unknown_hub_name_names_three_ways_forward(monkeypatch, capfd):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://localhost:9")
    message = refused("nobody/no-such-model-at-all")
    for way in ("(1) give a local folder", "(2) use a built-in name", "(3) connect"):
        assert way in message
    assert capfd.readouterr().err == ""  # one line for the user, and no retries told aloud


def test_a_folder_goes_before_a_known_name(folder, monkeypatch, tmp_path):
    shutil.copytree(folder, tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert open_source("gpt2").kind == "folder"
    monkeypatch.chdir("/")
    assert open_source("gpt2").kind == "known"


def test_a_model_without_linears_and_a_plain_module():
    plain = map_module(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 5)), name="plain")
    assert [layer.role for layer in plain.layers] == ["other"]
    assert [entry.name for entry in plain.unmapped] == ["0.weight", "0.bias"]
    empty = map_module(nn.Sequential(nn.Conv2d(3, 4, 3)), name="empty")
    (warning,) = choose(empty).warnings
    assert "no linear layer" in warning


def test_an_architecture_without_a_row_maps_as_other(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "mpt",
                "d_model": 32,
                "n_layers": 1,
                "n_heads": 4,
                "vocab_size": 61,
            }
        )
    )
    model = inspect(str(tmp_path))
    assert model.family is None
    assert {layer.role.value for layer in model.layers} == {"other", "lm_head"}
    assert any("no row for model type 'mpt'" in note for note in model.notes)


def test_a_shared_module_is_one_layer_with_aliases():
    shared = nn.Linear(8, 8)
    model = map_module(nn.ModuleDict({"a": shared, "b": shared}), name="shared")
    (layer,) = model.layers
    assert (layer.name, layer.aliases, layer.calls) == ("a", ("b",), 2)


@pytest.mark.parametrize("name", ["stabilityai/stablelm-2-12b", "swiss-ai/Apertus-8B-2509"])
def test_models_whose_weights_cannot_be_initialised_are_built(name, tmp_path):
    """Norms without a bias, and a buffer that the class reads while it is built."""
    model = write_tiny(name, tmp_path)
    module = build_on_meta(open_source(tmp_path))
    shapes = {path: tuple(tensor.shape) for path, tensor in module.state_dict().items()}
    assert shapes == {path: tuple(tensor.shape) for path, tensor in model.state_dict().items()}
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}
    loaded = reference_model(open_source(tmp_path)).state_dict()
    assert all(torch.equal(loaded[path], values) for path, values in model.state_dict().items())


def test_a_layer_norm_without_weights_is_mapped(tmp_path):
    model = write_tiny("facebook/galactica-125m", tmp_path)
    norms = inspect(str(tmp_path)).norms
    assert len(norms) == 2 * model.config.num_hidden_layers + 1
    assert {(norm.num_parameters, norm.features) for norm in norms} == {(0, model.config.hidden_size)}


def test_a_norm_that_neither_weights_nor_its_class_describe_is_named():
    class BareNorm(torch.nn.Module):
        def forward(self, x):
            return x / x.pow(2).mean(-1, keepdim=True).sqrt()

    model = build_tiny("LlamaForCausalLM", dict(FAMILIES["llama"].tiny))
    model.model.norm = BareNorm()
    with pytest.raises(InputError, match=r"model\.norm: a norm without weights"):
        map_module(model, name="bare")


def test_an_encoder_decoder_that_predicts_nothing_gets_its_head(tmp_path):
    write_tiny("facebook/bart-base", tmp_path)
    model_map = inspect(str(tmp_path))
    assert model_map.architecture == "BartForConditionalGeneration"
    assert "BartModel predicts no tokens: BartForConditionalGeneration was taken" in model_map.notes
    assert not any("missing" in note for note in model_map.notes if "final_logits_bias" not in note)


@pytest.mark.parametrize("family", ["ws_ffn", "quantkit_reference"])
def test_a_field_that_the_class_does_not_read_changes_no_head(family, tmp_path):
    row = FAMILIES[family]
    build_tiny(row.tiny_class, dict(row.tiny)).save_pretrained(tmp_path)
    before = inspect(str(tmp_path)).blocks
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": 24}))
    assert inspect(str(tmp_path)).blocks == before
