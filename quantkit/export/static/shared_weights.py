"""Graphs that share one file of weights: each tensor lies there once, whoever reads it.

The graphs of a static model hold the same weights, so inside of the files they would lie on disk twice.
Tensors that an emitter left in the quantized checkpoint are copied from there a piece at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import onnx
from onnx import TensorProto

LEAST_BYTES = 1024  # smaller ones stay inside: runtimes fold shapes and constants only from there
ALIGNMENT = 64
PIECE = 16 << 20


def share_weights(models: Mapping[str, onnx.ModelProto], path: Path, *, kept_in: Path) -> None:
    """Move the tensors of the graphs into one file; those that lie outside already lie in `kept_in`."""
    places: dict[tuple[bytes | str, ...], tuple[int, int]] = {}
    with path.open("wb") as written, kept_in.open("rb") as kept:
        for model in models.values():
            for tensor in model.graph.initializer:
                external = {entry.key: entry.value for entry in tensor.external_data}
                if not external and len(tensor.raw_data) < LEAST_BYTES:
                    continue
                key = (
                    ("kept", external["offset"], external["length"])
                    if external
                    else ("made", hashlib.sha256(tensor.raw_data).digest())
                )
                if key not in places:
                    written.write(bytes(-written.tell() % ALIGNMENT))
                    begin = written.tell()
                    for piece in _pieces(tensor, external, kept):
                        written.write(piece)
                    places[key] = (begin, written.tell() - begin)
                _point(tensor, path.name, *places[key])


def _pieces(tensor: TensorProto, external: Mapping[str, str], kept: IO[bytes]) -> Iterator[bytes]:
    if not external:
        yield tensor.raw_data
        return
    kept.seek(int(external["offset"]))
    left = int(external["length"])
    while left:
        piece = kept.read(min(left, PIECE))
        assert piece, f"the checkpoint ends inside of {tensor.name}"
        left -= len(piece)
        yield piece


def _point(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def with_all_logits(path: Path) -> bytes:
    """A prompt's graph with the logits of every token: the same file without the choice of one of them."""
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    places = [each for each in graph.input if each.name == "logit_position"]
    if not places:
        return path.read_bytes()
    chosen = next(node for node in graph.node if "logit_position" in node.input)
    for node in graph.node:
        for number, name in enumerate(node.input):
            if name == chosen.output[0]:
                node.input[number] = chosen.input[0]
    graph.node.remove(chosen)
    graph.input.remove(places[0])
    tokens = (
        next(each for each in graph.input if each.name == "input_ids").type.tensor_type.shape.dim[1].dim_value
    )
    (logits,) = (each for each in graph.output if each.name == "logits")
    sizes = logits.type.tensor_type.shape.dim
    sizes[1].dim_value = tokens
    _reshape_to(model, [size.dim_value for size in sizes])
    raw: bytes = model.SerializeToString()
    return raw


def _reshape_to(model: onnx.ModelProto, sizes: list[int]) -> None:
    """The last Reshape, which gives logits their batch, told how many tokens there are now."""
    node = next(each for each in reversed(model.graph.node) if each.op_type == "Reshape")
    label = f"{node.name}/sizes"
    node.input[1] = label
    model.graph.initializer.append(onnx.helper.make_tensor(label, TensorProto.INT64, [len(sizes)], sizes))
