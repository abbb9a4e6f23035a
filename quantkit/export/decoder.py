"""The walk over a decoder: embedding, blocks, final norm and head, in whichever dialect of operators.

Everything comes from the model map; no code of the original is traced. A traced graph spells a transformer in
hundreds of small operators that a runtime must put together again, and copies the key-value cache at each
step. Where both graphs of a model must differ, in attention, cache and inputs, the dialects in `fused` and
`static` say how.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from quantkit.export.mixture import add_mixture
from quantkit.export.operators import ACTIVATION_OPS
from quantkit.export.walk import Operators, Stream, Walk, norm_at
from quantkit.model.model_map import Block, EmbeddingKind, ModelMap, NormPlace, PositionKind, Role
from quantkit.quantization.layout import TableEntry

EMITTED_POSITIONS = {PositionKind.LEARNED, PositionKind.ROPE, PositionKind.NONE}
OPT_PROJECTIONS = ("project_in", "project_out")  # between the widths of embeddings and blocks


def why_not(model_map: ModelMap) -> str | None:
    """Why this model cannot be emitted directly, or None when it can."""
    attentions = [attention for block in model_map.blocks for attention in block.attentions]
    positions = {attention.position for attention in attentions} - EMITTED_POSITIONS
    activations = {block.ffn.activation for block in model_map.blocks if block.ffn}
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
        "its attention looks in both directions": not all(attention.is_causal for attention in attentions),
        "it rotates no part of its heads": any(attention.rotary_dim == 0 for attention in attentions),
        "its blocks are shared": any(block.calls > 1 for block in model_map.blocks),
        "its FFN has an activation without a fused operator": not activations <= set(ACTIVATION_OPS),
        f"'{strays[0] if strays else ''}' has no place in a fused graph": bool(strays),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


class DecoderOperators(Operators, Protocol):
    """The nodes outside of a decoder's blocks."""

    def token_rows(self, entry: TableEntry, ids: str, scale: float | None) -> str:
        """Rows of the token embedding, scaled where the family does that."""

    def position_rows(self, entry: TableEntry) -> str:
        """Rows of the learned positions."""

    def softcap(self, x: str, cap: float, name: str) -> str:
        """cap tanh(x / cap)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderWalk(Walk):
    """Adds a decoder to a graph."""

    operators: DecoderOperators

    def embed(self, ids: str) -> str:
        """Token embeddings, scaled, and learned positions."""
        operators = self.operators
        tables = {entry.table.kind: entry for entry in operators.contents.tables}
        x = operators.token_rows(tables[EmbeddingKind.TOKEN], ids, self.model_map.embedding_scale)
        x = self.optional_projection(OPT_PROJECTIONS[0], x)
        if EmbeddingKind.POSITION in tables:
            positions = operators.position_rows(tables[EmbeddingKind.POSITION])
            x = operators.graph.op("Add", x, positions, name=operators.label("embedding/sum"))
        return x

    def ffn(self, block: Block, x: str) -> str:
        if block.mixture is None:
            return self.feed_forward(block, x)
        graph = self.operators.graph
        rows = graph.op("Reshape", x, graph.integers(-1, self.pack(Role.ROUTER, block).in_features))
        y = add_mixture(
            graph,
            block.mixture,
            rows,
            name=f"{block.name}/mixture",
            router=partial(self.project, block, Role.ROUTER),
            expert=lambda number, part: self.feed_forward(block, part, number),
        )
        if self.operators.contents.pack_of(Role.FFN_DOWN, block.name):
            y = graph.op("Add", y, self.shared_expert(block, rows))
        return graph.op("Reshape", y, graph.op("Shape", x))

    def shared_expert(self, block: Block, x: str) -> str:
        """The expert that every token uses, weighed by a gate where it has one."""
        y = self.feed_forward(block, x)
        if self.operators.contents.pack_of(Role.SHARED_GATE, block.name) is None:
            return y
        gate = self.project(block, Role.SHARED_GATE, x)
        return self.operators.graph.op("Mul", y, self.operators.graph.op("Sigmoid", gate))

    def optional_projection(self, name: str, x: str) -> str:
        """A projection outside of blocks, where the family has one."""
        packs = self.operators.contents.packs
        pack = next((pack for pack in packs if pack.name.endswith(name)), None)
        return self.operators.project(pack, x) if pack else x

    def blocks(self, stream: Stream) -> Stream:
        """All blocks; the stream ends with the tokens that logits are computed of."""
        *others, last = self.model_map.blocks
        for block in others:
            stream = self.block(block, stream)
        if self.operators.drops_rows_within(last):
            return self.block(last, stream, drops_rows=True)
        return self.narrow(self.block(last, stream))

    def logits(self, stream: Stream) -> tuple[str, int]:
        """(logits, their number for a token): final norm, head and softcap."""
        operators = self.operators
        norm = norm_at(operators.contents, None, NormPlace.FINAL)
        x = operators.norm_stream(norm, stream, keeps_sum=False)[0] if norm else self.total(stream)
        x = self.optional_projection(OPT_PROJECTIONS[1], x)
        pack = self.pack(Role.LM_HEAD)
        logits = operators.project(pack, x)
        if self.model_map.logit_scale:
            logits = operators.scale(logits, self.model_map.logit_scale, "logit_scale")
        if self.model_map.final_softcap:
            logits = operators.softcap(logits, self.model_map.final_softcap, "softcap")
        return logits, pack.out_features
