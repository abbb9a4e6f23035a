"""The records of a model's structure: frozen, JSON-serialisable, free of torch.

Every weight is described as [out, in], in either storage order. One logical projection (the query of a fused
QKV matrix, for example) is one `Layer`, so that no count depends on the fusion of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import re
from enum import StrEnum
from typing import Any

from quantkit.model.sentence import SentenceModel

EXPERT = re.compile(r"\bexperts\.(\d+)\.")  # in the name of a module


class Role(StrEnum):
    ATTENTION_QUERY = "attention_query"
    ATTENTION_KEY = "attention_key"
    ATTENTION_VALUE = "attention_value"
    ATTENTION_OUT = "attention_out"
    FFN_GATE = "ffn_gate"
    FFN_UP = "ffn_up"
    FFN_DOWN = "ffn_down"
    FFN_LATENT = "ffn_latent"
    ROUTER = "router"
    SHARED_GATE = "shared_gate"
    LM_HEAD = "lm_head"
    OTHER = "other"


ATTENTION_ROLES = (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE, Role.ATTENTION_OUT)
FFN_ROLES = (Role.FFN_GATE, Role.FFN_UP, Role.FFN_DOWN, Role.FFN_LATENT)

# Of a mixture of experts: scores of the experts, and the weight of the expert that every token uses.
ROUTING_ROLES = (Role.ROUTER, Role.SHARED_GATE)

# Projections whose inputs are no norm's output, so that their magnitude varies from token to token.
READ_NO_NORM = (Role.ATTENTION_OUT, Role.FFN_DOWN)


class FfnKind(StrEnum):
    """A standard FFN has 2 projections (up, down); a gated one has 3 (gate, up, down)."""

    STANDARD = "standard"
    GATED = "gated"


class Activation(StrEnum):
    """The non-linearity itself; SwiGLU and GeGLU are SILU and GELU in a gated FFN."""

    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    QUICK_GELU = "quick_gelu"  # x * sigmoid(1.702 x)
    OTHER = "other"


class NormKind(StrEnum):
    """LayerNorm subtracts the mean; RMSNorm does not."""

    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"


class NormPlacement(StrEnum):
    """Before each sublayer, after each residual sum, on each sublayer's output, or before it and there."""

    PRE = "pre"
    POST = "post"
    OUTPUT = "output"
    SANDWICH = "sandwich"


class NormPlace(StrEnum):
    """Place of a norm in the data flow."""

    BEFORE_ATTENTION = "before_attention"
    AFTER_ATTENTION = "after_attention"
    BEFORE_CROSS_ATTENTION = "before_cross_attention"
    AFTER_CROSS_ATTENTION = "after_cross_attention"
    BEFORE_FFN = "before_ffn"
    AFTER_FFN = "after_ffn"
    QUERY = "query"
    KEY = "key"
    EMBEDDING = "embedding"
    FINAL = "final"
    HEAD = "head"
    DISTANCE = "distance"  # of the rows of distances
    OTHER = "other"


