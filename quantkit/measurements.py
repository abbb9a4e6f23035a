"""The records of what was measured: frozen, JSON-serialisable, free of torch.

A figure never stands alone: perplexity has its standard error, a time its number of runs and its spread, a
comparison its protocol, and a report its machine and versions. What was not measured is None here and
absent from report.json; a zero would read as a result.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quantkit.records import Count, FormulaCheck, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood in nats, with the standard error of that mean carried over."""

    value: float
    standard_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """A quantized model beside its reference, token by token on the same text."""

    reference: Perplexity
    quantized: Perplexity
    increase: float  # quantized / reference - 1
    increase_standard_error: float  # from the differences token by token, so far below the two above
    kl_divergence: float  # KL(reference || quantized) in nats, mean over tokens
    kl_standard_error: float
    kl_99th_percentile: float
    top1_agreement: float  # share of tokens at which both find the same token likeliest
    max_relative_logit_error: float  # greatest difference over greatest reference logit, all tokens
    num_tokens: int  # predicted tokens: all of the text but its first
    window: int
    stride: int
    text: str  # its name
    is_meaningful: bool = True  # False with random weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Similarity:
    """A quantized encoder beside its reference, window by window of the same text."""

    mean_cosine: float  # of outputs pooled by the mean over positions
    lowest_cosine: float
    relative_rms_error: float  # over all outputs: root of summed squares of errors over that of values
    max_relative_error: float  # greatest difference over greatest reference value
    num_windows: int
    window: int
    text: str
    is_meaningful: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Repeated runs of one thing."""

    median_ms: float
    lowest_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    highest_ms: float
    num_runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """The time for a prompt and for a token, beside the reference in the same interleaved runs."""

    provider: str
    threads: int
    prompt_length: int
    prefill: Timing  # of the whole prompt
    prefill_reference: Timing | None = None
    decode: Timing | None = None  # per token; None for a model that generates nothing
    decode_reference: Timing | None = None
    num_decoded: int | None = None  # tokens of one decode run
    floor_ms_per_token: float | None = None  # reading weights and cache once at the machine's bandwidth
    num_warm_ups: int
    batch: int = 1
    reference: str | None = None  # what the reference is, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """Peak resident memory of a process of its own."""

    load_peak_bytes: int
    run_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Peak memory of the two models, each alone in its process."""

    quantized: PeakMemory
    reference: PeakMemory | None = None
    empty_process_bytes: int | None = None  # the same process with its imports and no model


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Bytes on disk; graph and weights, without tokenizer files."""

    source_bytes: int  # the checkpoint that was quantized, as it is stored
    planned_bytes: int  # tensors that the plan foretells
    artifact_bytes: int
    reference_bytes: int | None = None  # the float graph that the artifact is timed against

    @property
    def ratio(self) -> float:
        """Artifact over source."""
        return self.artifact_bytes / self.source_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedOperator:
    """How many nodes of one operator a provider runs."""

    operator: str
    provider: str
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnplacedNode:
    """A node that the asked provider left to the CPU."""

    operator: str
    name: str
    layer: str | None = None  # of the model; None for a node that belongs to none
    reason: str | None = None  # where the runtime says


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How much of the graph one provider runs."""

    provider: str
    node_fraction: float
    mac_fraction: float | None = None
    num_nodes: int | None = None  # of the graph as it was shared out, before anything was fused
    operators: tuple[PlacedOperator, ...] | None = None  # None here and below: taken for granted, not read
    unplaced: tuple[UnplacedNode, ...] | None = None  # what it left to the CPU


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderAccuracy:
    """The logits that one provider computes, beside those of a reference."""

    reference: str  # what it is, in words
    max_relative_logit_error: float  # greatest difference over greatest reference logit
    top1_agreement: float
    num_tokens: int
    perplexity_ratio: float | None = None  # the provider's over the reference's; None for an encoder
    kl_divergence: float | None = None  # mean, in nats; None for an encoder
    lowest_cosine: float | None = None  # of an encoder's pooled states


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderRun:
    """One provider's trial in a process of its own; None is what it did not come to."""

    provider: str
    outcome: str  # "ran", "partly" where something after the start failed, or "failed"
    why_not: str | None = None
    cure: str | None = None
    python: str | None = None  # the interpreter of another environment, where that ran it
    device: str | None = None
    version: str | None = None  # of the distribution that holds it
    library_ms: float | None = None  # the vendor's library, loaded once a process; not in what follows
    start_ms: float | None = None  # from the files to sessions that are ready, compiling included
    start_again_ms: float | None = None  # the same from what an earlier start compiled, checks included
    compile_ms: float | None = None  # what the first of these takes longer than the second
    prompt_length: int | None = None
    prefill: Timing | None = None
    decode: Timing | None = None  # per token
    peak_bytes: int | None = None  # of its process
    placement: Placement | None = None
    accuracy: ProviderAccuracy | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where and with what it was measured."""

    processor: str
    num_cores: float  # usable ones: a container may have a share of a core
    python: str
    platform: str
    versions: dict[str, str]  # by distribution name


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Projections that stay float for one reason."""

    role: str
    reason: str
    count: int


