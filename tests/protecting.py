"""What tests of protected models share: both sides beside the whole model, and norms that see no order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from exporting import write_model
from onnx import TensorProto, helper, numpy_helper

from quantkit.model.inspect import inspect
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.pipeline.stages.export import write_companions
from quantkit.plan.select import choose
from quantkit.private.host.model import FEATURES, NEW_FEATURES
from quantkit.private.keys import Key, open_key
from quantkit.private.protect import fingerprint, protect
from quantkit.recipe import Recipe, override
from quantkit.runtime.cpu_session import open_on_cpu
from quantkit.runtime.decoder import cached_values, decoder_of, positions_of

ALL = ("residual", "ffn", "values")
NORMS = ("LayerNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")


@dataclass(frozen=True)
class Pair:
    """A model split, the same in one piece, and the key."""

    host: Path
    client: Path
    whole: Path
    key: Key
    key_file: Path

    @property
    def parts(self) -> tuple[Path, ...]:
        """The three graphs in the order of a token's way."""
        return self.client / "embedding.onnx", self.host / "model.onnx", self.client / "head.onnx"


def split(
    model: Path | str, out: Path, *, scheme="int8_block32", permutes=ALL, min_dim=1, makes_whole=True, **more
) -> Pair:
    """Both sides and the whole model, by the same recipe and without any other transform."""
    settings = {"scheme": scheme, "transforms": [], "select.min_dim": min_dim, **more}
    recipe = override(Recipe(model=str(model)), settings)
    key_file = out / "feature.key"
    made = protect(recipe, key_file=key_file, output=out / "split", permutes=permutes, quiet=True)
    assert made.makes_key
    source, model_map = open_source(str(model)), inspect(str(model))
    weights = open_weights(source, model_map, random_weights=False)
    whole = out / "whole"
    whole.mkdir()
    if makes_whole:
        plan = choose(model_map, min_dim=min_dim)
        write_model(model_map, plan, weights, whole, scheme=scheme)
        write_companions(source, model_map, whole)
    return Pair(
        host=made.folder / "host",
        client=made.folder / "client",
        whole=whole,
        key=open_key(key_file, fingerprint(source.config, model_map, weights)),
        key_file=key_file,
    )


def orderless(path: Path) -> onnxruntime.InferenceSession:
    """The graph with every norm in float64: rounded to float32, a sum then is the same in any order."""
    model = onnx.load(str(path))
    nodes = []
    for node in model.graph.node:
        nodes.extend(_in_double(node) if node.op_type in NORMS else [node])
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), "last_axis"))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    return open_on_cpu(model.SerializeToString(), options)


def _in_double(node):
    name, epsilon = node.name, next(each.f for each in node.attribute if each.name == "epsilon")
    made = []

    def op(op_type, *inputs, output="", **attributes):
        output = output or f"{name}/double{len(made)}"
        made.append(helper.make_node(op_type, inputs, [output], name=f"{output}/node", **attributes))
        return output

    def double(value):
        return op("Cast", value, to=TensorProto.DOUBLE)

    def constant(value):
        tensor = numpy_helper.from_array(np.array(value, np.float64))
        return op("Constant", value=tensor)

    inputs = list(node.input)
    if node.op_type.startswith("Skip"):
        pending, residual, gain = inputs[:3]
        total = op("Add", pending, residual, output=node.output[3] if len(node.output) > 3 else "")
        bias = ""
    else:
        total, gain, bias = [*inputs, ""][:3]
    x = double(total)
    if node.op_type == "LayerNormalization":
        x = op("Sub", x, op("ReduceMean", x, "last_axis"))
    square = op("ReduceMean", op("Mul", x, x), "last_axis")
    x = op("Div", x, op("Sqrt", op("Add", square, constant(epsilon))))
    x = op("Mul", x, double(gain))
    if bias:
        x = op("Add", x, double(bias))
    op("Cast", x, output=node.output[0], to=TensorProto.FLOAT)
    return made


def whole_text(decoder, features_BTI):
    """(features of all positions, caches) of the host's blocks."""
    batch, length, _ = features_BTI.shape
    mask = np.ones((batch, length), np.int64)
    if mask.size % 2 and length < decoder.context:  # for the reason that runtime/decoder.py gives
        features_BTI, mask = np.pad(features_BTI, ((0, 0), (0, 1), (0, 0))), np.pad(mask, ((0, 0), (0, 1)))
    feeds = {
        FEATURES: np.ascontiguousarray(features_BTI, np.float32),
        "attention_mask": mask * length,
        "position_ids": positions_of(mask, mask.shape[1]),
    }
    for past, _, heads, width in decoder.caches:
        feeds[past] = np.zeros((batch, heads, 0, width), np.float32)
    names = [NEW_FEATURES, *(present for _, present, _, _ in decoder.caches)]
    features, *caches = decoder.session.run(names, feeds)
    return features[:, :length], [cache[:, :, :length] for cache in caches]


def whole_run(session, ids):
    """(logits of all positions, caches) of the model in one piece."""
    decoder = decoder_of(session)
    feeds = {
        "input_ids": ids,
        "attention_mask": np.full_like(ids, ids.shape[1]),
        "position_ids": np.arange(ids.shape[1])[None].repeat(len(ids), 0),
    }
    for past, _, heads, width in decoder.caches:
        feeds[past] = np.zeros((len(ids), heads, 0, width), np.float32)
    return session.run(["logits"], feeds)[0], cached_values(decoder, ids)


def split_run(embedding, blocks, head, ids):
    """The same of both sides, by their graphs alone."""
    feeds = {"input_ids": ids}
    if len(embedding.get_inputs()) == 2:
        feeds["position_ids"] = np.arange(ids.shape[1])[None].repeat(len(ids), 0)
    features = embedding.run(None, feeds)[0]
    made, cached = whole_text(decoder_of(blocks), features)
    return head.run(None, {"new_features": made})[0], cached
