"""The stages of a quantization, each a function from the records before it to the record after it.

    weights --quantize--> checkpoint --export--> model.onnx --check--> placement

The float reference is made by the same stages with an empty plan, so that a difference between the two
files is the quantization and nothing else.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.export.check import Placement, check_models
from quantkit.export.fused.decoder import emit_decoder, why_not
from quantkit.export.fused.encoder import emit_encoder, why_not_encoder
from quantkit.export.genai import CONFIG_FILE, genai_config
from quantkit.export.graph import ModelProto, load, save
from quantkit.export.half import to_half
from quantkit.export.rotary import context_of
from quantkit.export.traced.lower import lower
from quantkit.export.traced.trace import trace
from quantkit.export.traffic import Traffic, to_metadata, traffic_of
from quantkit.export.written import held_bytes
from quantkit.model.linears import LINEARS
from quantkit.model.load import Source
from quantkit.model.model_map import ModelMap, to_json
from quantkit.model.weights.open import config_for_artifact, make_fast_tokenizer, tokenizer_files
from quantkit.model.weights.tensors import TensorSource
from quantkit.plan.formats import BITS_IN_HALVES, SCHEMES, Format, Grid
from quantkit.plan.plan import Plan
from quantkit.plan.select import choose
from quantkit.plan.targets import DEFAULT_TARGET, TARGETS, format_on
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.layout import Checkpoint, Contents, contents_of, formats_of, planned_bytes
from quantkit.quantization.rounding.apply import Evidences, quantized_parts, weight_name
from quantkit.quantization.rounding.errors import Sums
from quantkit.runtime.graph import MODEL_FILE
from quantkit.runtime.tokenizer import TOKENIZER_FILE, read_stop_ids

WEIGHTS_FILE = "weights.safetensors"
SHARED_FILE = "weights.data"  # of the graphs of a target with fixed shapes
NOTHING = 1 << 62  # a min_dim that no projection reaches
TRANSPOSED = {name: row.is_transposed for name, row in LINEARS.items()}
Count = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A written model."""

    folder: Path
    kind: str  # "decoder", "encoder" or "traced"
    paths: tuple[Path, ...]
    contents: Contents
    placement: Placement
    planned_bytes: int
    traffic: Traffic  # what one decoded token reads

    @property
    def num_bytes(self) -> int:
        """Bytes of the graph and of the weights beside it."""
        return held_bytes(self.folder, self.paths)


def require_tensors(contents: Contents, source: TensorSource, where: str) -> None:
    """Name every tensor that the weights lack, before anything is written."""
    names = [weight_name(layer) for pack in contents.packs for layer in pack.layers]
    names += [f"{layer.matrix}.bias" for pack in contents.packs for layer in pack.layers if layer.has_bias]
    names += [f"{entry.table.name}.weight" for entry in contents.tables if not entry.shares]
    names += [f"{norm.name}.weight" for norm in contents.norms]
    names += [f"{name}.bias" for name in contents.norm_biases]
    missing = sorted({name for name in names if not source.has(name)})
    if missing:
        raise InputError(
            f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:4])}",
            where=where,
            next_step="copy or download the checkpoint again; config.json asks for these",
        )


def kind_of(model_map: ModelMap) -> str:
    """How a model is exported: as a fused "decoder" or "encoder", or "traced"."""
    if why_not(model_map) is None:
        return "decoder"
    return "encoder" if why_not_encoder(model_map) is None else "traced"


def write_model(
    model_map: ModelMap,
    plan: Plan,
    source: TensorSource,
    folder: Path,
    *,
    scheme_name: str,
    fit: str,
    target_name: str,
    single_file_bytes: int,
    original: Path | None = None,
    keeps_checkpoint: bool = False,
    layers: Mapping[str, str] | None = None,
    adds_biases: bool = False,
    evidence: Evidences = lambda _: None,
    losses: dict[str, Sums] | None = None,
    count: Count = lambda _: None,
) -> Exported:
    """Quantize and export; what is on disk afterwards was read again and agrees with the plan.

    `original` is the folder of the source: only a model that must be traced needs it. `layers` are pattern ->
    scheme of projections that have one of their own; `losses` is filled with what each pack lost.
    """
    kind, target = kind_of(model_map), TARGETS[target_name]
    if target.is_half and kind == "traced":
        raise InputError(
            f"{model_map.architecture} is traced, and only fused graphs are written in half precision",
            where=f"--target {target_name}",
            next_step="leave --target out",
        )
    assert not target.is_static, "static_stages writes these"
    contents = contents_of(
        model_map,
        plan,
        formats_on(model_map, scheme_name, target_name, layers),
        table_grid=SCHEMES[scheme_name].head.grid,
        packs_attention=kind != "traced",
        adds_biases=adds_biases,
    )
    checkpoint = write_rounded(
        model_map,
        plan,
        contents,
        source,
        folder,
        scheme_name=scheme_name,
        fit=fit,
        evidence=evidence,
        losses=losses,
        count=count,
    )
    graph_options: dict[str, Any] = {
        "target": target,
        "metadata": metadata_of(model_map, contents, scheme_name, kind),
    }
    keeps_outside = checkpoint.path.stat().st_size > single_file_bytes
    if kind == "traced":
        models, keeps_outside = _traced(model_map, contents, checkpoint, source, original, graph_options)
    else:
        emit = emit_decoder if kind == "decoder" else emit_encoder
        graph_options["keeps_weights_outside"] = keeps_outside
        models = {MODEL_FILE: emit(model_map, contents, checkpoint, **graph_options)}
    for name, model in models.items():
        save(to_half(model, folder) if target.is_half else model, folder / name)
    if not keeps_outside and not keeps_checkpoint:
        checkpoint.path.unlink()
    paths = tuple(folder / name for name in models)
    return Exported(
        folder=folder,
        kind=kind,
        paths=paths,
        contents=contents,
        placement=check_models(paths, plan, target),
        planned_bytes=planned_bytes(contents.tensors()),
        traffic=traffic_of(model_map, contents),
    )


