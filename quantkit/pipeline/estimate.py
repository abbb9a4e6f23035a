"""Seconds and peak memory of a run, before it: the work of every stage, at rates measured on this machine.

Products and steps for each element are those of the specification. All other work is counted as passes over
weights, statistics or logits that the code of a stage makes. Memory is the process as it is now and, beside
it, the weights that the largest stage holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from quantkit.evaluation.accuracy import windows
from quantkit.evaluation.artifact import LARGEST_WINDOW
from quantkit.evaluation.categories import category_windows
from quantkit.evaluation.float_error import LONG, check_lengths
from quantkit.evaluation.latency import SETTLING_SECONDS, Budget
from quantkit.evaluation.measure import MAX_RUNS, timed_lengths
from quantkit.evaluation.pictures import picture_paths
from quantkit.evaluation.samples import NEW_TOKENS, NUM_PROMPTS, NUM_TEXTS, PROMPT_TOKENS, TEXT_TOKENS
from quantkit.evaluation.text import RANDOM_TOKENS, bundled_questions, encoded_text
from quantkit.model.model_map import ModelMap
from quantkit.pipeline.rates import Rates
from quantkit.pipeline.stages.export import ExportJob, dynamic_contents, float_bytes
from quantkit.pipeline.stages.export_static import static_contents
from quantkit.pipeline.stages.float_reference import UNMEASURED_BYTES, measures_anything
from quantkit.pipeline.stages.prepare import (
    OUTLIER_WINDOWS,
    QUICK_LENGTH,
    QUICK_WINDOWS,
    Prepared,
    batch_size,
    statistics_needs,
    streams_blocks,
    takes_outliers,
)
from quantkit.pipeline.stages.write import CACHE_WINDOWS
from quantkit.plan.cost.specification import specify
from quantkit.plan.targets import TARGETS
from quantkit.quantization.calibration.running import PANEL, stored_bytes
from quantkit.quantization.layout import Pack
from quantkit.quantization.transforms import TRANSFORMS
from quantkit.quantization.transforms.alpha import GRID
from quantkit.quantization.transforms.strengths import NUM_ROWS
from quantkit.runtime.machine.cache import machine_key
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.machine.throughput import read_cache
from quantkit.runtime.tokenizer import TOKENIZER_FILE, open_text

# Passes of numpy's, torch's and onnxruntime's functions over each value of a tensor.
READ = 1  # from a file, as float32
LOAD = 2  # into a session: read and packed
STEP = 0.5  # a weight that a decoded token reads; nothing is written
ROUND = 7  # peaks, division, rounding, clipping, conversion, bytes
FIT = {"rtn": 0, "mse": 90, "output": 110, "gptq": 110}  # about 15 scales, six passes each
TRANSFORM = 3
SCORE = 20  # of both models' logits: float64 copies, exponentials, sums
REDUCE = 5  # of every value whose range is found
ROUND_VALUES = 8  # to integers between operators and back, in a graph of fixed shapes
DEQUANTIZE = 5  # every weight, in each run of such a graph
HISTOGRAM = 5
NUM_TRIALS = 5  # processes of the memory measurement
MACHINE_SECONDS = 3.0  # of a measurement of the machine's rates


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of a stage."""

    macs: float = 0.0
    passes: float = 0.0
    file_bytes: float = 0.0  # written
    processes: int = 0  # started
    waiting_seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in Work.__slots__})

    def __mul__(self, factor: float) -> Work:
        return Work(**{name: getattr(self, name) * factor for name in Work.__slots__})

    def seconds(self, rates: Rates) -> float:
        return (
            self.macs / rates.macs
            + self.passes / rates.passes
            + self.file_bytes / rates.file_bytes
            + self.processes * rates.process_seconds
            + self.waiting_seconds
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of a run, named as its progress is."""

    name: str
    work: Work = Work()
    held_bytes: int = 0  # beside the process as it is before the run


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEstimate:
    name: str
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a run that its stages share."""

    prepared: Prepared  # before transforms and calibration
    job: ExportJob
    model_bytes: int  # of the artifact

    @property
    def model_map(self) -> ModelMap:
        return self.prepared.model_map

    @property
    def num_parameters(self) -> int:
        return self.model_map.at_inference.num_parameters

    @property
    def is_static(self) -> bool:
        return TARGETS[self.job.target].is_static

    @property
    def packs(self) -> tuple[Pack, ...]:
        """The packs that are quantized."""
        kind = self.prepared.resolved.kind
        contents = static_contents(self.job) if self.is_static else dynamic_contents(self.job, kind)
        return tuple(pack for pack in contents.packs if pack.grid)

    @property
    def float_bytes(self) -> int:
        return float_bytes(self.model_map)

    @property
    def source_bytes(self) -> int:
        return self.prepared.resolved.weights.source_bytes()

    def within(self, length: int) -> int:
        return min(length, self.model_map.context or length)

    def forward(self, tokens: int, length: int, *, has_head: bool = True) -> Work:
        """Passes in float32 over texts of a length.

        One more pass over each output: products write theirs, biases are added, heads transposed.
        """
        totals = specify(self.model_map, batch=1, length=max(1, length)).totals
        head = 0 if has_head else totals.macs_by_group["head"]
        steps = totals.flops - 2 * totals.matrix_macs + self.values(length, length)
        work = Work(macs=totals.matrix_macs - head, passes=steps)
        return work * (tokens / max(1, length))

    def values(self, tokens: int, length: int) -> float:
        """Outputs of all steps of these passes."""
        rows = specify(self.model_map, batch=1, length=max(1, length)).rows
        return sum(row.output_bytes for row in rows) / 4 * tokens / max(1, length)

    def block_bytes(self, tokens: int, length: int) -> int:
        """Outputs of all steps of one block."""
        return int(4 * self.values(tokens, length) / max(1, len(self.model_map.blocks)))

    def quantized(self, tokens: int, length: int) -> Work:
        """Passes of the artifact."""
        work = self.forward(tokens, length)
        if not self.is_static:
            return work
        rounding = ROUND_VALUES * self.values(tokens, length)
        weights = DEQUANTIZE * self.num_parameters * tokens / max(1, length)
        return work + Work(passes=rounding + weights)


def estimate(sizes: Sizes, rates: Rates) -> tuple[StageEstimate, ...]:
    """Seconds and peak memory of every stage that the recipe turns on."""
    base = psutil.Process().memory_info().rss
    return tuple(
        StageEstimate(name=stage.name, seconds=stage.work.seconds(rates), peak_bytes=base + stage.held_bytes)
        for stage in stages(sizes, rates)
    )


def stages(sizes: Sizes, rates: Rates) -> Iterator[Stage]:
    recipe = sizes.prepared.resolved.recipe
    for name in recipe.transforms:
        yield from _transform(sizes, name)
    yield from _calibration(sizes, statistics_needs(sizes.prepared))
    if takes_outliers(sizes.prepared):
        yield _outliers(sizes)
    yield _export(sizes)
    if recipe.cache != "float32":
        tokens = CACHE_WINDOWS * sizes.within(recipe.calibration.length)
        work = sizes.quantized(tokens, sizes.within(recipe.calibration.length))
        yield Stage(name="ranges of the cache", work=work, held_bytes=2 * sizes.model_bytes)
    if sizes.float_bytes <= UNMEASURED_BYTES or measures_anything(recipe.measure):
        yield from _float_reference(sizes)
    if recipe.measure.accuracy:
        yield from _accuracy(sizes)
    yield from _latency(sizes, rates)
    if recipe.measure.memory:
        yield _memory(sizes)
    yield from _pictures(sizes)


def _outliers(sizes: Sizes) -> Stage:
    """The pass over a few windows."""
    length = sizes.within(QUICK_LENGTH)
    windows = OUTLIER_WINDOWS if takes_outliers(sizes.prepared) else QUICK_WINDOWS
    work = sizes.forward(windows * length, length, has_head=False)
    reading = Work(passes=READ * sizes.num_parameters, processes=1)  # imports the model's class
    return Stage(name="outliers", work=work + reading, held_bytes=2 * _largest_block_bytes(sizes))


def _transform(sizes: Sizes, name: str) -> Iterator[Stage]:
    recipe = sizes.prepared.resolved.recipe
    if name == "smoothquant" and recipe.smoothing == "quick":
        yield _outliers(sizes)
    elif TRANSFORMS[name].statistic:
        yield from _calibration(sizes, dict.fromkeys(_planned(sizes), frozenset[str]()))
        weights = sum(pack.in_features * pack.out_features for pack in sizes.packs)
        tries = Work(macs=NUM_ROWS * weights, passes=(ROUND + READ) * weights) * len(GRID)
        yield Stage(name=f"{name}: strengths", work=tries, held_bytes=2 * _largest_pack_bytes(sizes))
    yield Stage(
        name=name,
        work=Work(passes=TRANSFORM * sizes.num_parameters),
        held_bytes=2 * _largest_pack_bytes(sizes),
    )


def _planned(sizes: Sizes) -> list[str]:
    return sorted({layer.matrix for layer in sizes.model_map.layers if layer.name in sizes.prepared.planned})


def _calibration(sizes: Sizes, needs: dict[str, frozenset[str]]) -> Iterator[Stage]:
    """Blocks over all windows, after a batch that records their calls."""
    if not needs:
        return
    recipe = sizes.prepared.resolved.recipe
    length = sizes.within(recipe.calibration.length)
    num_windows = max(1, recipe.calibration.windows - recipe.calibration.leave_out)
    tokens, recorded = num_windows * length, min(num_windows, batch_size(length)) * length
    work = sizes.forward(tokens + recorded, length, has_head=False)
    held, stored = 0, 0
    for pack in sizes.packs:
        statistics = needs.get(pack.layers[0].matrix, frozenset())
        width = pack.in_features
        if "second_moment" in statistics:
            work += Work(macs=tokens * width * (width + PANEL) / 2)
            held = max(held, 16 * width * width)
        if "histogram" in statistics:
            work += Work(passes=HISTOGRAM * tokens * width)
        stored += stored_bytes(width, statistics)
    held += sizes.block_bytes(batch_size(length) * length, length)
    hidden = 4 * (sizes.model_map.hidden_size or 0) * tokens * len(sizes.model_map.blocks)
    streams = streams_blocks(sizes.model_map)  # for the key, for the recorded pass, and for all windows
    work += Work(passes=READ * sizes.num_parameters * (3 if streams else 1), file_bytes=stored + hidden)
    work += sizes.forward(3 * recipe.calibration.gradient_windows * length, length)
    held += _largest_block_bytes(sizes) if streams else sizes.float_bytes
    yield Stage(name="calibration", work=work, held_bytes=held)


def _export(sizes: Sizes) -> Stage:
    job, weights = sizes.job, sizes.num_parameters
    work = Work(passes=(READ + ROUND + FIT[job.fit]) * weights, file_bytes=2 * sizes.model_bytes)
    held = sizes.model_bytes + 2 * _largest_pack_bytes(sizes)
    if job.fit == "gptq":
        for pack in sizes.packs:
            width = pack.in_features
            work += Work(macs=width**3 / 3 + pack.out_features * width**2 / 2)  # factor, feedback
    if sizes.is_static and job.windows_NT is not None and TARGETS[job.target].rounds_values:
        count, length = job.windows_NT.shape
        values = sizes.values(count * length, length)
        work += sizes.forward(count * length, length) + Work(passes=REDUCE * values)
        # All values at once, each beside a scaled, masked or transposed copy.
        held = sizes.float_bytes + int(2 * 4 * sizes.values(length, length))
    return Stage(name="quantize and export", work=work, held_bytes=held)


def _float_reference(sizes: Sizes) -> Iterator[Stage]:
    """The original as a float graph, and its outputs beside those of transformers."""
    weights = sizes.num_parameters
    yield Stage(
        name="float reference",
        work=Work(passes=2 * READ * weights, file_bytes=sizes.float_bytes),
        held_bytes=sizes.model_bytes + 2 * _largest_pack_bytes(sizes),
    )
    static = sizes.prepared.resolved.recipe.static
    short, long = check_lengths(weights, static.prompt or sizes.model_map.context or LONG)
    # The graph reads each prompt alone and both padded; transformers reads each.
    work = sizes.forward(2 * (short + long) + 2 * long, long)
    work += Work(passes=(LOAD + READ) * weights, processes=1)
    if sizes.is_static:  # graphs of fixed shapes are written for it, two of a decoder
        work += Work(passes=(2 * READ + LOAD) * weights, file_bytes=2 * sizes.float_bytes)
        work += sizes.forward(2 * long, long)
    yield Stage(name="float check", work=work, held_bytes=sizes.float_bytes + sizes.source_bytes)


def _accuracy(sizes: Sizes) -> Iterator[Stage]:
    """The artifact beside the original: both read every window."""
    resolved = sizes.prepared.resolved
    measure, weights = resolved.recipe.measure, sizes.num_parameters
    tokens = text_tokens(sizes)
    if not tokens:
        return
    is_decoder = resolved.kind == "decoder"
    limit = resolved.recipe.static.prompt if sizes.is_static else None
    longest = sizes.within(limit or LARGEST_WINDOW)
    length = min(measure.window or (longest if is_decoder else measure.prompt), longest, tokens)
    read = tokens
    if is_decoder:
        stride = min(measure.stride or max(1, length // 2), length)
        read = sum(span.end - span.begin for span in windows(tokens, window=length, stride=stride))
    outputs = (sizes.model_map.vocab_size if is_decoder else sizes.model_map.hidden_size) or 0
    work = sizes.forward(read, length) + sizes.quantized(read, length)
    work += _rankings(sizes)
    work += Work(passes=(2 * LOAD + READ) * weights + SCORE * tokens * outputs)
    held = sizes.model_bytes + 2 * sizes.float_bytes + sizes.source_bytes
    held += 4 * 4 * length * outputs + sizes.block_bytes(length, length)
    yield Stage(name="accuracy", work=work, held_bytes=held)
    folder, context = resolved.source.folder, limit or sizes.model_map.context or LARGEST_WINDOW
    if is_decoder and folder and not resolved.recipe.random_weights:
        yield Stage(name="accuracy by category", work=_by_category(sizes, folder, context), held_bytes=held)
    if resolved.model_map.picture:
        return
    num_read = NUM_PROMPTS * PROMPT_TOKENS if is_decoder else NUM_TEXTS * TEXT_TOKENS
    steps = NEW_TOKENS if is_decoder else 0
    answers = sizes.forward(2 * num_read, PROMPT_TOKENS) + _steps(sizes, NUM_PROMPTS) * steps
    yield Stage(name="answers", work=answers, held_bytes=sizes.model_bytes + sizes.float_bytes)


def _rankings(sizes: Sizes) -> Work:
    """Bundled questions and passages, each a text of its own, of a model of sentences."""
    resolved = sizes.prepared.resolved
    folder = resolved.source.folder
    if sizes.model_map.sentence is None or folder is None or resolved.recipe.random_weights:
        return Work()
    passages, questions = bundled_questions()
    encode = open_text(folder).encode
    lengths = [len(encode(text)) for text in (*(question for question, _ in questions), *passages)]
    tokens = min(sum(lengths), resolved.recipe.measure.max_tokens)
    length = sizes.within(max(1, sum(lengths) // len(lengths)))
    return sizes.forward(tokens, length) + sizes.quantized(tokens, length)


def _by_category(sizes: Sizes, folder: Path, context: int) -> Work:
    """Windows of both models, loaded already."""
    measure, vocab_size = sizes.prepared.resolved.recipe.measure, sizes.model_map.vocab_size
    work = Work()
    for windows_NT in category_windows(measure, folder, context=context, vocab_size=vocab_size).values():
        tokens, length = windows_NT.size, windows_NT.shape[1]
        work += sizes.forward(tokens, length) + sizes.quantized(tokens, length)
        work += Work(passes=SCORE * tokens * (vocab_size or 0))
    return work


def _pictures(sizes: Sizes) -> Iterator[Stage]:
    """Inputs for histograms, and rates of the machine for the roofline, which are kept for other runs."""
    measure = sizes.prepared.resolved.recipe.measure
    if measure.accuracy and text_tokens(sizes):
        length = sizes.within(QUICK_LENGTH)
        work = sizes.forward(QUICK_WINDOWS * length, length, has_head=False)
        work += Work(passes=READ * sizes.num_parameters)
        yield Stage(name="inputs for histograms", work=work, held_bytes=2 * _largest_block_bytes(sizes))
    cpu = read_cpu()
    if measure.latency and cpu.threads_for(measure.threads) == cpu.num_threads:
        seconds = 0.0 if read_cache(machine_key()) else MACHINE_SECONDS
        yield Stage(name="roofline", work=Work(waiting_seconds=seconds))


def text_tokens(sizes: Sizes) -> int:
    """Tokens of the measured text; 0 where no tokenizer reads it."""
    resolved = sizes.prepared.resolved
    measure, folder = resolved.recipe.measure, resolved.source.folder
    if picture := resolved.model_map.picture:
        return len(picture_paths(measure)[0]) * picture.num_tokens
    if resolved.recipe.random_weights:
        return min(measure.max_tokens, RANDOM_TOKENS)
    if folder is None or not (folder / TOKENIZER_FILE).exists():
        return 0
    return len(encoded_text(measure, folder)[0])


def _steps(sizes: Sizes, rows: int = 1) -> Work:
    """One decoded token of the artifact and of the float graph: each reads its weights.

    A graph of fixed shapes decodes row by row, and its weights are floats again in every run.
    """
    weights = sizes.num_parameters
    if sizes.is_static:
        return Work(passes=weights * (STEP + DEQUANTIZE * rows))
    return Work(passes=STEP * weights * (1 + sizes.model_bytes / sizes.float_bytes))


def _latency(sizes: Sizes, rates: Rates) -> Iterator[Stage]:
    """Rounds of both models until the most runs or seconds; a round before a token reads the prompt too."""
    resolved = sizes.prepared.resolved
    measure = resolved.recipe.measure
    if not measure.latency:
        return
    prompt, decode = timed_lengths(measure, sizes.within(LARGEST_WINDOW))
    prompt = resolved.recipe.static.prompt or prompt
    budget = Budget(max_runs=MAX_RUNS, max_seconds=measure.seconds / 2)
    settling = Work(waiting_seconds=2 * SETTLING_SECONDS)
    read = sizes.forward(prompt, prompt) + sizes.quantized(prompt, prompt) + settling
    rounds = [read, read + _steps(sizes) * decode] if resolved.kind == "decoder" else [read]
    seconds = 0.0
    for work in rounds:
        each = work.seconds(rates)
        fitting = max(budget.min_runs, min(budget.max_runs, int(budget.max_seconds / each)))
        seconds += each * (budget.num_warm_ups + fitting)
    work = Work(waiting_seconds=seconds)
    yield Stage(name="latency", work=work, held_bytes=sizes.model_bytes + sizes.float_bytes)


def _memory(sizes: Sizes) -> Stage:
    """Processes that load or run the artifact or the float graph, and an empty one."""
    measure = sizes.prepared.resolved.recipe.measure
    prompt, decode = timed_lengths(measure, sizes.within(LARGEST_WINDOW))
    work = sizes.forward(prompt, prompt) + sizes.quantized(prompt, prompt) + _steps(sizes) * decode
    work += Work(passes=4 * LOAD * sizes.num_parameters, processes=NUM_TRIALS)
    return Stage(name="memory", work=work, held_bytes=sizes.model_bytes)


def _largest_pack_bytes(sizes: Sizes) -> int:
    return max(4 * pack.in_features * pack.out_features for pack in sizes.packs)


def _largest_block_bytes(sizes: Sizes) -> int:
    blocks = Counter[str | None]()
    for layer in sizes.model_map.layers:
        if layer.block:
            blocks[layer.block] += 4 * layer.num_weights
    return max(blocks.values(), default=0)
