"""The shape of one row of the families table, and the spellings that several rows share.

Names are relative: to the block for modules of a block, to the base model for all others. A row shows only
the facts that set its family apart; module names, norms and tiny configs that several families share are
written once here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quantkit.errors import InputError
from quantkit.model.model_map import (
    EmbeddingKind,
    NormKind,
    NormPlace,
    NormPlacement,
    PositionBias,
    PositionKind,
    Residual,
    Role,
)

# How a projection outside of blocks touches the residual stream. "enters": the stream starts at its output;
# "leaves": the stream ends at its input; "stays": reads the stream and writes in the same basis; "reads": its
# output is a result of its own; "apart": neither reads nor writes the stream.
OuterUse = Literal["enters", "leaves", "stays", "reads", "apart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ByConfig:
    """A fact that the config decides: `values[config[key]]`; a config without the field means `absent`."""

    key: str
    values: Mapping[Any, Any]
    absent: Any


def read_fact(fact: Any, config: Mapping[str, Any]) -> Any:
    """A fact of a row under a config, of which several fields may decide it."""
    while isinstance(fact, ByConfig):
        value = config.get(fact.key, fact.absent)
        if value not in tuple(fact.values):
            raise InputError(
                f"{fact.key} is {value!r}",
                where="config.json",
                allowed=", ".join(map(repr, fact.values)),
                next_step="a checkpoint with code of its own may mean another value",
            )
        fact = fact.values[value]
    return fact


@dataclass(frozen=True, slots=True)
class NormRow:
    """The place of one norm and the modules that read its output directly."""

    place: NormPlace
    feeds: tuple[str, ...] = ()
    feeds_next_block: tuple[str, ...] = ()  # modules of the block that runs next; of an outer norm: the first
    feeds_head: bool = False  # the output projection; of a norm in a block: the last block's norm alone
    # Keys and values of every cross attention; of a norm in a block: the last block's norm alone.
    feeds_cross_attention: bool = False
    feeds_every_block: tuple[str, ...] = ()  # modules of every block of the first stack
    feeds_alone: str | None = None  # the only reader in models that have this module


Norms = Mapping[str, NormRow]


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureRow:
    """Facts of the blocks whose FFN is a mixture of experts; the projections have the router's role."""

    activation: str  # the module of an expert's non-linearity
    normalises: bool | ByConfig = True  # the weights of a token's experts add up to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureRow:
    """What makes tokens of a picture; names of modules and parameters are relative to the base model."""

    patches: str  # a convolution whose steps are as wide as its windows: a product of patches
    positions: str  # the parameter, or the weight of the table
    first: tuple[str, ...] = ()  # parameters of the tokens before the patches, in order
    unread: tuple[str, ...] = ()  # parameters that training alone reads
    stretches: bool = False  # positions are stretched to pictures of other sizes
    probe: str | None = None  # the module that pools all tokens by attention with a query of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A sequence of blocks of one shape."""

    path: str  # "h.*": the star is the index
    kind: str  # "decoder" or "encoder"
    projections: Mapping[str, tuple[Role, ...]]  # several roles: fused in this order; a star is any expert
    norms: Norms | ByConfig
    activation: str  # the module of the FFN's non-linearity
    cross_projections: Mapping[str, tuple[Role, ...]] = field(default_factory=dict)
    # Projections that only a training loss reads -> the config field with their number of output heads.
    training_only: Mapping[str, str] = field(default_factory=dict)
    mixture: MixtureRow | None = None
    scales: Mapping[str, str] = field(default_factory=dict)  # parameter -> projection whose outputs it scales
    calls: tuple[str, str] | None = None  # config[second] groups of blocks share config[first] depths in turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    embeddings: Mapping[str, EmbeddingKind]
    outer_norms: Norms
    norm_kind: NormKind | ByConfig
    placement: NormPlacement | ByConfig
    position: PositionKind | ByConfig
    tiny_class: str  # the architecture that the contract test builds from `tiny`
    tiny: Mapping[str, Any]
    variants: tuple[Mapping[str, Any], ...] = ()  # further tiny configs, as changes to `tiny`
    residual: Residual | ByConfig = Residual.SEQUENTIAL
    other: Mapping[str, OuterUse] = field(default_factory=dict)  # projections that have no role in a block
    # Fused rows lie end to end, or once for each head of keys, or in this number of parts.
    fused_rows: Literal["end to end", "by head"] | int | ByConfig = "end to end"
    norm_gain_offset: float = 0.0  # the gain is offset + weight
    scales_embedding: bool | ByConfig = False  # embeddings are multiplied by sqrt(hidden)
    # Config fields with factors: of embeddings, of each sublayer's output, and of the logits.
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    logit_multiplier: str | None = None
    logit_divisor: str | None = None
    scales_tied_head: bool | ByConfig = False  # a tied head reads its input times 1 / sqrt(hidden)
    scales_tied_head_until: int | None = None  # the major version of transformers that leaves this out
    position_offset: int = 0  # rows before the first position
    counts_from_padding: bool = False  # positions begin behind row `pad_token_id`, and padding has that row
    padding_id: int | None = None  # that row, where the class itself says it; None: config.pad_token_id
    # Names of tables are relative. By config: as many rows as the table has, up to a distance in the config.
    position_biases: tuple[PositionBias, ...] = ()
    position_biases_by_config: bool = False
    distance_table: str | None = None  # rows for distances that queries and keys of each block are made of
    # Which layers have config.sliding_window; "own": each attention has one of its own, to both sides.
    windows: Literal["none", "every layer", "layer_types", "own"] = "none"
    is_causal_by_config: bool = False  # config.is_decoder hides later tokens, though no module holds it
    rotates_neighbours: bool = False  # features 2i and 2i + 1, instead of i and i + half
    fixed_theta: float | None = None  # of rotations that the class makes itself, of config.rotary_dim
    positions_need_window: bool = False  # layers without one have no positions, where other layers have one
    clips_projections: str | None = None  # config field with the limit of queries, keys and values
    softcaps_scores: bool = False  # by config.attn_logit_softcapping
    softcaps_logits: bool = False  # by config.final_logit_softcapping
    # The module, or the config field, of a non-linearity in a task's head that config sets apart.
    head_activation: str | None = None
    logit_bias: str | None = None  # a buffer that is added to the logits
    reads_mean: bool | ByConfig = False  # a sequence classifier reads the mean of all tokens
    picture: PictureRow | None = None  # of families that read pictures
    is_causal: bool = False  # later tokens are hidden, though the stack is an encoder
    head_reads_one_token: bool = False  # projections behind the blocks read one token of each example
    finds_end: bool = False  # a text is pooled where config.eos_token_id stands
    # Newer module name -> name in checkpoints: whole components of a path.
    names: Mapping[str, str] = field(default_factory=dict)


