"""No config makes transformers run code of the Hub, even where the package `kernels` is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from exporting import build_tiny

from quantkit.errors import InputError
from quantkit.model.companions import make_fast_tokenizer
from quantkit.model.families import FAMILIES
from quantkit.model.load import open_source
from quantkit.model.reference import reference_model

FAKE = r"""
import os
from unittest.mock import MagicMock

def get_kernel(name, *args, **options):
    with open(os.environ["CALLS"], "a") as file:
        file.write(f"{name}\n")
    raise RuntimeError("a kernel was asked for")

def _decorator(*_, **__):
    return lambda wrapped: wrapped

use_kernel_forward_from_hub = use_kernel_func_from_hub = use_kernelized_func = _decorator

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""
CONTROL = """
import sys, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
config._attn_implementation = "some/repo"
try:
    transformers.AutoModelForCausalLM.from_config(config)
except Exception as error:
    print(error)
"""
INSPECT = """
import sys
from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.reference import reference_model
for folder in sys.argv[1:]:
    inspect(folder)
    reference_model(open_source(folder))
"""
DOORS = {
    "attention": {"_attn_implementation": "some/repo"},
    "attention_of_5": {"attn_implementation": "some/repo"},
    "internal": {"_attn_implementation_internal": "some/repo"},
    "experts": {"_experts_implementation": "some/repo", "experts_implementation": "some/repo"},
    "flash": {"_attn_implementation": "flash_attention_2"},
    "wrapped": {"_attn_implementation": "paged|some/repo:function"},
    "by_part": {"_attn_implementation": {"": "some/repo", "text_config": "some/repo"}},
    "kernels": {"use_kernels": True},
}


def change(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def kernels_asked_for(code: str, folders: list[Path], place: Path) -> list[str]:
    """The kernels that a process with a package `kernels` asks for."""
    calls, package = place / "calls", place / "packages" / "kernels"
    if not package.exists():
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(FAKE)
        record = package.parent / "kernels-0.18.2.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    path = os.pathsep.join([str(package.parent), *sys.path])
    command = [sys.executable, "-c", code, *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": path, "CALLS": str(calls)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return calls.read_text().split() if calls.exists() else []


def test_no_config_fetches_a_kernel(tmp_path):
    folders = []
    for name, fields in DOORS.items():
        folders.append(tmp_path / name)
        build_tiny("LlamaForCausalLM", FAMILIES["llama"].tiny).save_pretrained(folders[-1])
        change(folders[-1], **fields)
    folders.append(tmp_path / "mamba")  # transformers 4 asks for a kernel in its constructor
    shape = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    build_tiny("MambaForCausalLM", shape).save_pretrained(folders[-1])
    assert kernels_asked_for(INSPECT, folders, tmp_path) == []
    sound = tmp_path / "sound"
    build_tiny("LlamaForCausalLM", FAMILIES["llama"].tiny).save_pretrained(sound)
    assert kernels_asked_for(CONTROL, [sound], tmp_path) == ["some/repo"], "the fake package was not seen"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A checkpoint beside code that must not run."""
    build_tiny("LlamaForCausalLM", FAMILIES["llama"].tiny).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks on the terminal
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "model" / "custom_generate").mkdir()
    for name in ("custom_generate/generate.py", "tokens.py", "model.py"):
        (tmp_path / "model" / name).write_text(code)
    return tmp_path / "model"


def test_code_beside_the_weights_does_not_run(folder, tmp_path):
    change(folder, auto_map={"AutoModelForCausalLM": "model.M", "AutoTokenizer": ["tokens.T", None]})
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["tokens.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "vocab.json").write_text("{}")
    source = open_source(folder)
    assert reference_model(source).config.model_type == "llama"
    make_fast_tokenizer(source, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_adapter_fetches_no_base_model(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    with pytest.raises(InputError, match="adapter of another model"):
        open_source(folder)
