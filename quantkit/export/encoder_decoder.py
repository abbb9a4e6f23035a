"""The walk over the two stacks of an encoder-decoder, in whichever dialect of operators.

The encoder reads a text once. The decoder writes another one: each of its blocks attends to the tokens that
are written so far and then to the encoder's states, whose keys and values are computed with the first token
and kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from quantkit.export.operators import ACTIVATION_OPS
from quantkit.export.walk import Operators, Stream, Walk, norm_at
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
from quantkit.quantization.layout import Contents, TableEntry

ENCODER, DECODER = "encoder", "decoder"
PLACEMENTS = (NormPlacement.PRE, NormPlacement.POST)
POSITIONS = (PositionKind.LEARNED, PositionKind.RELATIVE)
EMBEDDED_KINDS = (EmbeddingKind.TOKEN, EmbeddingKind.POSITION, EmbeddingKind.POSITION_BIAS)


def why_not_encoder_decoder(model_map: ModelMap) -> str | None:
    """Why this model cannot be emitted as an encoder and a decoder, or None when it can."""
    stacks = {block.stack for block in model_map.blocks}
    if model_map.family is None or not model_map.is_encoder_decoder or stacks != {ENCODER, DECODER}:
        return "it is no encoder with a decoder of a family in the table"
    return next(_reasons(model_map), None)


def _reasons(model_map: ModelMap) -> Iterator[str]:
    if all(layer.role is not Role.LM_HEAD for layer in model_map.layers):
        yield "it has no language-model head"
    for block in model_map.blocks:
        attention, *others = block.attentions
        is_decoder = block.stack == DECODER
        has_bias = model_map.position_bias_of(block.stack) is not None
        if block.norm_placement not in PLACEMENTS or block.residual is not Residual.SEQUENTIAL:
            yield f"'{block.name}' has neither a norm before each sublayer nor one after each sum"
        if block.calls > 1 or block.mixture:
            yield f"'{block.name}' is shared, or a mixture of experts"
        if [other.is_cross for other in others] != [True] * is_decoder or attention.is_causal != is_decoder:
            yield f"'{block.name}' does not attend as an encoder or a decoder does"
        if attention.position not in POSITIONS or has_bias != (attention.position is PositionKind.RELATIVE):
            yield f"its positions are of kind {attention.position}"
        if any(not _is_plain(each) for each in block.attentions):
            yield f"'{block.name}' has more than plain attention"
        if block.ffn is None or block.ffn.activation not in ACTIVATION_OPS:
            yield "its FFN has an activation without a fused operator"
    strays = [layer.name for layer in model_map.layers if layer.role is Role.OTHER]
    strays += [norm.name for norm in model_map.norms if norm.place is NormPlace.OTHER]
    strays += [table.name for table in model_map.embeddings if table.kind not in EMBEDDED_KINDS]
    strays += [parameter.name for parameter in model_map.unmapped]
    if strays:
        yield f"'{strays[0]}' has no place in a fused graph"


def _is_plain(attention: Attention) -> bool:
    bends = (attention.window, attention.softcap, attention.clip)
    return (
        attention.num_kv_heads == attention.num_heads
        and not attention.has_query_key_norm
        and all(fact is None for fact in bends)
    )


def stack_of(name: str) -> str:
    """The stack that a module lies in; the encoder for one that both share."""
    return DECODER if DECODER in name.split(".") else ENCODER


def map_of(model_map: ModelMap, stack: str) -> ModelMap:
    """The map with the blocks of one stack alone."""
    return replace(model_map, blocks=tuple(block for block in model_map.blocks if block.stack == stack))


def contents_of_stack(contents: Contents, stack: str) -> Contents:
    """The layout with the norms and tables that one stack reads."""

    def reads(entry: TableEntry) -> bool:
        # A table of both has names in both, or one outside of them.
        names = (entry.table.name, *entry.table.aliases)
        return any(stack in name.split(".") or _is_shared(name) for name in names)

    return replace(
        contents,
        norms=tuple(norm for norm in contents.norms if stack_of(norm.name) == stack),
        tables=tuple(entry for entry in contents.tables if reads(entry)),
    )


def _is_shared(name: str) -> bool:
    return not {ENCODER, DECODER} & set(name.split("."))


class StackOperators(Operators, Protocol):
    """The nodes outside of a stack's blocks."""

    def embed(self, ids: str) -> str:
        """Tokens, scaled where the family does that, and learned positions."""

    def output(self, name: str, x: str, width: int | None) -> str:
        """An output of one row for each token; returns the name under which the value is read on."""


class DecoderStackOperators(StackOperators, Protocol):
    def cross_attention(self, block: Block, query: str) -> str:
        """Attention to the encoder's states, up to its output projection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackWalk(Walk):
    """Adds one of the two stacks to a graph; the map holds its blocks alone."""

    operators: StackOperators

    def states(self, x: str) -> str:
        """States behind the last block, normed, from embeddings."""
        norm = self.outer_norm(NormPlace.EMBEDDING)
        stream = Stream(self.operators.norm(norm, x) if norm else x)
        for block in self.model_map.blocks:
            stream = self.block(block, stream)
        norm = self.outer_norm(NormPlace.FINAL)
        return self.operators.norm_stream(norm, stream, keeps_sum=False)[0] if norm else self.total(stream)

    def outer_norm(self, place: NormPlace) -> Norm | None:
        return norm_at(self.operators.contents, None, place)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderStackWalk(StackWalk):
    """Adds the decoder, which reads the encoder's states."""

    operators: DecoderStackOperators

    def cross_attention(self, block: Block, x: str) -> str:
        operators = self.operators
        query = operators.project(self.pack(Role.ATTENTION_QUERY, block, is_cross=True), x)
        attended = operators.cross_attention(block, query)
        return operators.project(self.pack(Role.ATTENTION_OUT, block, is_cross=True), attended)

    def logits(self, states: str) -> None:
        """The output with the logits of every token."""
        operators, pack = self.operators, self.pack(Role.LM_HEAD)
        if self.model_map.head_scale:
            states = operators.scale(states, self.model_map.head_scale, "head_scale")
        logits = operators.project(pack, states)
        if self.model_map.logit_bias:
            logits = operators.graph.op("Add", logits, operators.graph.weight(self.model_map.logit_bias))
        operators.output("logits", logits, pack.out_features)
