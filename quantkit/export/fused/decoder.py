"""Decoders written straight from a family's facts as fused graphs, without tracing any code.

A traced graph spells a transformer in hundreds of small operators that a runtime must put together again,
and copies the key-value cache at each step. Here every block is what the runtime is fast at: one product for
query, key and value, one attention operator that rotates, caches and attends, one activation, few norms.
Which norms stand where, which heads are shared and what is scaled all come from the model map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from quantkit.errors import InputError
from quantkit.export import operators
from quantkit.export.fused.latent import add_latents, keeps_latents
from quantkit.export.graph import CONTRIB, Graph
from quantkit.export.rotary import rotation_of
from quantkit.model.model_map import (
    Attention,
    Block,
    EmbeddingKind,
    ModelMap,
    Norm,
    NormPlace,
    NormPlacement,
    PositionKind,
    Residual,
    Role,
)
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents

OPT_PROJECTIONS = ("project_in", "project_out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Values that every block reads."""

    last: str  # [batch], int64: column of the last token of each row that is not padding
    lengths: str  # the same in int32: with the new tokens, each row has one key more than this
    total: str  # scalar, int32
    bias: str  # [batch, 1, sequence, total]
    positions: str  # [batch, sequence], int64
    num_new: str  # [1], int64: tokens that each row is given now


def rotates_inside(facts: Attention) -> bool:
    """Whether the attention operator can rotate queries and keys itself: it wants whole vector registers."""
    return bool(facts.rotary_dim and facts.head_dim % 16 == 0 and facts.rotary_dim % 16 == 0)


