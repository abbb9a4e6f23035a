"""The records of what was measured: frozen, JSON-serialisable, free of torch.

A figure never stands alone: perplexity has its standard error, a time its number of runs and its spread, a
comparison its protocol, and a report its machine and versions. What was not measured is None here and
absent from report.json; a zero would read as a result.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.runtime.providers.placement import Placement


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
