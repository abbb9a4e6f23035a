"""Export of a model with dynamic shapes: fused decoders and encoders, and traced models.

    weights --quantize--> checkpoint --emit or trace--> graphs --check--> placement

The float reference is exported by the same functions with an empty plan, so a difference between the two
files is the quantization and nothing else.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.export.check import Placement, check_models, held_bytes
from quantkit.export.decoder import why_not
from quantkit.export.encoder import fills_texts, vector_output, why_not_encoder
from quantkit.export.encoder_decoder import why_not_encoder_decoder
from quantkit.export.fused.decoder import emit_decoder, why_not_fused
from quantkit.export.fused.encoder import emit_encoder
from quantkit.export.fused.encoder_decoder import emit_encoder_decoder
from quantkit.export.genai import CONFIG_FILE, genai_config
from quantkit.export.graph import LEAST_OUTSIDE, ModelProto, described_bytes, load, save
from quantkit.export.half import to_half
from quantkit.export.traced.lower import lower
from quantkit.export.traced.trace import require_traceable, trace
from quantkit.export.traffic import Traffic, to_metadata, traffic_of
from quantkit.model.companions import config_for_artifact, make_fast_tokenizer, tokenizer_files
from quantkit.model.linears import LINEARS
from quantkit.model.load import Source
from quantkit.model.model_map import ModelMap, to_json
from quantkit.model.sentence import cross_encoder_files
from quantkit.model.weights.open import require_names
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.folder import folder_bytes
from quantkit.plan.formats import BITS_IN_HALVES, SCHEMES, Format, Grid
from quantkit.plan.plan import Plan
from quantkit.plan.select import choose
from quantkit.plan.targets import DEFAULT_TARGET, TARGETS, Target, format_on
from quantkit.quantization.calibration.statistics import StatisticsOf, no_statistics
from quantkit.quantization.checkpoint import reserve_checkpoint, write_checkpoint
from quantkit.quantization.layout import Checkpoint, Contents, contents_of, formats_of, planned_bytes
from quantkit.quantization.projections import weight_name
from quantkit.quantization.rounding import PLAIN
from quantkit.quantization.rounding.apply import quantized_parts
from quantkit.quantization.rounding.errors import Sums
from quantkit.quantization.rounding.histograms import weight_histograms, worst_packs
from quantkit.quantization.rounding.on_workers import parts_on_workers
from quantkit.quantization.rounding.pack_histograms import PackHistograms
from quantkit.recipe import Static
from quantkit.runtime.graph import MODEL_FILE
from quantkit.runtime.tokenizer import TOKENIZER_FILE, read_stop_ids
from quantkit.workers.record import Workers

WEIGHTS_FILE = "weights.safetensors"
TWO_TOWERS = {  # model type -> its classes of one tower
    "clip": ("CLIPVisionModelWithProjection", "CLIPTextModelWithProjection"),
    "siglip": ("SiglipVisionModel", "SiglipTextModel"),
}
NOTHING = 1 << 62  # a min_dim that no projection reaches
TRANSPOSED = {name: row.is_transposed for name, row in LINEARS.items()}
Count = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportJob:
    """A model, its plan, and everything that decides the bytes of its files."""

    model_map: ModelMap
    plan: Plan
    weights: TensorSource
    scheme: str
    target: str = DEFAULT_TARGET
    fit: str = PLAIN
    layers: Mapping[str, str] = field(default_factory=dict)  # pattern -> a scheme of its own, or "float"
    adds_biases: bool = False  # bias correction
    statistics: StatisticsOf = no_statistics
    original: Path | None = None  # folder of the source; a traced model needs it
    single_file_bytes: int = 64 << 20  # larger weights lie beside the graph
    keeps_checkpoint: bool = False
    static: Static = field(default_factory=Static)  # lengths of a target with fixed shapes
    windows_NT: NDArray[np.int64] | None = None  # calibration text of a target with fixed shapes
    workers: Workers | None = None  # that round packs; None: this process

    @property
    def profile(self) -> Target:
        return TARGETS[self.target]

    @property
    def formats(self) -> dict[str, Format]:
        return projection_formats(self.model_map, self.scheme, self.target, self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A written model, read again and checked against its plan."""

    folder: Path
    kind: str  # "decoder", "encoder", "encoder_decoder" or "traced"
    paths: tuple[Path, ...]  # of the graphs
    contents: Contents
    placement: Placement
    planned_bytes: int
    traffic: Traffic  # bytes that one decoded token reads
    losses: Mapping[str, Sums]  # rounding errors by pack
    histograms: tuple[PackHistograms, ...] = ()  # of the packs with the largest errors

    @property
    def num_bytes(self) -> int:
        """Bytes of the graphs and of the weights beside them."""
        return held_bytes(self.folder, self.paths)