Q, K, V, OUT = Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE, Role.ATTENTION_OUT
GATE, UP, DOWN = Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN
ROUTER, SHARED_GATE = Role.ROUTER, Role.SHARED_GATE
TOKEN, POSITION, TOKEN_TYPE = EmbeddingKind.TOKEN, EmbeddingKind.POSITION, EmbeddingKind.TOKEN_TYPE
POSITION_BIAS, DISTANCE = EmbeddingKind.POSITION_BIAS, EmbeddingKind.DISTANCE

LLAMA_ATTENTION = {
    "self_attn.q_proj": (Q,),
    "self_attn.k_proj": (K,),
    "self_attn.v_proj": (V,),
    "self_attn.o_proj": (OUT,),
}
LLAMA_FFN = {"mlp.gate_proj": (GATE,), "mlp.up_proj": (UP,), "mlp.down_proj": (DOWN,)}
READ_BY_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
READ_BY_FFN = ("mlp.gate_proj", "mlp.up_proj")
LLAMA_EXPERTS = {
    "mlp.gate": (ROUTER,),
    "mlp.experts.*.gate_proj": (GATE,),
    "mlp.experts.*.up_proj": (UP,),
    "mlp.experts.*.down_proj": (DOWN,),
}
READ_BY_EXPERTS = ("mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj")
PRE_NORMS = {
    "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, READ_BY_ATTENTION),
    "post_attention_layernorm": NormRow(NormPlace.BEFORE_FFN, READ_BY_FFN),
}
SANDWICH_NORMS = {
    "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, READ_BY_ATTENTION),
    "post_attention_layernorm": NormRow(NormPlace.AFTER_ATTENTION),
    "pre_feedforward_layernorm": NormRow(NormPlace.BEFORE_FFN, READ_BY_FFN),
    "post_feedforward_layernorm": NormRow(NormPlace.AFTER_FFN),
}
ONE_NORM_FOR_BOTH = {  # attention and FFN side by side
    "input_layernorm": NormRow(NormPlace.BEFORE_ATTENTION, (*READ_BY_ATTENTION, *READ_BY_FFN))
}
OUTPUT_NORMS = {
    "post_attention_layernorm": NormRow(NormPlace.AFTER_ATTENTION),
    "post_feedforward_layernorm": NormRow(NormPlace.AFTER_FFN),
}
QUERY_KEY_NORMS = {
    "self_attn.q_norm": NormRow(NormPlace.QUERY),
    "self_attn.k_norm": NormRow(NormPlace.KEY),
}
FINAL_NORM = NormRow(NormPlace.FINAL, feeds_head=True)
LLAMA_STACK = Stack(
    path="layers.*",
    kind="decoder",
    projections={**LLAMA_ATTENTION, **LLAMA_FFN},
    norms=PRE_NORMS,
    activation="mlp.act_fn",
)
BERT_READ_BY_ATTENTION = ("attention.self.query", "attention.self.key", "attention.self.value")
BERT_STACK = Stack(
    path="encoder.layer.*",
    kind="encoder",
    projections={
        "attention.self.query": (Q,),
        "attention.self.key": (K,),
        "attention.self.value": (V,),
        "attention.output.dense": (OUT,),
        "intermediate.dense": (UP,),
        "output.dense": (DOWN,),
    },
    norms={
        "attention.output.LayerNorm": NormRow(NormPlace.AFTER_ATTENTION, ("intermediate.dense",)),
        "output.LayerNorm": NormRow(NormPlace.AFTER_FFN, feeds_next_block=BERT_READ_BY_ATTENTION),
    },
    activation="intermediate.intermediate_act_fn",
)
BERT_EMBEDDINGS = {
    "embeddings.word_embeddings": TOKEN,
    "embeddings.position_embeddings": POSITION,
    "embeddings.token_type_embeddings": TOKEN_TYPE,
}
BERT_EMBEDDING_NORM = {
    "embeddings.LayerNorm": NormRow(NormPlace.EMBEDDING, feeds_next_block=BERT_READ_BY_ATTENTION)
}
BERT_POSITION = ByConfig(
    key="position_embedding_type",
    absent="absolute",
    values={
        "absolute": PositionKind.LEARNED,
        "relative_key": PositionKind.RELATIVE,
        "relative_key_query": PositionKind.RELATIVE,
    },
)
BERT_TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
LLAMA_TINY = {**BERT_TINY, "num_key_value_heads": 2, "pad_token_id": 0}
GEMMA_TINY = {**LLAMA_TINY, "head_dim": 16}
