"""The fused dialect: the fewest nodes that onnxruntime has kernels for, weights as they are stored.

Operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantkit.export import operators
from quantkit.export.graph import CONTRIB, Graph
from quantkit.export.rotary import TABLES, Rotation, add_tables, rotation_of
from quantkit.export.walk import Stream
from quantkit.model.model_map import Activation, Attention, Block, ModelMap, Norm, NormKind
from quantkit.quantization.layout import Contents, Pack

MASKED = 1e4  # subtracted from a masked score: far enough for softmax, finite for every type


@dataclass(kw_only=True, slots=True)
class FusedOperators:
    """What decoders and encoders share; attention is their own."""

    graph: Graph
    model_map: ModelMap
    contents: Contents
    positions: str = ""  # int64, [batch, sequence], or [1] with the position of the first column
    rotations: dict[Rotation, tuple[str, str]] = field(default_factory=dict)  # cosines and sines

    def label(self, name: str) -> str:
        return ""

    def ffn_label(self, block: Block) -> str:
        return block.name

    def project(self, pack: Pack, x: str) -> str:
        return operators.matmul(self.graph, pack, x)

    def norm(self, norm: Norm, x: str) -> str:
        gain, bias = self.norm_weights(norm)
        name, epsilon = norm.name, norm.epsilon
        if norm.kind is NormKind.LAYER_NORM:
            return self.graph.op("LayerNormalization", x, gain, bias, name=name, axis=-1, epsilon=epsilon)
        return self.graph.op(
            "SimplifiedLayerNormalization", x, gain, name=name, axis=-1, epsilon=epsilon, stash_type=1
        )

    def norm_weights(self, norm: Norm) -> tuple[str, str]:
        bias = self.graph.weight(f"{norm.name}.bias") if norm.name in self.contents.norm_biases else ""
        return self.graph.weight(f"{norm.name}.weight"), bias

    def add(self, stream: Stream, branch: str, name: str) -> Stream:
        """Waits for the next norm, which adds in the same pass over memory."""
        if stream.pending:
            branch = self.graph.op("Add", stream.pending, branch)
        return Stream(stream.value, branch)

    def norm_stream(self, norm: Norm, stream: Stream, *, keeps_sum: bool = True) -> tuple[str, Stream]:
        """(norm of the sum, the sum) in as few passes over memory as the kernels allow.

        The fused kernel for layer norms is slower than its two halves (docs/log.md). They are joined by Sum
        and not by Add, because onnxruntime would fuse an Add back into the slower one.
        """
        if not stream.pending:
            return self.norm(norm, stream.value), stream
        if norm.kind is NormKind.LAYER_NORM:
            total = self.graph.op("Sum", stream.value, stream.pending, name=f"{norm.name}/sum")
            return self.norm(norm, total), Stream(total)
        outputs = self.graph.ops(
            "SkipSimplifiedLayerNormalization",
            stream.pending,
            stream.value,
            self.norm_weights(norm)[0],
            name=norm.name,
            domain=CONTRIB,
            wanted=(True, False, False, True) if keeps_sum else (True,),
            epsilon=norm.epsilon,
        )
        return outputs[0], Stream(outputs[-1])

    def activation(self, kind: Activation, x: str, name: str) -> str:
        op_type, domain = operators.ACTIVATION_OPS[kind]
        extra: dict[str, Any] = {"alpha": operators.ALPHAS[kind]} if kind in operators.ALPHAS else {}
        y = self.graph.op(op_type, x, name=f"{name}/activation", domain=domain, **extra)
        return self.graph.op("Mul", y, y) if kind is Activation.RELU_SQUARED else y

    def scale(self, x: str, factor: float, name: str) -> str:
        return self.graph.op("Mul", x, self.graph.constant(name, np.array(factor, np.float32)))

    def clip(self, x: str, limit: float) -> str:
        ends = [self.graph.constant(f"clip_{end:g}", np.array(end, np.float32)) for end in (-limit, limit)]
        return self.graph.op("Clip", x, *ends)

    def rotate(self, attention: Attention, x: str, num_heads: int) -> str:
        """Rotation as a node of its own, where the attention operator does not rotate."""
        cosine, sine = self.rotation(attention)
        width = num_heads * attention.head_dim
        x = self.graph.op(
            "RotaryEmbedding", x, self.positions, cosine, sine, domain=CONTRIB,
            num_heads=num_heads, rotary_embedding_dim=attention.rotary_dim,
            interleaved=1 if attention.rope_interleaved else None,
        )  # fmt: skip
        return self.graph.op("Reshape", x, self.graph.integers(0, 0, width))

    def rotation(self, attention: Attention) -> tuple[str, str]:
        """Names of the cosine and sine tables, one pair for all blocks that turn alike."""
        key = rotation_of(attention)
        if key not in self.rotations:
            label, context = f"{TABLES}{len(self.rotations)}", self.model_map.context or 2048
            self.rotations[key] = add_tables(self.graph, label, attention, context)
        return self.rotations[key]

    def keep_latents(self, block: Block, hidden: str) -> None:
        pass

    def drops_rows_within(self, block: Block) -> bool:
        return False

    def rows_with_logits(self, x: str) -> str:
        return x

    def padding_bias(self, mask: str, num_queries: str) -> str:
        """What hides padding from every query when it is added to scores: [batch, 1, queries, keys]."""
        graph = self.graph
        added = graph.constant("hidden_shown", np.array([-MASKED, 0], np.float32))
        row = graph.op("Unsqueeze", graph.op("Gather", added, mask), graph.integers(1, 2))
        return graph.op("Expand", row, graph.op("Concat", num_queries, graph.integers(1), axis=0))