def kind_of(model_map: ModelMap, target: Target = TARGETS[DEFAULT_TARGET]) -> str:
    """How a model is exported: as an emitted "decoder", "encoder" or "encoder_decoder", or "traced"."""
    if model_map.model_type in TWO_TOWERS:
        vision, text = TWO_TOWERS[model_map.model_type]
        raise InputError(
            f"{model_map.architecture} is two models, one of pictures and one of texts",
            where=model_map.name,
            allowed=f"each of them by itself: {vision}, {text}",
            next_step=f'python -c "from transformers import {vision} as M; '
            "M.from_pretrained('FOLDER').save_pretrained('NEW_FOLDER')\", and copy preprocessor_config.json; "
            f"the same with {text} and the tokenizer files",
        )
    if (why_not if target.is_static else why_not_fused)(model_map) is None:
        return "decoder"
    blocks = [block for block in model_map.blocks if block.stack == "decoder"]
    if any(
        not (attention.is_causal or attention.is_cross) for block in blocks for attention in block.attentions
    ):
        raise InputError(
            f"{model_map.architecture} is a decoder whose attention looks in both directions",
            where="config.json (use_bidirectional_attention, is_causal)",
            allowed="decoders with causal attention, and encoders such as BERT",
            next_step="use a model of one of these kinds; no graph here has such a mask",
        )
    if why_not_encoder(model_map) is None:
        return "encoder"
    is_pair = not target.is_static and not target.is_half and why_not_encoder_decoder(model_map) is None
    return "encoder_decoder" if is_pair else "traced"


def projection_formats(
    model_map: ModelMap, scheme_name: str, target_name: str, layers: Mapping[str, str] | None = None
) -> dict[str, Format]:
    """The format of every projection, as the target computes it.

    A static graph has one format, except for a head between 16-bit values: the head loses most of all
    projections. Stored in two halves, which the embedding reads too, it takes no more space.
    """
    scheme, target = SCHEMES[scheme_name], TARGETS[target_name]
    if target.is_static:
        in_halves = target.rounds_values and scheme.body.input_bits == BITS_IN_HALVES
        head = replace(scheme.body, grid=Grid(bits=BITS_IN_HALVES)) if in_halves else scheme.body
        scheme = replace(scheme, head=head)
    formats = formats_of(model_map, scheme, layers)
    return {name: format_on(target, projection_format) for name, projection_format in formats.items()}


def export_dynamic(job: ExportJob, folder: Path, *, count: Count = lambda _: None) -> Exported:
    """Quantize and export with dynamic shapes."""
    assert not job.profile.is_static, "export_static writes these"
    kind = kind_of(job.model_map, job.profile)
    require_exportable(job.model_map, kind, job.target, job.original)
    contents = dynamic_contents(job, kind)
    checkpoint, losses = write_rounded(job, contents, folder, count)
    histograms = histograms_of(job, contents, checkpoint, losses)
    if kind == "traced":
        graphs, keeps_outside = _trace(job, contents, checkpoint, graph_metadata(job, contents, kind))
    else:
        graphs, keeps_outside = emit(job, kind, contents, checkpoint)
    planned = _planned_bytes(contents, graphs.values(), job.profile, checkpoint if keeps_outside else None)
    for name, graph in graphs.items():
        save(graph, folder / name)
    if not keeps_outside and not job.keeps_checkpoint:
        checkpoint.path.unlink()
    paths = tuple(folder / name for name in graphs)
    return Exported(
        folder=folder,
        kind=kind,
        paths=paths,
        contents=contents,
        placement=check_models(paths, job.plan, job.profile),
        planned_bytes=planned,
        traffic=traffic_of(job.model_map, contents),
        losses=losses,
        histograms=histograms,
    )


def histograms_of(
    job: ExportJob, contents: Contents, checkpoint: Checkpoint, losses: Mapping[str, Sums]
) -> tuple[PackHistograms, ...]:
    return tuple(weight_histograms(pack, job.weights, checkpoint) for pack in worst_packs(contents, losses))


def dynamic_contents(job: ExportJob, kind: str) -> Contents:
    return contents_of(
        job.model_map,
        job.plan,
        job.formats,
        table_grid=SCHEMES[job.scheme].head.grid,
        packs_attention=kind != "traced",
        adds_biases=job.adds_biases,
    )