def why_not(model_map: ModelMap) -> str | None:
    """Why this model cannot be emitted directly, or None when it can."""
    attentions = [attention for block in model_map.blocks for attention in block.attentions]
    positions = {attention.position for attention in attentions} - {PositionKind.LEARNED, PositionKind.ROPE}
    curves = {block.ffn.activation for block in model_map.blocks if block.ffn}
    strays = [
        layer.name
        for layer in model_map.layers
        if layer.role is Role.OTHER and not layer.name.endswith(OPT_PROJECTIONS)
    ]
    strays += [norm.name for norm in model_map.norms if norm.place in (NormPlace.EMBEDDING, NormPlace.OTHER)]
    strays += [parameter.name for parameter in model_map.unmapped]
    has_encoder = any(block.stack != "decoder" for block in model_map.blocks)
    reasons = {
        "its family has no row in the table": model_map.family is None,
        "it has an encoder": model_map.is_encoder_decoder or has_encoder,
        "it has no language-model head": all(layer.role is not Role.LM_HEAD for layer in model_map.layers),
        f"its positions are of kind {', '.join(positions)}": bool(positions),
        "its blocks are shared": any(block.calls > 1 for block in model_map.blocks),
        "its FFN has an activation without a fused operator": not curves <= set(operators.ACTIVATION_OPS),
        f"'{strays[0] if strays else ''}' has no place in a fused graph": bool(strays),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def emit_decoder(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    *,
    target: Target,
    keeps_weights_outside: bool,
    metadata: Mapping[str, Any],
) -> onnx.ModelProto:
    """The whole decoder with its cache, as one graph."""
    reason = why_not(model_map)
    if reason:
        raise InputError(f"no fused graph for it: {reason}", where=model_map.name)
    emitter = decoder_parts(model_map, contents, checkpoint, keeps_weights_outside)
    emitter.build()
    return emitter.graph.finish(name=model_map.name, target=target, metadata=metadata)


def decoder_parts(
    model_map: ModelMap, contents: Contents, checkpoint: Checkpoint, keeps_weights_outside: bool
) -> Decoder:
    """What adds parts of a decoder to an empty graph, as far as the contents hold them."""
    return Decoder(
        graph=Graph(checkpoint=checkpoint, keeps_weights_outside=keeps_weights_outside),
        model_map=model_map,
        contents=contents,
        norms={(norm.block, norm.place): norm for norm in contents.norms},
    )


@dataclass(kw_only=True, slots=True)
class Decoder:
    """The parts of a decoder, each added to the graph when it is called."""

    graph: Graph
    model_map: ModelMap
    contents: Contents
    norms: Mapping[tuple[str | None, NormPlace], Norm]
    rotations: dict[Any, int] = field(default_factory=dict)

    def build(self) -> None:
        """The whole decoder."""
        graph = self.graph
        ids = graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
        mask = graph.input("attention_mask", TensorProto.INT64, ["batch", "total"])
        positions = graph.input("position_ids", TensorProto.INT64, ["batch", "sequence"])
        shared = self.shared(ids, mask, positions)
        residual, pending = self.embed(ids, shared), ""
        places = self.wanted_places(graph.constant("num_logits", np.array([1], np.int64)), shared)
        for index, block in enumerate(self.model_map.blocks):
            # Behind the last block's attention no token reads another: there the unwanted ones end, unless
            # their latents are an output of their own.
            is_last, keeps = block is self.model_map.blocks[-1], keeps_latents(self.contents, block)
            wanted = places if is_last and not keeps else ""
            residual, pending = self.block(index, block, residual, pending, shared, wanted)
            if is_last and keeps:
                residual, pending = (
                    self.narrow(each, places) if each else "" for each in (residual, pending)
                )
        self.head(residual, pending)

    def shared(self, ids: str, mask: str, positions: str) -> Shared:
        """Lengths and the padding bias, from the mask alone.

        Rows may be padded on either side. Padding on the left keeps its places in the cache, and the bias
        hides them. A row that is padded on the right ends at the last token that the mask shows: attention
        reads no further, and the next token is written right after it, as if the row were alone.
        """
        graph = self.graph
        total = graph.op("Shape", mask, start=1, end=2)
        last = graph.op("ArgMax", mask, axis=1, keepdims=0, select_last_index=1)
        num_new = graph.op("Shape", ids, start=1, end=2)
        return Shared(
            last=last,
            lengths=graph.op("Cast", last, to=TensorProto.INT32),
            total=graph.op("Squeeze", graph.op("Cast", total, to=TensorProto.INT32)),
            bias=operators.hidden_keys(graph, mask, num_new),
            positions=positions,
            num_new=num_new,
        )

    def embed(self, ids: str, shared: Shared) -> str:
        """What the first block reads: tokens, scaled, and learned positions."""
        graph, model_map = self.graph, self.model_map
        tables = {entry.table.kind: entry for entry in self.contents.tables}
        x = operators.lookup(graph, tables[EmbeddingKind.TOKEN], ids)
        if model_map.embedding_scale:
            scale = graph.constant("embedding_scale", np.array(model_map.embedding_scale, np.float32))
            x = graph.op("Mul", x, scale)
        x = self.optional_projection("project_in", x)
        if EmbeddingKind.POSITION in tables:
            offset = graph.integers(model_map.position_offset)
            positions = (
                graph.op("Add", shared.positions, offset) if model_map.position_offset else shared.positions
            )
            learned = operators.lookup(graph, tables[EmbeddingKind.POSITION], positions)
            x = graph.op("Add", x, learned)
        return x

    def optional_projection(self, name: str, x: str) -> str:
        """A projection outside of blocks, where the family has one."""
        found = next((pack for pack in self.contents.packs if pack.name.endswith(name)), None)
        return operators.matmul(self.graph, found, x) if found else x

    def block(
        self, index: int, block: Block, residual: str, pending: str, shared: Shared, wanted: str
    ) -> tuple[str, str]:
        """(residual stream, what is still to be added to it) after one block, at the wanted places."""
        if block.norm_placement is NormPlacement.POST:
            attended = self.attention(index, block, residual, shared, wanted)
            residual = self.narrow(residual, wanted)
            residual, _ = self.add_and_norm(block, NormPlace.AFTER_ATTENTION, residual, attended, keeps=False)
            if block.ffn is None:
                return residual, ""
            fed = self.ffn(block, residual)
            return self.add_and_norm(block, NormPlace.AFTER_FFN, residual, fed, keeps=False)[0], ""
        normed, residual = self.add_and_norm(block, NormPlace.BEFORE_ATTENTION, residual, pending)
        attended = self.attention(index, block, normed, shared, wanted)
        residual = self.narrow(residual, wanted)
        if block.residual is Residual.PARALLEL:
            second = operators.norm(
                self.graph, self.norm(block, NormPlace.BEFORE_FFN), self.contents, residual
            )
            return residual, self.graph.op("Add", attended, self.ffn(block, second))
        attended = self.after(block, NormPlace.AFTER_ATTENTION, attended)
        if block.ffn is None:
            return residual, attended
        normed, residual = self.add_and_norm(block, NormPlace.BEFORE_FFN, residual, attended)
        return residual, self.after(block, NormPlace.AFTER_FFN, self.ffn(block, normed))

    def narrow(self, x: str, wanted: str) -> str:
        """Its rows at the wanted places; all of them, where none are named."""
        return self.graph.op("GatherND", x, wanted, batch_dims=1) if wanted else x

    def norm(self, block: Block | None, place: NormPlace) -> Norm:
        """The norm that stands there."""
        return self.norms[(block.name if block else None, place)]

    def after(self, block: Block, place: NormPlace, x: str) -> str:
        """A norm on a sublayer's output, where the family has one."""
        found = self.norms.get((block.name, place))
        return operators.norm(self.graph, found, self.contents, x) if found else x

    def add_and_norm(
        self, block: Block | None, place: NormPlace, residual: str, pending: str, *, keeps: bool = True
    ) -> tuple[str, str]:
        """(norm of the sum, the sum where it is kept) at this place."""
        entry = self.norm(block, place)
        if not pending:
            return operators.norm(self.graph, entry, self.contents, residual), residual
        return operators.add_and_norm(self.graph, entry, self.contents, residual, pending, keeps_sum=keeps)

    def project(self, block: Block, role: Role, x: str) -> str:
        """One product of a block."""
        pack = self.contents.pack_of(role, block.name)
        assert pack is not None, (block.name, role)
        return operators.matmul(self.graph, pack, x)

    def attention(self, index: int, block: Block, x: str, shared: Shared, wanted: str) -> str:
        """The attention of a block with its cache, up to its last projection."""
        graph, facts = self.graph, block.attentions[0]
        query, key, value = self.query_key_value(block, x, shared)
        cache: list[int | str] = ["batch", facts.num_kv_heads, "past", facts.head_dim]
        pasts = [
            graph.input(f"past_key_values.{index}.{kind}", TensorProto.FLOAT, cache)
            for kind in ("key", "value")
        ]
        # No position ids: only differences of angles count, and left padding moves a whole row alike.
        cosine, sine = self.rotation(facts) if rotates_inside(facts) else ("", "")
        attributes: dict[str, Any] = {"num_heads": facts.num_heads, "kv_num_heads": facts.num_kv_heads}
        if facts.scale is not None:
            attributes["scale"] = facts.scale
        if facts.window is not None:
            attributes["local_window_size"] = facts.window
        if facts.softcap:
            attributes["softcap"] = facts.softcap
        if cosine:
            attributes["do_rotary"] = 1
        attended, present_key, present_value = graph.ops(
            "GroupQueryAttention",
            query, key, value, *pasts, shared.lengths, shared.total, cosine, sine,
            "", shared.bias,
            name=f"{block.name}/attention", domain=CONTRIB, wanted=(True,) * 3, **attributes,
        )  # fmt: skip
        present: list[int | str] = ["batch", facts.num_kv_heads, "total", facts.head_dim]
        for kind, made in (("key", present_key), ("value", present_value)):
            graph.output(made, f"present.{index}.{kind}", TensorProto.FLOAT, present)
        return self.project(block, Role.ATTENTION_OUT, self.narrow(attended, wanted))

    def query_key_value(self, block: Block, x: str, shared: Shared) -> tuple[str, str, str]:
        """One packed value and two empty names, or three values where they are needed apart."""
        graph, facts = self.graph, block.attentions[0]
        pack = self.contents.pack_of(Role.ATTENTION_QUERY, block.name)
        assert pack is not None
        rotates_apart = facts.position is PositionKind.ROPE and not rotates_inside(facts)
        query_width, kv_width = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
        if len(pack.layers) == 3:
            packed = operators.matmul(graph, pack, x)
            if not facts.has_query_key_norm and not rotates_apart:
                return packed, "", ""
            widths = graph.integers(query_width, kv_width, kv_width)
            parts = graph.ops("Split", packed, widths, wanted=(True,) * 3, axis=-1)
        else:
            roles = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
            parts = [self.project(block, role, x) for role in roles]
        query, key, value = parts
        if facts.has_query_key_norm:
            query = self.head_norm(block, NormPlace.QUERY, query, query_width)
            key = self.head_norm(block, NormPlace.KEY, key, kv_width)
        if rotates_apart:
            query = self.rotate(facts, query, facts.num_heads, shared)
            key = self.rotate(facts, key, facts.num_kv_heads, shared)
        return query, key, value

    def rotate(self, facts: Attention, x: str, num_heads: int, shared: Shared) -> str:
        """Rotation as a node of its own, for sizes that the attention operator does not take."""
        cosine, sine = self.rotation(facts)
        width = num_heads * facts.head_dim
        x = self.graph.op(
            "RotaryEmbedding", x, shared.positions, cosine, sine, domain=CONTRIB,
            num_heads=num_heads, rotary_embedding_dim=facts.rotary_dim,
        )  # fmt: skip
        return self.graph.op("Reshape", x, self.graph.integers(0, 0, width))

    def head_norm(self, block: Block, place: NormPlace, x: str, width: int) -> str:
        """A norm of every head on its own."""
        graph, head_dim = self.graph, block.attentions[0].head_dim
        heads = graph.op("Reshape", x, graph.integers(0, 0, width // head_dim, head_dim))
        normed = operators.norm(graph, self.norm(block, place), self.contents, heads)
        return graph.op("Reshape", normed, graph.integers(0, 0, width))

    def rotation(self, facts: Attention) -> tuple[str, str]:
        """Names of the cosine and sine tables, one pair for all blocks that turn alike."""
        graph = self.graph
        key = (facts.rope_theta, facts.rotary_dim, facts.rope_scaling)
        label = f"rope_{self.rotations.setdefault(key, len(self.rotations))}"
        if f"{label}/cos" not in graph.initializers:
            limit = self.model_map.max_positions or 2048
            turn = rotation_of(facts, max_positions=limit)
            positions = np.arange(turn.max_positions or limit, dtype=np.float32)
            angles = positions[:, None] * turn.frequencies[None, :]
            graph.constant(f"{label}/cos", (np.cos(angles) * turn.factor).astype(np.float32))
            graph.constant(f"{label}/sin", (np.sin(angles) * turn.factor).astype(np.float32))
        return f"{label}/cos", f"{label}/sin"

    def ffn(self, block: Block, x: str) -> str:
        """The FFN of a block."""
        assert block.ffn is not None
        up = self.project(block, Role.FFN_UP, x)
        add_latents(self.graph, self.contents, block, up)
        if self.contents.pack_of(Role.FFN_GATE, block.name):
            gate = self.project(block, Role.FFN_GATE, x)
            gate = operators.activation(self.graph, block.ffn.activation, gate, name=block.name)
            hidden = self.graph.op("Mul", gate, up)
        else:
            hidden = operators.activation(self.graph, block.ffn.activation, up, name=block.name)
        return self.project(block, Role.FFN_DOWN, hidden)

    def head(self, residual: str, pending: str) -> None:
        """Logits of each row's last token; of `num_logits` tokens up to it, where a caller sets that."""
        graph = self.graph
        logits, num_rows = self.logits(residual, pending)
        # Declared as one position, by which onnxruntime-genai knows that a prompt yields no more.
        graph.output(logits, "logits", TensorProto.FLOAT, ["batch", 1, num_rows])
        graph.inputs.append(onnx.helper.make_tensor_value_info("num_logits", TensorProto.INT64, [1]))

    def logits(self, residual: str, pending: str) -> tuple[str, int]:
        """(logits, how many a token has) by the last norm and the head."""
        graph = self.graph
        if (None, NormPlace.FINAL) in self.norms:
            residual, _ = self.add_and_norm(None, NormPlace.FINAL, residual, pending, keeps=False)
        elif pending:
            residual = graph.op("Add", residual, pending)
        residual = self.optional_projection("project_out", residual)
        pack = self.contents.pack_of(Role.LM_HEAD)
        assert pack is not None, "why_not asks for a head"
        logits = operators.matmul(graph, pack, residual)
        if self.model_map.final_softcap:
            cap = graph.constant("softcap", np.array(self.model_map.final_softcap, np.float32))
            logits = graph.op("Mul", graph.op("Tanh", graph.op("Div", logits, cap)), cap)
        return logits, pack.out_features

    def wanted_places(self, wanted: str, shared: Shared) -> str:
        """Which new tokens have logits, [batch, wanted, 1]: those up to each row's last that is not padding.

        A row with fewer tokens than that starts at its first, so whoever wants all of them has them in order.
        """
        graph = self.graph
        zero, one = (graph.constant(f"i64_scalar_{value}", np.array(value, np.int64)) for value in (0, 1))
        # After the last new token, or in a prompt that is padded on the right, where its padding begins.
        end = graph.op("Min", graph.op("Add", shared.last, one), shared.num_new)
        first = graph.op("Max", graph.op("Sub", end, wanted), zero)
        count = graph.op("Squeeze", graph.op("Min", wanted, shared.num_new))
        steps = graph.op("Range", zero, count, one)
        places = graph.op("Add", graph.op("Unsqueeze", first, graph.integers(1)), steps)
        return graph.op("Unsqueeze", places, graph.integers(2))