def kept_projections(plan: Plan) -> tuple[Kept, ...]:
    """What a plan leaves as it was, one entry for each role and reason, in the order of the walk."""
    counts = Counter((str(layer.role), layer.reason) for layer in plan.layers if not layer.quantized)
    return tuple(Kept(role=role, reason=reason, count=count) for (role, reason), count in counts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One format that a unit could have."""

    format: str  # the name of a scheme, or "float"
    loss: float  # KL divergence when this unit alone has it, nats
    cost: float = 0.0  # what a search makes least: one of the two below
    num_bytes: float = 0.0
    microseconds: float | None = None  # of one decoded token, where this machine was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitOptions:
    """What is multiplied together, and the formats that it could have."""

    name: str
    layers: tuple[str, ...]
    options: tuple[Choice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What a whole model lost, measured in the runtime."""

    ppl_increase: float
    kl_divergence: float
    top1_agreement: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration that was exported and measured."""

    label: str
    choices: tuple[tuple[str, str], ...]  # unit, format
    cost: float
    num_bytes: float
    microseconds: float | None
    predicted_kl: float
    loss: Loss


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoss:
    """What rounding took from one matrix product."""

    name: str
    layers: tuple[str, ...]
    format: str
    weight_error: float  # relative, root of sums of squares
    plain_weight_error: float  # the same with plain rounding
    output_error: float | None = None  # on what calibration saw; None without it
    plain_output_error: float | None = None
    kl_divergence: float | None = None  # of the model with this alone in its format


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeTime:
    """The time of one matrix product on this machine, in one format, for a number of rows."""

    in_features: int
    out_features: int
    format_name: str  # "float32", or integers: "int8_block128", "int8_tensor"
    rows: int  # 1: a decoded token; more: a prompt
    median_us: float
    spread_us: float  # between the quartiles
    runs: int  # timed products


@dataclass(frozen=True, kw_only=True, slots=True)
class Smoothing:
    """How strongly one space was smoothed, and what its readers' outputs lose with and without."""

    space: str
    transform: str
    alpha: float | None  # None: it stayed as it was
    error: float  # squared, on sampled tokens
    plain_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """A search for the cheapest model that holds a budget, whole."""

    max_ppl_increase: float | None
    max_kl: float | None
    prefer: str
    units: tuple[UnitOptions, ...]  # the table of losses and costs
    candidates: tuple[Candidate, ...]  # all that were exported and measured
    chosen: Candidate
    verdicts: tuple[Loss, ...]  # on text that the search never saw; the last is of the artifact
    holds: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that is known of one quantized model."""

    model: str
    scheme: str
    target: str
    min_dim: int
    projections: Count
    matrices: Count
    parameters: Count
    formula: FormulaCheck
    kept: tuple[Kept, ...]
    size: Size
    environment: Environment
    accuracy: Accuracy | None = None
    similarity: Similarity | None = None  # in place of accuracy, for an encoder
    latency: tuple[Latency, ...] = ()
    memory: Memory | None = None
    placement: tuple[Placement, ...] = ()
    has_random_weights: bool = False
    recipe_sha256: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # of each stage
    notes: tuple[str, ...] = ()  # what could not be measured, and why
    fit: str = "rtn"
    transforms: tuple[str, ...] = ()
    layer_losses: tuple[LayerLoss, ...] = ()
    smoothing: tuple[Smoothing, ...] = ()
    search: SearchResult | None = None
    shape_times: tuple[ShapeTime, ...] = ()  # where sizes were chosen by measuring
