"""Export of a model with fixed shapes, for NPUs.

    checkpoint --emit--> float graph --run on calibration text--> ranges --round--> graphs that share weights

A decoder becomes two graphs, one for a prompt and one for a token behind a cache; an encoder becomes one.
Ranges are those of the float graph with rounded weights, from windows as long as the texts of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.export.check import check_models
from quantkit.export.graph import ModelProto, counted_bytes, save
from quantkit.export.static.decoder import emit_static
from quantkit.export.static.encoder import emit_static_encoder
from quantkit.export.static.operators import StaticShape, known_ranges
from quantkit.export.static.qdq import Bits, quantize_static
from quantkit.export.static.ranges import showing_ranges
from quantkit.export.static.shared_weights import share_weights
from quantkit.export.traffic import traffic_of
from quantkit.pipeline.stages.export import (
    Count,
    Exported,
    ExportJob,
    graph_metadata,
    histograms_of,
    kind_of,
    reserved,
    write_rounded,
)
from quantkit.plan.formats import static_bits
from quantkit.quantization.layout import Checkpoint, Contents, contents_of
from quantkit.runtime.graph import DECODE_FILE, MODEL_FILE, PROMPT_FILE
from quantkit.runtime.ranges import Ranges, observe_ranges
from quantkit.runtime.tokenizer import TOKENIZER_FILE, open_text

SHARED_FILE = "weights.data"  # of all graphs of the artifact
HEADROOM = 1.25  # of 16-bit ranges: the largest error on unseen text fell from 3.9% to 0.4%, the mean stayed
RANGES_FILE, RANGES_WEIGHTS = ".ranges.onnx", ".ranges.data"
Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphJob:
    """An export job with its checkpoint, from which graphs are emitted."""

    job: ExportJob
    contents: Contents
    checkpoint: Checkpoint
    folder: Path  # of the artifact; working files beside the graphs are removed again
    metadata: Mapping[str, Any]
    windows_NT: NDArray[np.int64]
    prompt: int
    cache: int

    @property
    def bits(self) -> Bits | None:
        """Widths of the values between operators; None: these stay float."""
        bits = static_bits(self.job.scheme)
        return Bits(values=bits, products=bits) if bits else None

    def ranges(self, graph: ModelProto, feeds: list[Feeds]) -> Ranges:
        """The range of every value of a float graph on calibration text, with headroom."""
        assert self.bits is not None, "the target keeps floats between operators"
        observable, names = showing_ranges(graph)
        if not feeds:  # a dry run counts bytes
            return dict.fromkeys(names, (-1.0, 1.0, 1.0))
        path, weights = self.folder / RANGES_FILE, self.folder / RANGES_WEIGHTS
        try:
            share_weights({RANGES_FILE: observable}, weights, kept_in=self.checkpoint.path)
            save(observable, path)
            observed = with_headroom(observe_ranges(path, names, feeds), self.bits.values)
        finally:
            path.unlink(missing_ok=True)
            weights.unlink(missing_ok=True)
        scale = self.job.model_map.embedding_scale or 1.0
        return {**observed, **known_ranges(self.checkpoint, self.contents, scale)}

    def rounded(self, graph: ModelProto, ranges: Ranges) -> ModelProto:
        """The float graph with quantized values."""
        assert self.bits is not None, "the target keeps floats between operators"
        return quantize_static(graph, ranges, self.bits, kept_in=self.checkpoint.path.parent)


def decoder_graphs(work: GraphJob) -> dict[str, ModelProto]:
    """The graph of a prompt, and the graph of one token behind a cache."""

    def emit(shape: StaticShape) -> ModelProto:
        return emit_static(
            work.job.model_map,
            work.contents,
            work.checkpoint,
            shape=shape,
            target=work.job.profile,
            metadata=work.metadata,
        )

    shapes = {
        PROMPT_FILE: StaticShape(tokens=work.prompt, gives_all_logits=False),
        DECODE_FILE: StaticShape(tokens=1, past=work.cache),
    }
    if work.bits is None:
        return {name: emit(shape) for name, shape in shapes.items()}
    mask = np.ones((1, work.windows_NT.shape[1]), np.int32)
    feeds: list[Feeds] = [
        {"input_ids": ids_T[None].astype(np.int32), "attention_mask": mask} for ids_T in work.windows_NT
    ]
    ranges = work.ranges(emit(StaticShape(tokens=work.windows_NT.shape[1])), feeds)
    return {name: work.rounded(emit(shape), ranges) for name, shape in shapes.items()}


def encoder_graphs(work: GraphJob) -> dict[str, ModelProto]:
    """The one graph of an encoder, for texts up to its length."""
    graph = emit_static_encoder(
        work.job.model_map,
        work.contents,
        work.checkpoint,
        tokens=work.prompt,
        target=work.job.profile,
        metadata={**work.metadata, "max_positions": work.prompt},
    )
    if work.bits is None:
        return {MODEL_FILE: graph}
    has_tokenizer = (work.folder / TOKENIZER_FILE).exists()
    frame = open_text(work.folder).encode("") if has_tokenizer else []
    names = {graph_input.name for graph_input in graph.graph.input}
    feeds: list[Feeds] = [
        {name: values for name, values in text.items() if name in names}
        for text in encoder_texts(work.windows_NT[:, : work.prompt], work.prompt, frame)
    ]
    return {MODEL_FILE: work.rounded(graph, work.ranges(graph, feeds))}


GRAPHS: dict[str, Callable[[GraphJob], dict[str, ModelProto]]] = {  # kind of model -> its graphs by file
    "decoder": decoder_graphs,
    "encoder": encoder_graphs,
}


def export_static(job: ExportJob, folder: Path, *, count: Count = lambda _: None) -> Exported:
    """Quantize and export with fixed shapes; every file is read again and checked against the plan."""
    assert job.static.prompt is not None, "lengths are decided when the recipe is resolved"
    assert job.windows_NT is not None
    kind, bits = kind_of(job.model_map, job.profile), static_bits(job.scheme)
    assert (bits is not None) == job.profile.rounds_values
    contents = static_contents(job)
    checkpoint, losses = write_rounded(job, contents, folder, count)
    histograms = histograms_of(job, contents, checkpoint, losses)
    work = GraphJob(
        job=job,
        contents=contents,
        checkpoint=checkpoint,
        folder=folder,
        metadata=graph_metadata(job, contents, kind),
        windows_NT=job.windows_NT,
        prompt=job.static.prompt,
        cache=job.static.cache or 0,
    )
    graphs = GRAPHS[kind](work)
    planned = counted_bytes(graphs.values())
    share_weights(graphs, folder / SHARED_FILE, kept_in=checkpoint.path)
    paths = tuple(folder / name for name in graphs)
    for path, graph in zip(paths, graphs.values(), strict=True):
        save(graph, path)
    if not job.keeps_checkpoint:
        checkpoint.path.unlink()
    return Exported(
        folder=folder,
        kind=kind,
        paths=paths,
        contents=contents,
        placement=check_models(paths, job.plan, job.profile, in_each=True),
        planned_bytes=planned,
        traffic=traffic_of(job.model_map, contents),
        losses=losses,
        histograms=histograms,
    )


def expected_static_bytes(job: ExportJob) -> int:
    """Bytes of graphs of fixed shapes and of the weights that they share; ranges count as bytes alone."""
    assert job.static.prompt is not None and job.windows_NT is not None
    kind = kind_of(job.model_map, job.profile)
    contents = static_contents(job)
    with reserved(job, contents) as checkpoint:
        work = GraphJob(
            job=job,
            contents=contents,
            checkpoint=checkpoint,
            folder=checkpoint.path.parent,
            metadata=graph_metadata(job, contents, kind),
            windows_NT=job.windows_NT[:0],
            prompt=job.static.prompt,
            cache=job.static.cache or 0,
        )
        with np.errstate(divide="ignore", invalid="ignore"):  # all weights and scales are zeros
            return counted_bytes(GRAPHS[kind](work).values())


def static_contents(job: ExportJob) -> Contents:
    """The contents of static graphs: tables are floats, quantized as values of the graph.

    A table that a head in two halves shares is read from that head.
    """
    contents = contents_of(job.model_map, job.plan, job.formats, adds_biases=job.adds_biases)
    tables = [
        entry
        if entry.grid is not None and entry.grid.in_halves
        else replace(entry, grid=None, shares=entry.table.tied_to)
        for entry in contents.tables
    ]
    return replace(contents, tables=tuple(tables))


def with_headroom(ranges: Ranges, bits: int) -> Ranges:
    """Ranges widened for unseen texts; at 8 bits a coarser step costs more than it saves."""
    factor = HEADROOM if bits > 8 else 1.0
    return {name: (low * factor, high * factor, peak) for name, (low, high, peak) in ranges.items()}


def encoder_texts(windows_NT: NDArray[np.int64], length: int, frame: Sequence[int]) -> list[Feeds]:
    """Calibration windows in the forms of an encoder's input: bare, framed, as a pair, and short.

    A framed text stands between the special tokens of the tokenizer. These have the largest values of all in
    many encoders, so a range without them would cut them off.
    """
    texts: list[Feeds] = []
    for number, window_T in enumerate(windows_NT):
        is_framed, is_pair, is_short = number % 4 > 0, number % 4 == 2, number % 4 == 3
        count = len(window_T) // 2 + 1 if is_short else len(window_T)
        ids, mask, token_types = (np.zeros((1, length), np.int32) for _ in range(3))
        ids[0, :count], mask[0, :count] = window_T[:count], 1
        if is_framed and len(frame) > 1:
            ids[0, 0], ids[0, count - 1] = frame[0], frame[-1]
        if is_pair:
            token_types[0, count // 2 : count] = 1
        texts.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": token_types})
    return texts
