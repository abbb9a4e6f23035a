"""Structure-aware mutations of seeds: the format mostly stays valid, so that deep readers are reached."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

DEEP = "@deep@"  # becomes 5,000 lists in each other
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 1.5, -0.0, 10**8, 10**9, 2**31, 2**63, 10**30, -(10**9), 1e308,
    float("nan"), float("inf"), "", "x", "x" * 10_000, "\ud800", "\x00", "\x1b[31m", "../../x", "/etc/passwd",
    "1", "nan", "é", [], {}, [[]], [None], [1, "a"], {"a": {}}, {"": None}, DEEP,
]  # fmt: skip
YAML_LINES = (
    "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]", "seed: 1\nseed: 2",
    "select: {min_dim: 1, min_dim: 2}",
    "<<: {seed: 3}", "x: !!python/object/apply:os.system [ls]", "? [a, b]\n: 1", "\tseed: 3",
    "--- 3", "%YAML 9",
    "seed: 0x" + "f" * 5000, "seed: 1_0:59:59", "date: 2024-13-45", "[" * 5000,
    "x: |2\n y", "*a", "&a", "!", "}",
    "a" * 5000 + ": 1", "- 1", "...",
)  # fmt: skip


def _places(document: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    places = []
    for key, value in pairs:
        places.append((*place, key))
        if isinstance(value, (dict, list)):
            places += _places(value, (*place, key))
    return places


@st.composite
def documents(draw: st.DrawFn, seed: Any) -> Any:
    """The seed with one to four values changed, removed, renamed, copied or exchanged."""
    document = copy.deepcopy(seed)
    for _ in range(draw(st.integers(1, 4))):
        places = _places(document)
        if not places:
            return copy.deepcopy(draw(st.sampled_from([document, *VALUES])))
        *parents, key = draw(st.sampled_from(places))
        holder = document
        for parent in parents:
            holder = holder[parent]
        edit = draw(st.sampled_from(("set", "set", "set", "remove", "rename", "exchange", "wrap")))
        if edit == "set":
            holder[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
        elif edit == "remove":
            del holder[key]
        elif edit == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5))] = holder.pop(key)
        elif edit == "exchange":
            other = seed
            for step in draw(st.sampled_from(_places(seed))):
                other = other[step]
            holder[key] = copy.deepcopy(other)
        else:
            holder[key] = [holder[key]]
    return document


def json_text(document: Any) -> str:
    return json.dumps(document).replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Truncated, flipped, overwritten, doubled, or with bytes put in."""
    at = draw(st.integers(0, max(0, len(content) - 1)))
    size = draw(st.integers(0, 64))
    edits = {
        "cut": lambda: content[:at],
        "flip": lambda: content[:at] + bytes(byte ^ 1 for byte in content[at : at + 1]) + content[at + 1 :],
        "zero": lambda: content[:at] + bytes(size) + content[at + size :],
        "random": lambda: content[:at] + draw(st.binary(max_size=size)) + content[at + size :],
        "put in": lambda: content[:at] + draw(st.binary(max_size=size)) + content[at:],
        "double": lambda: content + content,
        "without": lambda: content[:at] + content[at + size :],
        "other": lambda: draw(st.binary(max_size=200)),
    }  # fmt: skip
    return edits[draw(st.sampled_from(sorted(edits)))]()


@st.composite
def json_files(draw: st.DrawFn, seed: bytes) -> bytes:
    content = json_text(draw(documents(json.loads(seed)))).encode()
    return draw(damaged(content)) if draw(st.integers(0, 7)) == 0 else content


@st.composite
def yaml_files(draw: st.DrawFn, seed: bytes) -> bytes:
    document = draw(documents(yaml.load(seed, yaml.CSafeLoader)))  # libyaml: ten times as fast
    text = json_text(document) if draw(st.booleans()) else _yaml_text(document)
    lines = text.splitlines()
    for _ in range(draw(st.integers(0, 2))):
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(YAML_LINES)))
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    return draw(damaged(content)) if draw(st.integers(0, 7)) == 0 else content


def _yaml_text(document: Any) -> str:
    try:
        return yaml.dump(document, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=False)
    except UnicodeEncodeError:  # half of a character, which libyaml does not write
        return yaml.dump(document, Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=False)


@st.composite
def safetensors_files(draw: st.DrawFn, seed: bytes) -> bytes:
    length = int.from_bytes(seed[:8], "little")
    header = draw(documents(json.loads(seed[8 : 8 + length])))
    if draw(st.integers(0, 9)) == 0 and isinstance(header, dict) and header:
        header[draw(st.sampled_from(list(header)))] = {
            "dtype": "F32",
            "shape": [1] * 5000,
            "data_offsets": [0, 4],
        }
    text = json_text(header).encode()
    told = draw(st.sampled_from((len(text), len(text), len(text), 0, 2**63, len(text) + 8)))
    content = told.to_bytes(8, "little") + text + seed[8 + length :]
    return draw(damaged(content)) if draw(st.integers(0, 4)) == 0 else content