def _planned_bytes(
    contents: Contents, graphs: Collection[ModelProto], target: Target, beside: Checkpoint | None
) -> int:
    """Bytes of the planned tensors and of graphs with their constants; `beside` stays beside the graph."""
    tensors = planned_bytes(contents.tensors())
    floats = (
        planned_bytes(spec for spec in contents.tensors() if spec.dtype == "F32") if target.is_half else 0
    )
    holders = Counter(tensor.name for graph in graphs for tensor in graph.graph.initializer)
    small = sum(
        spec.num_bytes * max(1, holders[spec.name])
        for spec in contents.tensors()
        if spec.num_bytes < LEAST_OUTSIDE
    )
    copied = floats // 2 if target.is_half else small  # from the checkpoint into each graph
    stored = beside.path.stat().st_size + copied if beside else tensors - floats // 2
    names = {spec.name for spec in contents.tensors()}
    constants = sum(
        len(tensor.raw_data)
        for graph in graphs
        for tensor in graph.graph.initializer
        if tensor.name not in names
    )
    return stored + constants + sum(described_bytes(graph) for graph in graphs)


def emit(
    job: ExportJob, kind: str, contents: Contents, checkpoint: Checkpoint
) -> tuple[dict[str, ModelProto], bool]:
    """(the fused graphs by file name, whether the checkpoint stays beside them)."""
    metadata = graph_metadata(job, contents, kind)
    if kind == "encoder_decoder":
        graphs = emit_encoder_decoder(
            job.model_map, contents, checkpoint, target=job.profile, metadata=metadata
        )
        return graphs, True
    keeps_outside = checkpoint.path.stat().st_size > job.single_file_bytes
    graph = (emit_decoder if kind == "decoder" else emit_encoder)(
        job.model_map,
        contents,
        checkpoint,
        target=job.profile,
        metadata=metadata,
        keeps_weights_outside=keeps_outside,
    )
    graph = to_half(graph, checkpoint.path.parent) if job.profile.is_half else graph
    return {MODEL_FILE: graph}, keeps_outside


def expected_bytes(job: ExportJob) -> int:
    """Bytes of graph and weights of a model with dynamic shapes, without the graph where it is traced."""
    kind = kind_of(job.model_map, job.profile)
    contents = dynamic_contents(job, kind)
    with reserved(job, contents) as checkpoint:
        if kind == "traced":
            return planned_bytes(contents.tensors())
        graphs, keeps_outside = emit(job, kind, contents, checkpoint)
        weights = checkpoint.path.stat().st_size if keeps_outside else 0
        return sum(int(graph.ByteSize()) for graph in graphs.values()) + weights


def companion_bytes(source: Source, model_map: ModelMap, target_name: str) -> int:
    """Bytes of tokenizer and configs."""
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        write_companions(source, model_map, Path(folder), target_name=target_name)
        return folder_bytes(Path(folder))


@contextmanager
def reserved(job: ExportJob, contents: Contents) -> Iterator[Checkpoint]:
    """A checkpoint of zeros that takes no space, from which a graph is emitted to be counted."""
    header = checkpoint_header(job.model_map, job.plan, contents, job.scheme, job.fit)
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        yield reserve_checkpoint(Path(folder) / WEIGHTS_FILE, contents.tensors(), header)


def require_exportable(model_map: ModelMap, kind: str, target: str, original: Path | None) -> None:
    """Refuse a model that cannot be exported, by its map alone."""
    if kind != "traced":
        return
    traced = f"{model_map.architecture} must be traced ({why_not_fused(model_map)})"
    if TARGETS[target].is_half:
        raise InputError(
            f"{traced}, and only fused graphs are written in half precision",
            where=f"--target {target}",
            next_step="leave --target out",
        )
    if original is None:
        raise InputError(
            f"{traced}, and that needs its weights in a folder",
            where=model_map.name,
            next_step="give a local folder with safetensors instead of --random-weights",
        )
    require_traceable(original, model_map.model_type, model_map.architecture)


def export_float(job: ExportJob, folder: Path, *, count: Count = lambda _: None) -> Exported:
    """The model with nothing quantized, in float32 whatever the target computes in."""
    plan = choose(job.model_map, min_dim=NOTHING)
    unrounded = replace(job, plan=plan, target=DEFAULT_TARGET, fit=PLAIN, layers={}, keeps_checkpoint=False)
    return export_dynamic(unrounded, folder, count=count)


def float_bytes(model_map: ModelMap) -> int:
    """Bytes of the model's parameters in float32."""
    return 4 * model_map.at_inference.num_parameters


def write_rounded(
    job: ExportJob, contents: Contents, folder: Path, count: Count
) -> tuple[Checkpoint, Mapping[str, Sums]]:
    """(the quantized checkpoint that graphs are made from, rounding errors by pack)."""
    require_tensors(contents, job.weights, job.model_map.name)
    losses: dict[str, Sums] = {}
    rounding = partial(parts_on_workers, job.workers) if job.workers else quantized_parts
    parts = rounding(
        contents,
        job.weights,
        gain_offset=job.model_map.norm_gain_offset,
        fit=job.fit,
        statistics=job.statistics,
        losses=losses,
        progress=count,
    )
    header = checkpoint_header(job.model_map, job.plan, contents, job.scheme, job.fit)
    return write_checkpoint(folder / WEIGHTS_FILE, contents.tensors(), parts, header), losses


