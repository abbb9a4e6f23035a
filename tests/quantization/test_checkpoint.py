"""The quantized checkpoint: other readers open it, two runs agree to the byte, and damage is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from exporting import NOTHING, build_tiny, export
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file
from stored import open_checkpoint

from quantkit.quantization.checkpoint import FORMAT_VERSION, write_checkpoint
from quantkit.quantization.layout import TensorSpec

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
SPECS = (
    TensorSpec(name="odd.codes", dtype="U8", shape=(3, 1, 7)),
    TensorSpec(name="odd.scales", dtype="F32", shape=(3, 1)),
    TensorSpec(name="even.codes_IO", dtype="I8", shape=(16, 8)),
    TensorSpec(name="scalar", dtype="F32", shape=()),
    TensorSpec(name="even.weight_IO", dtype="F32", shape=(16, 4)),
    TensorSpec(name="last", dtype="U8", shape=(5,)),
    TensorSpec(name="large", dtype="F32", shape=(8, 16)),
)
KINDS = {"F32": np.float32, "I8": np.int8, "U8": np.uint8}
DESCRIPTION = {"model": "änd", "packs": [{"name": "odd"}]}


def values(specs=SPECS):
    random = np.random.default_rng(0)
    return {
        spec.name: random.integers(-100, 100, spec.shape).astype(KINDS[spec.dtype]).reshape(spec.shape)
        for spec in specs
    }


def write(path, specs=SPECS, description=DESCRIPTION, step=2):
    """Tensors in another order than their specs, the first ones in parts."""
    parts = []
    for name, array in values(specs).items():
        if array.ndim > 1:
            parts += [(name, array[start : start + step]) for start in range(0, len(array), step)]
        else:
            parts.append((name, array))
    return write_checkpoint(path, specs, parts, description)


def header_of(raw):
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), 8 + length


@pytest.mark.once
def test_the_safetensors_library_reads_the_same(tmp_path):
    path = tmp_path / "w.safetensors"
    write(path)
    theirs = load_file(path)
    opened = open_checkpoint(path)
    assert set(theirs) == set(opened.slots) == {spec.name for spec in SPECS}
    for name, wanted in values().items():
        for made in (theirs[name], opened.read(name)):
            assert made.dtype == wanted.dtype
            assert made.shape == wanted.shape
            assert (made == wanted).all()
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["format"] == "quantkit"
    assert metadata["format_version"] == str(FORMAT_VERSION) == "3"
    assert json.loads(metadata["quantkit"]) == DESCRIPTION == opened.description


@pytest.mark.once
def test_what_writing_returns_is_what_opening_returns(tmp_path):
    written = write(tmp_path / "w")
    assert open_checkpoint(tmp_path / "w") == written
    for name, wanted in values().items():
        assert (written.read(name) == wanted).all()


@pytest.mark.once
def test_the_same_bytes_twice_and_after_reading(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", step=3)
    opened = open_checkpoint(tmp_path / "a")
    specs = [slot.spec for slot in opened.slots.values()]
    parts = [(name, opened.read(name)) for name in reversed(opened.slots)]
    write_checkpoint(tmp_path / "c", specs, parts, opened.description)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()


SHAPES = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.lists(st.integers(1, 9), max_size=3)), min_size=1, max_size=9
)


@pytest.mark.once
@settings(max_examples=40)
@given(shapes=SHAPES)
def test_any_tensors_are_aligned_without_gaps(tmp_path_factory, shapes):
    specs = [
        TensorSpec(name=f"t{n}", dtype=dtype, shape=tuple(shape)) for n, (dtype, shape) in enumerate(shapes)
    ]
    path = tmp_path_factory.mktemp("any") / "w"
    written = write(path, specs)
    theirs = load_file(path)  # the library refuses gaps and overlaps
    for name, wanted in values(specs).items():
        assert (theirs[name] == wanted).all()
    header, start = header_of(path.read_bytes())
    assert start % 64 == 0
    for name, slot in written.slots.items():
        assert slot.offset == start + header[name]["data_offsets"][0]
        assert slot.offset % 4 == 0 or slot.spec.dtype != "F32"
        assert slot.offset % 64 == 0 or slot.length % 64


@pytest.mark.once
def test_a_tensor_that_did_not_come_is_our_own_mistake(tmp_path):
    parts = [(name, array) for name, array in values().items() if name != "large"]
    with pytest.raises(AssertionError, match="large"):
        write_checkpoint(tmp_path / "w", SPECS, parts, {})


SIZES = {"vocab_size": 61, "n_embd": 40, "n_layer": 2, "n_head": 5, "n_positions": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    made = build_tiny("GPT2LMHeadModel", SIZES)
    made.save_pretrained(folder)
    return folder, {name: tensor.numpy() for name, tensor in made.state_dict().items()}


def exported(model, folder, **options):
    export(model[0], folder, **options)
    return folder / "weights.safetensors"


def test_the_lines_of_the_docs_read_a_real_checkpoint(model, tmp_path):
    snippet = re.search(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    assert len([line for line in snippet.split("def ")[1].splitlines() if line.strip()]) <= 10
    names = {}
    exec(snippet, names)
    path = exported(model, tmp_path, scheme="int8_block32")
    for name, wanted in {
        "transformer.h.1.mlp.c_fc": model[1]["transformer.h.1.mlp.c_fc.weight"].T,
        "transformer.h.0.attn.c_attn": model[1]["transformer.h.0.attn.c_attn.weight"].T,
        "lm_head": model[1]["transformer.wte.weight"],
        "transformer.wpe": model[1]["transformer.wpe.weight"],
    }.items():
        made = names["read_weight"](path, name, wanted.shape[1])
        assert made.shape == wanted.shape
        scales = load_file(path)[f"{name}.scales"]
        error = np.abs(made - wanted).max()
        assert 0 < error <= scales.max() / 2 * (1 + 1e-5)
        assert error <= 0.01 * np.abs(wanted).max()


def test_the_header_says_what_the_docs_say(model, tmp_path):
    path = exported(model, tmp_path, scheme="int8_block32", min_dim=41)
    description = json.loads(safe_open(path, framework="numpy").metadata()["quantkit"])
    page = PAGE.read_text(encoding="utf-8")
    for key in description:
        assert f"`{key}`" in page, f"docs/format.md does not tell of '{key}'"
    for part in (*description["packs"], *description["tables"]):
        assert all(f"`{key}`" in page for key in part)
    assert description["min_dim"] == 41
    assert description["scheme"] == "int8_block32"
    packs = {pack["name"]: pack for pack in description["packs"]}
    assert packs["transformer.h.0.mlp.c_fc"]["grid"] == {"bits": 8, "block": 32, "is_symmetric": True}
    attention = packs["transformer.h.0.attn.c_attn"]
    assert attention["grid"] is None
    assert [layer["role"] for layer in attention["layers"]] == [
        "attention_query",
        "attention_key",
        "attention_value",
    ]
    tables = {table["name"]: table for table in description["tables"]}
    assert tables["transformer.wte"]["shares"] == "lm_head"


@pytest.mark.parametrize(
    ("options", "endings"),
    [
        ({"scheme": "int8_block32"}, {"codes", "scales", "weight", "bias"}),
        ({"scheme": "int8_channel"}, {"codes", "codes_IO", "scales", "weight", "bias"}),
        ({"min_dim": NOTHING}, {"weight_IO", "weight", "bias"}),
    ],
    ids=["blocks", "channel", "float"],
)
def test_the_names_and_types_are_those_of_the_docs(options, endings, model, tmp_path):
    path = exported(model, tmp_path, **options)
    kinds = {"codes": (np.uint8, 3), "codes_IO": (np.int8, 2), "weight_IO": (np.float32, 2)}
    tensors = load_file(path)
    in_blocks = {name.removesuffix(".codes") for name in tensors if name.endswith(".codes")}
    assert {name.rsplit(".", 1)[-1] for name in tensors} == endings
    for name, array in tensors.items():
        owner, _, ending = name.rpartition(".")
        floats = np.float16 if ending == "scales" and owner in in_blocks else np.float32
        kind, rank = kinds.get(ending, (floats, array.ndim))
        assert (array.dtype, array.ndim) == (kind, rank), name
        if array.dtype == np.uint8:
            assert array.min() >= 1, "code -128 never occurs"
        if array.dtype == np.int8:
            assert array.min() >= -127


def test_two_runs_write_the_same_bytes(model, tmp_path):
    first = exported(model, tmp_path / "a").read_bytes()
    assert exported(model, tmp_path / "b").read_bytes() == first