class Residual(StrEnum):
    """Sequential: x + attention, then + FFN. Parallel: both read x, and both are added at once."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"


class PositionKind(StrEnum):
    """Position encoding."""

    LEARNED = "learned"
    ROPE = "rope"
    ALIBI = "alibi"
    RELATIVE = "relative"
    NONE = "none"


class EmbeddingKind(StrEnum):
    TOKEN = "token"
    POSITION = "position"
    TOKEN_TYPE = "token_type"
    POSITION_BIAS = "position_bias"  # of the scores of each head
    DISTANCE = "distance"  # that queries and keys are made of
    OTHER = "other"


SUMMED_KINDS = (EmbeddingKind.TOKEN, EmbeddingKind.POSITION, EmbeddingKind.TOKEN_TYPE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of a stored matrix that hold one projection: `count` runs of `length`, `stride` apart.

    A matrix of its own is one run. GPT-NeoX interleaves query, key and value head by head, hence strides.
    """

    start: int
    length: int
    stride: int
    count: int = 1

    @property
    def total(self) -> int:
        return self.length * self.count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One logical projection."""

    name: str
    role: Role
    in_features: int
    out_features: int
    has_bias: bool
    matrix: str  # the module that stores it; several layers share one when a checkpoint fuses them
    rows: Rows  # where in that matrix
    stored_as: str  # the row of LINEARS, which has the storage order
    block: str | None = None  # the block's name, None outside of blocks
    is_cross_attention: bool = False
    tied_to: str | None = None  # the embedding whose table this projection reuses
    aliases: tuple[str, ...] = ()  # other names of the same module object
    calls: int = 1  # in one forward pass; 0: only training runs it
    num_heads: int = 1  # of a latent projection: heads of its output
    num_groups: int = 1  # blocks on the diagonal, all other weights being zero: as many as heads, or 1
    input_factors: str | None = None  # the vector that its input is multiplied by, put there by smoothing
    output_factors: str | None = None  # the parameter that its output is multiplied by: it is read as one

    @property
    def is_fused(self) -> bool:
        """Whether the matrix holds other projections too."""
        return self.name != self.matrix

    @property
    def expert(self) -> int | None:
        """Number of the expert that the projection belongs to, where a router chooses among several."""
        match = EXPERT.search(self.name)
        return int(match[1]) if match else None

    @property
    def num_weights(self) -> int:
        """Weights without the bias and without zeros by construction."""
        return self.in_features * self.out_features // self.num_groups

    @property
    def num_new_parameters(self) -> int:
        """Parameters that no other entry of the map counts."""
        bias = self.out_features if self.has_bias else 0
        return bias + (0 if self.tied_to else self.num_weights)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    name: str
    kind: EmbeddingKind
    num_rows: int
    num_columns: int
    tied_to: str | None = None  # another embedding that holds the same table
    aliases: tuple[str, ...] = ()

    @property
    def num_new_parameters(self) -> int:
        """Parameters that no other entry of the map counts."""
        return 0 if self.tied_to else self.num_rows * self.num_columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """One norm and the modules that read it (none: a residual sum or another norm reads it)."""

    name: str
    kind: NormKind
    features: int
    num_parameters: int
    block: str | None = None
    feeds: tuple[str, ...] = ()
    place: NormPlace = NormPlace.OTHER
    epsilon: float = 1e-5
    aliases: tuple[str, ...] = ()
    calls: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    position: PositionKind
    is_cross: bool = False
    is_causal: bool = True
    window: int | None = None  # keys at this distance and farther are hidden, behind a query and before it
    softcap: float | None = None
    has_query_key_norm: bool = False
    scale: float | None = None  # of query times key; None: 1 / sqrt(head_dim)
    clip: float | None = None  # of queries, keys and values
    rope_theta: float | None = None
    rotary_dim: int | None = None
    rope_frequencies: tuple[float, ...] = ()  # of the pairs of features; empty: those of rope_theta alone
    rope_factor: float = 1.0  # of cosines and sines
    rope_interleaved: bool = False  # feature 2i turns with 2i + 1, instead of i with i + rotary_dim / 2
    rope_limit: int | None = None  # positions from which on the frequencies are others


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PositionBias:
    """A bias of each head by the distance from query to key, added to the scores of all layers of a stack.

    Near distances have a row of the table each, far ones share rows: Raffel et al. 2020
    (https://arxiv.org/abs/1910.10683). Keys after their query have the second half of the rows, where a
    query sees them.
    """

    table: str  # [num_buckets, heads]
    num_buckets: int
    max_distance: int  # from which on all distances share a row
    stack: str = "encoder"
    is_causal: bool = False  # all rows are for keys up to their query


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistanceScores:
    """Scores of a token and a distance, added to those of two tokens: disentangled attention.

    Rows of a table stand for distances. The projections of each block make keys and queries of them too: a
    token's query meets the key of the distance, and a token's key its query. He et al. 2021
    (https://arxiv.org/abs/2006.03654).
    """

    table: str  # [2 * reach, hidden]; near distances have a row each
    reach: int  # rows for keys after their query, and rows for keys before it
    buckets_from: int | None  # distance from which on several share a row; None: nowhere
    max_distance: int  # from which on all distances share a row
    has_keys: bool  # a token's query and the key of a distance
    has_queries: bool  # a token's key and the query of a distance


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """How a picture becomes tokens: those of `first`, then one for each patch, row by row."""

    patches: str  # the projection of a patch: channels, then rows, then columns of its pixels
    channels: int
    patch: tuple[int, int]  # pixels: height, width
    size: tuple[int, int]  # of a picture that has the positions as they are
    positions: str  # [1, tokens, hidden] or [tokens, hidden]
    first: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    stretches: bool = False  # a picture of another size has its positions stretched
    table: tuple[int, int] = (0, 0)  # rows and columns of the positions of patches
    probe: str | None = None  # the module that pools all tokens by attention with a query of its own

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in a column and in a row; what remains at the lower and right edges is left out."""
        return self.size[0] // self.patch[0], self.size[1] // self.patch[1]

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.grid[1] + len(self.first)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all tensors beside the projection."""
        return (*self.first, self.positions, *self.unread, *self.probe_parameters)

    @property
    def probe_parameters(self) -> tuple[str, ...]:
        """The query, and the weights that make keys and values of the tokens."""
        parts = ("probe", "attention.in_proj_weight", "attention.in_proj_bias")
        return tuple(f"{self.probe}.{part}" for part in parts) if self.probe else ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FeedForward:
    kind: FfnKind
    activation: Activation
    hidden_features: int

    @property
    def display_name(self) -> str:
        """The name in papers: SwiGLU, GeGLU, ReGLU, or the plain activation."""
        gated = {
            Activation.SILU: "SwiGLU",
            Activation.GELU: "GeGLU",
            Activation.GELU_TANH: "GeGLU (tanh)",
            Activation.RELU: "ReGLU",
            Activation.RELU_SQUARED: "squared ReGLU",
        }
        plain = {
            Activation.RELU: "ReLU",
            Activation.RELU_SQUARED: "squared ReLU",
            Activation.GELU: "GELU (exact)",
            Activation.GELU_TANH: "GELU (tanh)",
            Activation.SILU: "SiLU",
            Activation.QUICK_GELU: "GELU (quick)",
        }
        return (gated if self.kind is FfnKind.GATED else plain).get(self.activation, "other")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """A router's choice among experts: the highest of the softmax over all scores weigh their outputs."""

    num_experts: int
    num_active: int  # experts that run for each token
    normalises: bool  # the weights of a token's experts add up to 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One stored transformer block; a block shared by several depths is one record with `calls` > 1."""

    name: str
    stack: str  # "decoder" or "encoder"
    index: int
    calls: int
    attentions: tuple[Attention, ...]
    ffn: FeedForward | None
    norm_kind: NormKind
    norm_placement: NormPlacement
    residual: Residual
    residual_scale: float = 1.0  # of each sublayer's output
    mixture: Mixture | None = None  # `ffn` is then each expert's; projections without one are shared


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnmappedParameter:
    """A parameter outside of all known projections, tables, norms and biases; it stays as it is."""

    name: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelMap:
    """The structure of a model, read without touching a weight."""

    name: str
    model_type: str
    architecture: str  # the class that was walked
    family: str | None  # None: no row in the families table, roles are OTHER
    num_parameters: int
    hidden_size: int | None
    vocab_size: int | None
    max_positions: int | None
    is_encoder_decoder: bool
    has_tied_head: bool
    embedding_scale: float | None  # factor of the embeddings
    head_scale: float | None  # T5 divides the input of a tied head by sqrt(hidden)
    final_softcap: float | None
    layers: tuple[Layer, ...]
    embeddings: tuple[Embedding, ...]
    norms: tuple[Norm, ...]
    blocks: tuple[Block, ...]
    unmapped: tuple[UnmappedParameter, ...]
    notes: tuple[str, ...]
    used_remote_code: bool = False
    norm_gain_offset: float = 0.0  # a gain is this plus the stored weight
    position_offset: int = 0  # rows of a position table before the first position
    num_experts: int | None = None  # of a mixture-of-experts FFN
    num_active_experts: int | None = None  # that run for each token
    sentence: SentenceModel | None = None  # what pools the states of a text
    logit_scale: float | None = None  # factor of the logits
    logit_bias: str | None = None  # a tensor of the checkpoint that is added to the logits
    position_biases: tuple[PositionBias, ...] = ()
    distance_scores: DistanceScores | None = None
    head_activation: Activation | None = None  # of a task's head, where the config sets it apart
    picture: Picture | None = None  # of a model that reads pictures
    end_token: int | None = None  # at which a text is pooled
    head_reads_one_token: bool = False  # projections behind the blocks read one token of each example
    reads_mean: bool = False  # a sequence classifier reads the mean of all tokens, instead of the first

    def position_bias_of(self, stack: str) -> PositionBias | None:
        return next((bias for bias in self.position_biases if bias.stack == stack), None)

    @property
    def context(self) -> int | None:
        """Tokens that have a position in every table; None where nothing limits them.

        LongRoPE ends where its factors for long texts begin: both cannot share one cache of keys.
        """
        tables = [table for table in self.embeddings if table.kind is EmbeddingKind.POSITION]
        limits: list[int | None] = [table.num_rows - self.position_offset for table in tables]
        limits = limits or [self.picture.num_tokens if self.picture else self.max_positions]
        limits += [attention.rope_limit for block in self.blocks for attention in block.attentions]
        return min((limit for limit in limits if limit), default=None)

    @property
    def placed(self) -> frozenset[str]:
        """Parameters outside of projections, tables and norms whose use is known."""
        factors = (layer.output_factors for layer in self.layers)
        return frozenset(filter(None, (*factors, *(self.picture.parameters if self.picture else ()))))

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of the stored matrices, in the order of the layers."""
        return tuple(dict.fromkeys(layer.matrix for layer in self.layers))

    @property
    def at_inference(self) -> ModelMap:
        """The map without the projections that only training runs."""
        kept = tuple(layer for layer in self.layers if layer.calls)
        fewer = sum(layer.num_new_parameters for layer in self.layers if not layer.calls)
        return dataclasses.replace(self, num_parameters=self.num_parameters - fewer, layers=kept)


def to_json(record: Any) -> Any:
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, StrEnum):
        return record.value
    if isinstance(record, (tuple, list)):
        return [to_json(item) for item in record]
    if isinstance(record, frozenset):
        return sorted(record)
    if isinstance(record, dict):
        return {str(key): to_json(value) for key, value in record.items()}
    return record
