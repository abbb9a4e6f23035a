"""The shape of one row of the families table: facts about an architecture, as data.

Names are relative: to the block for what lies in a block, to the base model for the rest. `">"` before
a name means "in the block that runs next", for norms whose readers live there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.model.model_map import EmbeddingKind, NormKind, NormPlacement, PositionKind, Residual, Role

HEAD = "<head>"  # in a norm's readers: the output projection, whatever its name
LAST = f">{HEAD}"  # the same, but of the last block's norm alone
CROSS = "<cross>"  # in a norm's readers: keys and values of every cross attention
# How a projection outside of blocks touches the residual stream. "enters": what lies before has another
# basis, "leaves": what lies after has; "stays": reads the stream and gives its basis on; "reads": a result
# of its own; "apart": reads no stream.
OuterUse = Literal["enters", "leaves", "stays", "reads", "apart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ByConfig:
    """A fact that the config decides: `values[config[key]]`; a config without the field means `absent`."""

    key: str
    values: Mapping[Any, Any]
    absent: Any

    def read(self, config: Mapping[str, Any]) -> Any:
        """The fact under this config; an unforeseen value raises rather than guess."""
        return self.values[config.get(self.key, self.absent)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One pile of blocks."""

    path: str  # "h.*": the star is the index
    kind: str  # "decoder" or "encoder"
    projections: Mapping[str, tuple[Role, ...]]  # several roles: fused in this order
    norms: Mapping[str, tuple[str, ...]] | ByConfig  # norm -> the modules that read its output directly
    activation: str  # the module of the FFN's non-linearity
    cross_projections: Mapping[str, tuple[Role, ...]] = field(default_factory=dict)
    query_key_norms: tuple[str, ...] = ()  # norms on each head's query and key
    # Projections that no inference runs, since only a training loss reads them -> the config's field for
    # the number of heads that their output splits into.
    training_only: Mapping[str, str] = field(default_factory=dict)
    calls: tuple[str, str] | None = None  # a shared block runs config[first] // config[second] times


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One architecture family."""

    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    embeddings: Mapping[str, EmbeddingKind]
    outer_norms: Mapping[str, tuple[str, ...]]
    norm_kind: NormKind | ByConfig
    placement: NormPlacement | ByConfig
    position: PositionKind | ByConfig
    tiny_class: str  # the architecture that the contract test builds from `tiny`
    tiny: Mapping[str, Any]
    variants: tuple[Mapping[str, Any], ...] = ()  # further tiny configs, as changes to `tiny`
    residual: Residual | ByConfig = Residual.SEQUENTIAL
    other: Mapping[str, OuterUse] = field(default_factory=dict)  # projections that have no role in a block
    interleaves_heads: bool = False  # fused rows alternate head by head instead of lying end to end
    norm_gain_offset: float = 0.0  # the gain is offset + weight
    scales_embedding: bool = False  # embeddings are multiplied by sqrt(hidden)
    scales_tied_head: bool | ByConfig = False  # a tied head reads its input times 1 / sqrt(hidden)
    position_offset: int = 0  # rows before the first position
    names: Mapping[str, str] = field(default_factory=dict)  # newer module name -> name in checkpoints


def read_fact(fact: Any, config: Mapping[str, Any]) -> Any:
    """A fact of a row under a config, of which several fields may decide it, or none."""
    while isinstance(fact, ByConfig):
        fact = fact.read(config)
    return fact
