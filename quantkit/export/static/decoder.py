"""Decoders as static graphs: one for a whole prompt, one for a single token behind a cache of fixed length.

Neither graph writes into a cache: it gives the keys and values of its own tokens, and the host puts them
where they belong. The two graphs name a value alike, so that ranges found in one hold for the other.

Two graphs of fixed shape for prompt and token, e.g. in Xu et al. 2024 (https://arxiv.org/abs/2407.05858).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export.decoder import DecoderWalk, why_not
from quantkit.export.graph import Graph
from quantkit.export.static.operators import StaticOperators, StaticShape
from quantkit.export.walk import Stream
from quantkit.model.model_map import ModelMap
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents


def why_not_static(model_map: ModelMap, shape: StaticShape) -> str | None:
    """Why this model has no such graph, or None when it has."""
    windows = [attention.window for block in model_map.blocks for attention in block.attentions]
    limits = [window for window in windows if window is not None and window < shape.total]
    reason = why_not(model_map)
    if reason is None and limits:
        reason = (
            f"its attention looks back {min(limits)} tokens only, and {shape.total} places were asked for"
        )
    if reason is None and any(attention.clip for block in model_map.blocks for attention in block.attentions):
        reason = "it clips queries, keys and values"
    if reason is None and any(block.mixture for block in model_map.blocks):
        reason = "its tokens choose among experts, so that shapes depend on the text"
    context = model_map.context
    if reason is None and context and shape.total > context:
        reason = f"it has {context} positions, and {shape.total} were asked for"
    return reason


def emit_static(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    *,
    shape: StaticShape,
    target: Target,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """One float graph of fixed shapes; batch 1. Inputs and outputs:

    input_ids [1, tokens], attention_mask [1, past + tokens], position_ids [1, tokens] where there is a past,
    logit_position [1] unless all logits are given, all int32; past_key_values.N.key and .value
    [1, heads, past, head size] -> logits, present.N.key and .value [1, heads, tokens, head size].
    """
    reason = why_not_static(model_map, shape)
    if reason:
        raise InputError(f"no static graph for it: {reason}", where=model_map.name)
    graph = Graph(checkpoint=checkpoint, keeps_weights_outside=False)
    operators = StaticOperators(
        graph=graph,
        model_map=model_map,
        contents=contents,
        shape=shape,
        spells_norms="RMSNormalization" not in (target.standard_operators or ("RMSNormalization",)),
    )
    walk = DecoderWalk(model_map=model_map, operators=operators)
    ids = graph.input("input_ids", TensorProto.INT32, [1, shape.tokens])
    operators.read_mask()
    logits, num_classes = walk.logits(walk.blocks(Stream(walk.embed(ids))))
    sizes = (1, shape.tokens if shape.gives_all_logits else 1, num_classes)
    logits = operators.reshape("logits/shaped", logits, *sizes)
    graph.output(logits, "logits", TensorProto.FLOAT, sizes)
    described = {**metadata, "tokens": shape.tokens, "past": shape.past}
    return graph.finish(name=model_map.name, target=target, metadata=described)
