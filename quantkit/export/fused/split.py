"""A decoder cut in three: token ids to features, features through the blocks, features to logits.

The middle one is all work and knows neither tokens nor words; it may run where the others must not. Its
features are in an order of its own, which the other two put on and take off with one gather each, so that
their tables and their head stay number for number what they are in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from quantkit.export.fused.decoder import Shared, decoder_parts
from quantkit.model.model_map import EmbeddingKind, ModelMap
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents

Order = NDArray[np.int64]
FEATURES, NEW_FEATURES = "features", "new_features"


def emit_blocks(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    *,
    target: Target,
    keeps_weights_outside: bool,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """The blocks with their cache: features before the first to features behind the last, before any norm.

    Like logits of a whole decoder, features come out for `num_features` tokens up to each row's last; one,
    where a caller sets nothing.
    """
    emitter = decoder_parts(model_map, contents, checkpoint, keeps_weights_outside)
    graph = emitter.graph
    shape: list[int | str] = ["batch", "sequence", _width(model_map)]
    residual, pending = graph.input(FEATURES, TensorProto.FLOAT, shape), ""
    mask = graph.input("attention_mask", TensorProto.INT64, ["batch", "total"])
    positions = graph.input("position_ids", TensorProto.INT64, ["batch", "sequence"])
    shared = emitter.shared(residual, mask, positions)
    places = emitter.wanted_places(graph.constant("num_features", np.array([1], np.int64)), shared)
    for index, block in enumerate(model_map.blocks):
        wanted = places if block is model_map.blocks[-1] else ""
        residual, pending = emitter.block(index, block, residual, pending, shared, wanted)
    total = graph.op("Add", residual, pending) if pending else graph.op("Identity", residual)
    graph.output(total, NEW_FEATURES, TensorProto.FLOAT, ["batch", "wanted", _width(model_map)])
    graph.inputs.append(onnx.helper.make_tensor_value_info("num_features", TensorProto.INT64, [1]))
    return graph.finish(name=model_map.name, target=target, metadata=metadata)


def emit_embedding(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    order_I: Order | None,
    *,
    target: Target,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """Token ids to features, learned positions and all scales included, in this order."""
    emitter = decoder_parts(model_map, contents, checkpoint, keeps_weights_outside=True)
    graph = emitter.graph
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    positions = ""
    if any(entry.table.kind is EmbeddingKind.POSITION for entry in contents.tables):
        positions = graph.input("position_ids", TensorProto.INT64, ["batch", "sequence"])
    x = emitter.embed(ids, _only(positions))
    if order_I is not None:
        x = graph.op("Gather", x, graph.constant("order", order_I), axis=2)
    x = graph.op("Identity", x)
    graph.output(x, FEATURES, TensorProto.FLOAT, ["batch", "sequence", _width(model_map)])
    return graph.finish(name="embedding", target=target, metadata=metadata)


def emit_head(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    order_I: Order | None,
    *,
    target: Target,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """Features in this order to logits, by the last norm and the head."""
    emitter = decoder_parts(model_map, contents, checkpoint, keeps_weights_outside=True)
    graph = emitter.graph
    x = graph.input(NEW_FEATURES, TensorProto.FLOAT, ["batch", "sequence", _width(model_map)])
    if order_I is not None:
        x = graph.op("Gather", x, graph.constant("order_back", np.argsort(order_I)), axis=2)
    logits, num_logits = emitter.logits(x, "")
    graph.output(logits, "logits", TensorProto.FLOAT, ["batch", "sequence", num_logits])
    return graph.finish(name="head", target=target, metadata=metadata)


def _only(positions: str) -> Shared:
    """What tables read; there is no attention around to read the rest."""
    return Shared(last="", lengths="", total="", bias="", positions=positions, num_new="")


def _width(model_map: ModelMap) -> int:
    assert model_map.hidden_size, "a decoder's blocks have a width"
    return model_map.hidden_size


def read_blocks(path: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of a host's file by its name: what whoever runs it can look at."""
    model = onnx.load(str(path))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
