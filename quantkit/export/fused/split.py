"""A decoder cut in three graphs: token ids to features, features through the blocks, features to logits.

The blocks read no token ids and may run on an untrusted host. Their features are permuted; the embedding and
head graphs apply and undo the order with one Gather each, so that their tables and head keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from quantkit.export.fused.decoder import fused_walk
from quantkit.export.graph import Graph
from quantkit.export.walk import Stream
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

    Features come out for as many tokens up to each row's last as the mask says, like a decoder's logits.
    """
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=keeps_weights_outside)
    walk = fused_walk(graph, model_map, contents)
    width = _width(model_map)
    features = graph.input(FEATURES, TensorProto.FLOAT, ["batch", "sequence", width])
    walk.operators.read_mask(features)
    walk.operators.choose_rows()
    stream = walk.blocks(Stream(features))
    total = walk.total(stream)
    total = total if stream.pending else graph.op("Identity", total)
    graph.output(total, NEW_FEATURES, TensorProto.FLOAT, ["batch", "wanted", width])
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
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=True)
    walk = fused_walk(graph, model_map, contents)
    ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    if any(entry.table.kind is EmbeddingKind.POSITION for entry in contents.tables):
        walk.operators.positions = graph.input("position_ids", TensorProto.INT64, ["batch", "sequence"])
    x = walk.embed(ids)
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
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=True)
    walk = fused_walk(graph, model_map, contents)
    x = graph.input(NEW_FEATURES, TensorProto.FLOAT, ["batch", "sequence", _width(model_map)])
    if order_I is not None:
        x = graph.op("Gather", x, graph.constant("order_back", np.argsort(order_I)), axis=2)
    logits, num_logits = walk.logits(Stream(x))
    graph.output(logits, "logits", TensorProto.FLOAT, ["batch", "sequence", num_logits])
    return graph.finish(name="head", target=target, metadata=metadata)


def _width(model_map: ModelMap) -> int:
    assert model_map.hidden_size, "a decoder's blocks have a width"
    return model_map.hidden_size


def read_blocks(path: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of a host's file by its name, as the host can read it."""
    model = onnx.load(str(path))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
