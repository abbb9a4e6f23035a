"""The walk over a transformer's blocks, for fused and for static graphs.

The order of a block is the same in every graph: which norms stand where, whether attention and FFN are read
in parallel, whether the FFN is gated. `Walk` follows the model map through that order; an `Operators` dialect
adds the nodes of each step. The fused dialect uses onnxruntime's own operators, the static one standard
operators of fixed shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quantkit.export.graph import Graph
from quantkit.model.model_map import (
    Activation,
    Attention,
    Block,
    ModelMap,
    Norm,
    NormPlace,
    NormPlacement,
    Residual,
    Role,
)
from quantkit.quantization.layout import PACKED_ROLES, Contents, Pack


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream: a value, and a sublayer's output that is still to be added to it."""

    value: str
    pending: str = ""


class Operators(Protocol):
    """A dialect of graphs: the nodes of every step in a block."""

    graph: Graph
    contents: Contents

    def label(self, name: str) -> str:
        """Name of a node without weights; empty where such nodes are only counted."""

    def ffn_label(self, block: Block) -> str:
        """Prefix of the names of an FFN's nodes."""

    def project(self, pack: Pack, x: str) -> str:
        """x W^T + b."""

    def norm(self, norm: Norm, x: str) -> str:
        """The norm of a value."""

    def add(self, stream: Stream, branch: str, name: str) -> Stream:
        """The stream with a sublayer's output added, now or together with the next norm."""

    def norm_stream(self, norm: Norm, stream: Stream, *, keeps_sum: bool = True) -> tuple[str, Stream]:
        """(norm of the stream, the stream with nothing pending where it is read again)."""

    def activation(self, kind: Activation, x: str, name: str) -> str:
        """The non-linearity of an FFN."""

    def query_key_value(self, attention: Attention, pack: Pack, x: str) -> list[str]:
        """Query, key and value of one pack; the packed value alone where attention reads that."""

    def attention(self, block: Block, parts: Sequence[str]) -> str:
        """Attention from the projections of query, key and value up to its output projection."""

    def scale(self, x: str, factor: float, name: str) -> str:
        """A value times a constant."""

    def keep_latents(self, block: Block, hidden: str) -> None:
        """Latents of an FFN as an output, where the block keeps them."""

    def drops_rows_within(self, block: Block) -> bool:
        """Whether the last block stops computing tokens without logits behind its attention."""

    def rows_with_logits(self, x: str) -> str:
        """The tokens of a value that logits are computed of."""


def crosses(block: Block) -> bool:
    """Whether a block reads what an encoder has read."""
    return any(attention.is_cross for attention in block.attentions)


