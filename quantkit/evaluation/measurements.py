"""Records of measurements: frozen, JSON-serialisable, free of torch.

Perplexity comes with its standard error, a time with its number of runs and its spread, a comparison with its
protocol, and a report with its machine and versions. A figure that was not measured is None here and absent
from report.json; a zero would look like a result.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.runtime.providers.placement import Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood in nats, and its standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoryAccuracy:
    """A decoder and its reference on a few windows of one category of text."""

    name: str
    kl_divergence: float
    kl_standard_error: float
    flip_rate: float  # share of positions with another argmax
    num_tokens: int
    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """A quantized model compared with its reference token by token on a text."""

    reference: Perplexity
    quantized: Perplexity
    increase: float  # quantized / reference - 1
    increase_standard_error: float  # of paired differences, so far smaller than those of the perplexities
    kl_divergence: float  # KL(reference || quantized) in nats, mean over tokens
    kl_standard_error: float  # over windows, since tokens of a window are alike
    kl_99th_percentile: float
    top1_agreement: float  # share of positions with equal argmax
    top1_standard_error: float | None = None
    max_relative_logit_error: float  # largest difference over largest reference logit
    num_tokens: int  # predicted tokens: every token but the first
    window: int
    stride: int
    text: str  # name of the text
    is_meaningful: bool = True  # False with random weights
    categories: tuple[CategoryAccuracy, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """Labels of a quantized classifier compared with its original's."""

    flips: float  # share of texts, tokens or pictures with another label
    flips_standard_error: float | None = None  # over texts; None for one text
    kl_divergence: float  # KL(reference || quantized) of the labels in nats, mean
    kl_standard_error: float | None = None
    num_labels: int
    num_compared: int  # texts, or tokens
    of_tokens: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The order of passages for queries compared with the original's."""

    ndcg10: float  # mean over queries; the original's own order is the ideal
    ndcg10_standard_error: float | None = None  # None for one query
    lowest_ndcg10: float
    other_first: float  # share of queries with another first passage
    other_first_standard_error: float | None = None
    num_queries: int
    num_passages: int  # of a query
    of_pairs: bool = False  # a reranker's scores; else cosines of sentence embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class Similarity:
    """A quantized encoder compared with its reference on the windows of a text."""

    mean_cosine: float  # of sentence embeddings, else of outputs pooled by the mean over positions
    lowest_cosine: float
    relative_rms_error: float  # L2 norm of all errors over that of all reference values
    max_relative_error: float  # largest difference over largest reference value
    num_windows: int
    window: int
    text: str
    is_meaningful: bool = True
    error_standard_error: float | None = None  # of the RMS error over windows; None for one window
    nearest_agreement: float | None = None  # share of texts that keep their nearest one; None: no embeddings
    of_pictures: bool = False  # instead of texts; the window is then the tokens of a picture
    labels: Labels | None = None  # of a classifier
    ranking: Ranking | None = None  # of a reranker or a sentence model


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatError:
    """The original as a float32 graph compared with transformers on a few prompts."""

    largest_error: float  # largest difference over largest output of transformers; 1 where not finite
    num_tokens: int
    failure: str | None = None  # error of a graph that does not run


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    median_ms: float
    lowest_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    highest_ms: float
    num_runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Time of a prompt and of a decoded token; runs are interleaved with the reference."""

    provider: str
    threads: int
    prompt_length: int
    prefill: Timing  # of the whole prompt
    prefill_reference: Timing | None = None
    decode: Timing | None = None  # per token; None for a model that generates nothing
    decode_reference: Timing | None = None
    num_decoded: int | None = None  # tokens of one decode run
    floor_ms_per_token: float | None = None  # time to read weights and cache at the memory bandwidth
    num_warm_ups: int
    batch: int = 1
    reference: str | None = None  # description of the reference


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """Peak resident memory of a process."""

    load_peak_bytes: int
    run_peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Peak memory of both models, in a process for each."""

    quantized: PeakMemory
    reference: PeakMemory | None = None
    empty_process_bytes: int | None = None  # imports without a model


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderAccuracy:
    """Logits of an execution provider compared with those of a reference."""

    reference: str  # description
    max_relative_logit_error: float  # largest difference over largest reference logit
    top1_agreement: float
    num_tokens: int
    perplexity_ratio: float | None = None  # provider over reference; None for an encoder
    kl_divergence: float | None = None  # mean, in nats; None for an encoder
    standard_error: float | None = None  # of the KL divergence or of the RMS error, over texts
    top1_standard_error: float | None = None
    lowest_cosine: float | None = None  # of pooled states; None for a decoder
    relative_rms_error: float | None = None  # of states; None for a decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderRun:
    """Trial of an execution provider in a process; None for a stage that it did not reach."""

    provider: str
    outcome: str  # "ran", "partly" (a stage after the start failed), or "failed"
    why_not: str | None = None
    cure: str | None = None
    python: str | None = None  # interpreter of another environment
    device: str | None = None
    version: str | None = None  # of the provider's distribution
    library_ms: float | None = None  # loading the vendor's library, once a process; not in the next three
    start_ms: float | None = None  # opening the sessions from files, compilation included
    start_again_ms: float | None = None  # opening them from compiled files, checks included
    compile_ms: float | None = None  # start_ms - start_again_ms
    prompt_length: int | None = None
    prefill: Timing | None = None
    decode: Timing | None = None  # per token
    peak_bytes: int | None = None  # of the process
    placement: Placement | None = None
    accuracy: ProviderAccuracy | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    processor: str
    num_cores: float  # usable cores; a container may have a fraction of one
    python: str
    platform: str
    versions: dict[str, str]  # distribution -> version