@st.composite
def gguf_files(draw: st.DrawFn, seed: bytes) -> bytes:
    """Numbers of the header overwritten, keys and names renamed, or bytes damaged anywhere."""
    content = bytearray(seed)
    end = seed.rindex(b".weight") + 32  # of the header
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from((4, 8)))
        values = (0, 1, 2, 3, 7, 8, 9, 12, 31, 255, 1 << 20, (1 << 31) - 1, (1 << 63) - 1, (1 << 64) - 1)
        value = draw(st.sampled_from(values)) % (1 << 8 * size)
        word = draw(
            st.sampled_from((b"GGUF", b"llama.", b"tokenizer.", b"blk.", b"\x08\0\0\0", b"\x09\0\0\0"))
        )
        place = seed.find(word, draw(st.integers(0, end)))
        place = draw(st.integers(0, end)) if place < 0 else place + draw(st.integers(-8, 32))
        place = max(0, place)
        content[place : place + size] = value.to_bytes(size, "little")
    return draw(damaged(bytes(content))) if draw(st.integers(0, 4)) == 0 else bytes(content)


@st.composite
def npy_files(draw: st.DrawFn, seed: bytes) -> bytes:
    kind = draw(st.sampled_from(("header", "header", "array", "bytes")))
    if kind == "bytes":
        return draw(damaged(seed))
    if kind == "array":
        types = (
            "int8",
            "uint64",
            "int64",
            "float32",
            "bool",
            "U3",
            "S2",
            "datetime64[s]",
            "complex64",
            "i4,f4",
        )
        values = np.zeros(
            draw(st.sampled_from(((), (0,), (9,), (3, 4), (0, 3), (3, 0), (2, 3, 4)))),
            draw(st.sampled_from(types)),
        )
        file = io.BytesIO()
        np.save(file, values)
        return file.getvalue()
    size = st.sampled_from((0, 1, 5, -1, 10**9, 10**12, 10**18, 10**30))
    shape = tuple(draw(st.lists(size, max_size=4)) or [1] * draw(st.sampled_from((0, 40, 3000))))
    described = draw(
        st.sampled_from(
            (
                "'<i8'",
                "'|O'",
                "'<i4'",
                "'>u2'",
                "[('a', '<i8')]",
                "'<V9'",
                "3",
                "'nonsense'",
                "'<U1000000000'",
            )
        )
    )
    order = draw(st.sampled_from(("False", "True", "3")))
    header = f"{{'descr': {described}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    version = draw(st.sampled_from((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x09\x00")))
    width = 2 if version == b"\x01\x00" else 4
    return b"\x93NUMPY" + version + (len(header) % 256**width).to_bytes(width, "little") + header + bytes(64)


@st.composite
def onnx_files(draw: st.DrawFn, seed: bytes) -> bytes:
    """The metadata of the graph as a mutated document, names and sizes of inputs and outputs changed."""
    import onnx

    if draw(st.integers(0, 4)) == 0:
        return draw(damaged(seed))
    model = onnx.load_from_string(seed)
    for entry in model.metadata_props:
        if entry.key == "quantkit" and draw(st.booleans()):
            entry.value = json_text(draw(documents(json.loads(entry.value))))
            if draw(st.integers(0, 5)) == 0:
                entry.value = draw(
                    st.sampled_from(("", "[", "[]", "3", "null", "[" * 5000, '{"max_positions": "a"}'))
                )
    values = [*model.graph.input, *model.graph.output]
    for _ in range(draw(st.integers(0, 2))):
        value = draw(st.sampled_from(values))
        edit = draw(st.sampled_from(("name", "sizes", "size", "type", "remove")))
        sizes = value.type.tensor_type.shape.dim
        if edit == "name":
            value.name = draw(st.sampled_from(("x", "", "input_ids", "logits", "past_key_values.0.key", "é")))
        elif edit == "sizes":
            del sizes[draw(st.integers(0, max(0, len(sizes) - 1))) :]
        elif edit == "size" and sizes:
            draw(st.sampled_from(list(sizes))).dim_value = draw(st.sampled_from((0, 1, 7, -1, 10**9, 2**62)))
        elif edit == "type":
            value.type.tensor_type.elem_type = draw(st.integers(0, 20))
        elif value in model.graph.input:
            model.graph.input.remove(value)
    return bytes(model.SerializeToString())


@st.composite
def text_files(draw: st.DrawFn, seed: bytes) -> bytes:
    kinds = (
        b"",
        b"\xff\xfe\x00a",
        b"\x00" * 50,
        b"w1 " * 5000,
        b"a" * 50_000,
        "\u202e é \U0001f600".encode() * 20,
    )
    return draw(st.one_of(damaged(seed), st.sampled_from(kinds), st.binary(max_size=500)))