def norm_at(contents: Contents, block: Block | None, place: NormPlace) -> Norm | None:
    name = block.name if block else None
    return next((norm for norm in contents.norms if (norm.block, norm.place) == (name, place)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """Adds the blocks of a model to a graph."""

    model_map: ModelMap
    operators: Operators

    def pack(
        self, role: Role, block: Block | None = None, expert: int | None = None, *, is_cross: bool = False
    ) -> Pack:
        name = block.name if block else None
        pack = self.operators.contents.pack_of(role, name, expert, is_cross=is_cross)
        assert pack is not None, (block, role, expert)
        return pack

    def project(self, block: Block, role: Role, x: str, expert: int | None = None) -> str:
        return self.operators.project(self.pack(role, block, expert), x)

    def norm(self, block: Block | None, place: NormPlace) -> Norm:
        norm = norm_at(self.operators.contents, block, place)
        assert norm is not None, (block, place)
        return norm

    def branch(self, block: Block, place: NormPlace, x: str) -> str:
        """A sublayer's output as it is added to the stream: normed and scaled, where the family does that."""
        norm = norm_at(self.operators.contents, block, place)
        x = self.operators.norm(norm, x) if norm else x
        scale = block.residual_scale
        return x if scale == 1 else self.operators.scale(x, scale, f"{block.name}/{place}/scaled")

    def total(self, stream: Stream) -> str:
        """The stream with nothing pending."""
        return (
            self.operators.graph.op("Add", stream.value, stream.pending) if stream.pending else stream.value
        )

    def read(self, block: Block, place: NormPlace, stream: Stream) -> tuple[str, Stream]:
        """(input of a sublayer, the stream): the norm of the stream; without that norm the stream itself."""
        norm = norm_at(self.operators.contents, block, place)
        if norm:
            return self.operators.norm_stream(norm, stream)
        total = self.total(stream)
        return total, Stream(total)

    def narrow(self, stream: Stream) -> Stream:
        """The tokens of the stream that logits are computed of."""
        rows = self.operators.rows_with_logits
        return Stream(rows(stream.value), rows(stream.pending) if stream.pending else "")

    def block(self, block: Block, stream: Stream, *, drops_rows: bool = False) -> Stream:
        """The residual stream after one block."""
        operators = self.operators
        middle, end = f"{block.name}/attended", f"{block.name}/fed"
        if block.norm_placement is NormPlacement.POST:
            attended = self.attention(block, stream.value, drops_rows)
            stream = self.narrow(stream) if drops_rows else stream
            stream = operators.add(stream, attended, middle)
            x, _ = operators.norm_stream(self.norm(block, NormPlace.AFTER_ATTENTION), stream, keeps_sum=False)
            if crosses(block):
                stream = operators.add(Stream(x), self.cross_attention(block, x), f"{block.name}/crossed")
                after = self.norm(block, NormPlace.AFTER_CROSS_ATTENTION)
                x, _ = operators.norm_stream(after, stream, keeps_sum=False)
            if block.ffn is None:
                return Stream(x)
            stream = operators.add(Stream(x), self.ffn(block, x), end)
            x, _ = operators.norm_stream(self.norm(block, NormPlace.AFTER_FFN), stream, keeps_sum=False)
            return Stream(x)
        normed, stream = self.read(block, NormPlace.BEFORE_ATTENTION, stream)
        attended = self.attention(block, normed, drops_rows)
        stream = self.narrow(stream) if drops_rows else stream
        attended = self.branch(block, NormPlace.AFTER_ATTENTION, attended)
        if block.residual is Residual.PARALLEL:
            own = norm_at(operators.contents, block, NormPlace.BEFORE_FFN)
            if own is not None:
                normed = operators.norm(own, stream.value)
            elif drops_rows:
                normed = operators.rows_with_logits(normed)
            fed = self.branch(block, NormPlace.AFTER_FFN, self.ffn(block, normed))
            return operators.add(operators.add(stream, attended, middle), fed, end)
        stream = operators.add(stream, attended, middle)
        if crosses(block):
            normed, stream = self.read(block, NormPlace.BEFORE_CROSS_ATTENTION, stream)
            stream = operators.add(stream, self.cross_attention(block, normed), f"{block.name}/crossed")
        if block.ffn is None:
            return stream
        normed, stream = self.read(block, NormPlace.BEFORE_FFN, stream)
        fed = self.branch(block, NormPlace.AFTER_FFN, self.ffn(block, normed))
        return operators.add(stream, fed, end)

    def attention(self, block: Block, x: str, drops_rows: bool) -> str:
        operators = self.operators
        pack = self.pack(Role.ATTENTION_QUERY, block)
        if len(pack.layers) == len(PACKED_ROLES):
            parts = operators.query_key_value(block.attentions[0], pack, x)
        else:
            parts = [self.project(block, role, x) for role in PACKED_ROLES]
        attended = operators.attention(block, parts)
        attended = operators.rows_with_logits(attended) if drops_rows else attended
        return self.project(block, Role.ATTENTION_OUT, attended)

    def cross_attention(self, block: Block, x: str) -> str:
        """Attention to what an encoder has read, and its output projection."""
        raise AssertionError(f"{block.name} reads an encoder, and this graph has none")

    def ffn(self, block: Block, x: str) -> str:
        return self.feed_forward(block, x)

    def feed_forward(self, block: Block, x: str, expert: int | None = None) -> str:
        """One FFN; of a mixture that of an expert, or the shared one."""
        assert block.ffn is not None
        operators, kind, name = self.operators, block.ffn.activation, self.operators.ffn_label(block)
        name = name if expert is None else f"{name}/experts.{expert}"
        up = self.project(block, Role.FFN_UP, x, expert)
        operators.keep_latents(block, up)
        if operators.contents.pack_of(Role.FFN_GATE, block.name, expert):
            gate = operators.activation(kind, self.project(block, Role.FFN_GATE, x, expert), name)
            hidden = operators.graph.op("Mul", gate, up, name=operators.label(f"{name}/gated"))
        else:
            hidden = operators.activation(kind, up, name)
        return self.project(block, Role.FFN_DOWN, hidden, expert)