def formats_on(
    model_map: ModelMap, scheme_name: str, target_name: str, layers: Mapping[str, str] | None = None
) -> dict[str, Format]:
    """The format of every projection, as the target computes it.

    A static graph has one for all, but for a head between values of 16 bits: it is the largest loss of all,
    and in two halves, which the embedding reads too, it costs no more than with a table beside it.
    """
    scheme, target = SCHEMES[scheme_name], TARGETS[target_name]
    if target.is_static:
        in_halves = target.rounds_values and scheme.body.input_bits == BITS_IN_HALVES
        head = replace(scheme.body, grid=Grid(bits=BITS_IN_HALVES)) if in_halves else scheme.body
        scheme = replace(scheme, head=head)
    return {name: format_on(target, each) for name, each in formats_of(model_map, scheme, layers).items()}


def write_rounded(
    model_map: ModelMap,
    plan: Plan,
    contents: Contents,
    source: TensorSource,
    folder: Path,
    *,
    scheme_name: str,
    fit: str,
    evidence: Evidences = lambda _: None,
    losses: dict[str, Sums] | None = None,
    count: Count = lambda _: None,
) -> Checkpoint:
    """The checkpoint that graphs are made from."""
    require_tensors(contents, source, model_map.name)
    return write_checkpoint(
        folder / WEIGHTS_FILE,
        contents.tensors(),
        quantized_parts(
            contents,
            source,
            transposed=TRANSPOSED,
            gain_offset=model_map.norm_gain_offset,
            fit=fit,
            evidence=evidence,
            losses=losses,
            progress=count,
        ),
        describe(model_map, plan, contents, scheme_name, fit),
    )


def metadata_of(model_map: ModelMap, contents: Contents, scheme_name: str, kind: str) -> dict[str, Any]:
    """What a graph says of itself."""
    return {
        "max_positions": context_of(model_map),
        "scheme": scheme_name,
        "model": model_map.name,
        "kind": kind,
        **to_metadata(traffic_of(model_map, contents)),
    }


def _traced(
    model_map: ModelMap,
    contents: Contents,
    checkpoint: Checkpoint,
    source: TensorSource,
    original: Path | None,
    options: Mapping[str, Any],
) -> tuple[dict[str, ModelProto], bool]:
    """(lowered files by name, whether they read one checkpoint beside them)."""
    if original is None:
        raise InputError(
            f"{model_map.architecture} must be traced, and that needs its weights in a folder",
            where=model_map.name,
            next_step="give a local folder with safetensors instead of --random-weights",
        )
    with tempfile.TemporaryDirectory(prefix="quantkit-", dir=checkpoint.path.parent) as made:
        paths = trace(
            original, Path(made), model_type=model_map.model_type, architecture=model_map.architecture
        )
        # Several files, an encoder's and a decoder's, share the weights, so these stay outside of both.
        outside = len(paths) > 1
        models = lower(
            {path.name: load(path) for path in paths},
            contents,
            checkpoint,
            source,
            transposed=TRANSPOSED,
            keeps_weights_outside=outside,
            **options,
        )
    return models, outside


def write_reference(model_map: ModelMap, source: TensorSource, folder: Path, **options: Any) -> Exported:
    """The same model with nothing quantized, in float32 whatever the target computes in."""
    options["target_name"] = DEFAULT_TARGET
    plan = choose(model_map, min_dim=NOTHING)
    return write_model(model_map, plan, source, folder, **options)


def reference_size(model_map: ModelMap) -> int:
    """Bytes of the model in float32."""
    return 4 * model_map.at_inference.num_parameters


def describe(
    model_map: ModelMap, plan: Plan, contents: Contents, scheme_name: str, fit: str
) -> dict[str, Any]:
    """What the checkpoint's header says, so that it can be read without the model."""
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
    if not (folder / TOKENIZER_FILE).exists():
        make_fast_tokenizer(source, folder)
    stop_ids = sorted(each for each in read_stop_ids(folder) if each < (model_map.vocab_size or 0))
    settings = genai_config(model_map, stop_ids=stop_ids, config=config)
    if settings and not TARGETS[target_name].is_static:
        (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