def require_tensors(contents: Contents, weights: TensorSource, where: str) -> None:
    """Name every tensor that the weights lack, before anything is written."""
    names = [weight_name(layer) for pack in contents.packs for layer in pack.layers]
    names += [f"{layer.matrix}.bias" for pack in contents.packs for layer in pack.layers if layer.has_bias]
    names += [f"{entry.table.name}.weight" for entry in contents.tables if not entry.shares]
    names += [f"{norm.name}.weight" for norm in contents.norms if norm.num_parameters]
    names += [f"{name}.bias" for name in contents.norm_biases]
    names += [name for name, _ in contents.loose]
    require_names(weights, names, where)


def graph_metadata(job: ExportJob, contents: Contents, kind: str) -> dict[str, Any]:
    """The metadata of a written graph, by which it is opened without its model."""
    return {
        "max_positions": job.model_map.context,
        "scheme": job.scheme,
        "model": job.model_map.name,
        "kind": kind,
        **({"sentence": job.model_map.sentence.settings} if job.model_map.sentence else {}),
        **_picture_metadata(job.model_map, kind),
        **to_metadata(traffic_of(job.model_map, contents)),
    }


def _picture_metadata(model_map: ModelMap, kind: str) -> dict[str, Any]:
    """The shape of a picture, and the output with one vector a text or a picture where the graph has it."""
    picture = model_map.picture
    vector = vector_output(model_map) if kind == "encoder" else None
    return {
        **({"picture": [picture.channels, *picture.size]} if picture else {}),
        **({"vector": vector} if vector else {}),
        **({"fills": True} if kind == "encoder" and fills_texts(model_map) else {}),
    }


def _trace(
    job: ExportJob, contents: Contents, checkpoint: Checkpoint, metadata: Mapping[str, Any]
) -> tuple[dict[str, ModelProto], bool]:
    """(lowered graphs by file name, whether they read one checkpoint beside them)."""
    assert job.original is not None, "require_exportable refuses the rest"
    with tempfile.TemporaryDirectory(prefix="quantkit-", dir=checkpoint.path.parent) as traced:
        paths = trace(
            job.original,
            Path(traced),
            model_type=job.model_map.model_type,
            architecture=job.model_map.architecture,
        )
        # The graphs of an encoder and its decoder share weights, so these stay outside of both.
        keeps_outside = len(paths) > 1
        graphs = lower(
            {path.name: load(path) for path in paths},
            contents,
            checkpoint,
            job.weights,
            transposed=TRANSPOSED,
            target=job.profile,
            metadata=metadata,
            keeps_weights_outside=keeps_outside,
        )
    return graphs, keeps_outside


def checkpoint_header(
    model_map: ModelMap, plan: Plan, contents: Contents, scheme_name: str, fit: str
) -> dict[str, Any]:
    """The description in the checkpoint's header, so that it can be read without the model."""
    return {
        "model": model_map.name,
        "model_type": model_map.model_type,
        "scheme": scheme_name,
        "fit": fit,
        "min_dim": plan.min_dim,
        "norm_gain_offset": model_map.norm_gain_offset,
        "packs": [
            {
                "name": pack.name,
                "grid": to_json(pack.grid),
                "activations": pack.format.activations if pack.format else None,
                "table": pack.table,
                "layers": [to_json(layer) for layer in pack.layers],
            }
            for pack in contents.packs
        ],
        "tables": [
            {"name": entry.table.name, "grid": to_json(entry.grid), "shares": entry.shares}
            for entry in contents.tables
        ],
    }


def write_companions(
    source: Source, model_map: ModelMap, folder: Path, *, target_name: str = DEFAULT_TARGET
) -> None:
    """Config, tokenizer and the files by which other clients run the artifact."""
    config = config_for_artifact(source)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in tokenizer_files(source):
        shutil.copyfile(path, folder / path.name)
    sentence = model_map.sentence
    for name in sentence.files if sentence else cross_encoder_files(source.folder, model_map.architecture):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(str(source.folder)) / name, folder / name)
    if not (folder / TOKENIZER_FILE).exists():
        make_fast_tokenizer(source, folder)
    stop_ids = sorted(token for token in read_stop_ids(folder) if token < (model_map.vocab_size or 0))
    settings = genai_config(model_map, stop_ids=stop_ids, config=config)
    if settings and not TARGETS[target_name].is_static:
        (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
