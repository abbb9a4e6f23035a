"""`quantkit protect`: quantizes a model and splits it into a host and a client folder.

Transforms and planning are those of `quantkit quantize`. The host's blocks are then read in the secret order
and written as one graph. Tables, last norm and head are written unpermuted for the client, with two gathers
that apply and undo the order of the residual stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import quantkit
from quantkit.errors import InputError, did_you_mean
from quantkit.export.check import Placement, check_models
from quantkit.export.fused.split import emit_blocks, emit_embedding, emit_head
from quantkit.export.genai import CONFIG_FILE
from quantkit.export.graph import save
from quantkit.model.model_map import ModelMap, to_json
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.folder import (
    folder_bytes,
    new_artifact,
    require_apart,
    require_replaceable,
)
from quantkit.pipeline.stages.export import (
    WEIGHTS_FILE,
    checkpoint_header,
    projection_formats,
    write_companions,
)
from quantkit.pipeline.stages.prepare import discard, prepare, resumable
from quantkit.pipeline.stages.resolve import Resolved, resolve
from quantkit.plan.formats import SCHEMES
from quantkit.plan.plan import Plan
from quantkit.plan.targets import TARGETS
from quantkit.private.files import CLIENT, EMBEDDING_FILE, HEAD_FILE, HOST
from quantkit.private.keys import Key, create_key, open_key
from quantkit.private.sides import Side, client_side, host_side
from quantkit.progress import Progress
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.layout import Checkpoint, Contents, contents_of
from quantkit.quantization.projections import weight_name
from quantkit.quantization.rounding import PLAIN
from quantkit.quantization.rounding.apply import quantized_parts
from quantkit.quantization.transforms.basis import Order
from quantkit.quantization.transforms.permutation import permute
from quantkit.quantization.transforms.source import TransformedTensors
from quantkit.quantization.transforms.spaces import require_spaces
from quantkit.recipe import Recipe, dump_recipe
from quantkit.runtime.graph import MODEL_FILE
from quantkit.runtime.manifest import MANIFEST, hash_files, sum_files

RECIPE_FILE = "recipe.yaml"
DEFAULT_CONTEXT = 2048  # of a model whose config has none
PERMUTED: dict[str, str] = {  # names of --permute -> kinds of spaces; the first is required
    "residual": "residual",
    "ffn": "ffn_hidden",
    "values": "value_heads",
}
PROTECTED_SCHEMES = tuple(
    name
    for name, row in SCHEMES.items()
    if row.body.grid.bits == 8 and not row.body.is_static and not row.body.outliers
)
SAMPLED_ROWS = 32  # from either end of a tensor, for the fingerprint
FILE_SETTINGS = (  # of a config, that describe its file and not the model
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "auto_map",
    "use_cache",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Protected:
    """Report of a split."""

    folder: Path
    key_file: Path
    makes_key: bool
    permutes: tuple[str, ...]
    scheme: str
    num_planned: dict[str, int]  # quantized projections on each side
    num_bytes: dict[str, int]
    bytes_per_token: int  # each way, in float32


def protect(
    recipe: Recipe,
    *,
    key_file: Path,
    output: Path,
    permutes: Collection[str] = tuple(PERMUTED),
    force: bool = False,
    quiet: bool = False,
) -> Protected:
    """Quantizes and splits a model; the output appears only once it is complete."""
    check_permutes(permutes)
    if key_file.resolve().is_relative_to(output.resolve()):
        raise InputError(
            "the key would lie inside the output, and a folder is easily copied whole",
            where=f"--key {key_file}",
            next_step="choose a place outside of it",
        )
    require_apart(output, {"the model": recipe.model})
    require_replaceable(output, force=force)
    progress = Progress(quiet=quiet)
    resolved = resolve(recipe, progress)
    recipe = resolved.recipe
    require_decoder(resolved)
    model = fingerprint(resolved.source.config, resolved.model_map, resolved.weights)
    with new_artifact(output, force=force) as partial, resumable(resolved):
        makes_key = not key_file.exists()
        key = create_key(key_file, model) if makes_key else open_key(key_file, model)
        prepared = prepare(resolved)
        model_map, plan = prepared.model_map, prepared.plan
        contents = contents_for(recipe, model_map, plan)
        permuted = in_secret_order(model_map, prepared.weights, key, permutes)
        order_I = key.order("residual", model_map.hidden_size or 0)
        num_weights = sum(pack.out_features * pack.in_features for pack in contents.packs)
        with progress.stage("quantize and split", total=num_weights, unit="weights") as count:
            host = host_side(model_map, plan, contents)
            client = client_side(model_map, plan, contents)
            placements = {
                HOST: write_host(host, permuted, partial / HOST, recipe, count),
                CLIENT: write_client(client, prepared.weights, partial / CLIENT, recipe, order_I, count),
            }
        write_companions(resolved.source, model_map, partial / CLIENT)
        (partial / CLIENT / CONFIG_FILE).unlink(missing_ok=True)  # it describes a whole model
        (partial / CLIENT / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
        (partial / CLIENT).chmod(0o700)  # its order is as good as the key
        write_manifests(partial, model_map, plan, placements, recipe=recipe, permutes=permutes)
    discard(prepared)
    return Protected(
        folder=output,
        key_file=key_file,
        makes_key=makes_key,
        permutes=tuple(name for name in PERMUTED if name in permutes),
        scheme=recipe.scheme,
        num_planned={side: len(placement.projections) for side, placement in placements.items()},
        num_bytes={side: folder_bytes(output / side) for side in placements},
        bytes_per_token=4 * (model_map.hidden_size or 0),
    )


def check_permutes(permutes: Collection[str]) -> None:
    unknown = [name for name in permutes if name not in PERMUTED]
    if unknown or "residual" not in permutes:
        raise InputError(
            f"'{unknown[0]}'"
            if unknown
            else "without 'residual' the host would see the features as they are",
            where="--permute",
            allowed=f"residual, and with it any of {', '.join(list(PERMUTED)[1:])}",
            next_step=did_you_mean(unknown[0], PERMUTED) if unknown else "",
        )


def require_decoder(resolved: Resolved) -> None:
    """Refuses models and recipes that cannot be split."""
    recipe, model_map = resolved.recipe, resolved.model_map
    if resolved.kind != "decoder":
        raise InputError(
            f"{model_map.architecture} is not written as a fused decoder, and only those are split",
            where=model_map.name,
            next_step="'quantkit quantize' runs it in one piece",
        )
    if any(block.mixture for block in model_map.blocks):
        raise InputError(
            "its blocks choose among experts, and the choice would tell the host of the text",
            where=model_map.name,
            next_step="'quantkit quantize' runs it in one piece",
        )
    own = [name for name in recipe.layers.values() if name in SCHEMES and SCHEMES[name].body.outliers]
    if own:
        raise InputError(
            f"scheme {own[0]}", where="protect", allowed=f"schemes {', '.join(PROTECTED_SCHEMES)}"
        )
    if recipe.scheme not in PROTECTED_SCHEMES or recipe.fit != PLAIN or recipe.cache != "float32":
        raise InputError(
            f"scheme {recipe.scheme}, fit {recipe.fit}, cache {recipe.cache}",
            where="protect",
            allowed=f"schemes {', '.join(PROTECTED_SCHEMES)}; fit {PLAIN}; cache float32",
        )
    residual = next(space for space in require_spaces(model_map) if space.kind == "residual")
    if "permutation" not in residual.permits:
        raise InputError(
            f"its residual permits no order of channels: {residual.forbidden['permutation']}",
            where=model_map.name,
        )


def fingerprint(config: Mapping[str, Any], model_map: ModelMap, source: TensorSource) -> str:
    """SHA-256 of a model's config, tensor shapes, and rows from both ends of every tensor.

    Training changes every row, so the sampled rows distinguish models without a second read of all weights.
    """
    digest = hashlib.sha256()
    settings = {name: value for name, value in config.items() if name not in FILE_SETTINGS}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    names = {weight_name(layer) for layer in model_map.layers}
    names |= {f"{layer.matrix}.bias" for layer in model_map.layers if layer.has_bias}
    names |= {f"{table.tied_to or table.name}.weight" for table in model_map.embeddings}
    names |= {f"{norm.name}.{part}" for norm in model_map.norms for part in ("weight", "bias")}
    for name in sorted(name for name in names if source.has(name)):
        shape = source.shape(name)
        digest.update(f"{name}{shape}".encode())
        is_sampled = len(shape) >= 2 and shape[0] > 2 * SAMPLED_ROWS
        for start in (0, shape[0] - SAMPLED_ROWS) if is_sampled else (0,):
            values = source.read(name, start, SAMPLED_ROWS if is_sampled else None)
            digest.update(np.ascontiguousarray(values, np.float32).tobytes())
    return digest.hexdigest()


def in_secret_order(
    model_map: ModelMap,
    weights: TensorSource,
    key: Key,
    permutes: Collection[str],
) -> TransformedTensors:
    """Weights with every chosen space permuted by the key."""
    kinds = [PERMUTED[name] for name in permutes]
    spaces = [
        space.name
        for space in require_spaces(model_map)
        if space.kind in kinds and "permutation" in space.permits
    ]
    return permute(model_map, weights, spaces=spaces, orders=key.order)[1]


def contents_for(recipe: Recipe, model_map: ModelMap, plan: Plan) -> Contents:
    """Contents of the unsplit model."""
    formats = projection_formats(model_map, recipe.scheme, recipe.target, recipe.layers)
    return contents_of(model_map, plan, formats, table_grid=SCHEMES[recipe.scheme].head.grid)


def write_host(
    side: Side,
    weights: TensorSource,
    folder: Path,
    recipe: Recipe,
    count: Callable[[int], None] = lambda _: None,
) -> Placement:
    """Writes the blocks as one graph; large weights stay in a file of their own."""
    checkpoint = _write_weights(side, weights, folder, recipe, count)
    keeps_outside = checkpoint.path.stat().st_size > recipe.single_file_mb << 20
    graph = emit_blocks(
        side.model_map,
        side.contents,
        checkpoint,
        target=TARGETS[recipe.target],
        keeps_weights_outside=keeps_outside,
        metadata={"kind": HOST, "max_positions": side.model_map.context},
    )
    save(graph, folder / MODEL_FILE)
    if not keeps_outside:
        checkpoint.path.unlink()
    return _checked(side, recipe, folder / MODEL_FILE)


def write_client(
    side: Side,
    weights: TensorSource,
    folder: Path,
    recipe: Recipe,
    order_I: Order,
    count: Callable[[int], None],
) -> Placement:
    """Writes embedding and head as two graphs over one weights file, since a tied table serves both."""
    checkpoint = _write_weights(side, weights, folder, recipe, count)
    options: dict[str, Any] = {"target": TARGETS[recipe.target], "metadata": {"kind": CLIENT}}
    for name, emit in ((EMBEDDING_FILE, emit_embedding), (HEAD_FILE, emit_head)):
        save(emit(side.model_map, side.contents, checkpoint, order_I, **options), folder / name)
    return _checked(side, recipe, folder / EMBEDDING_FILE, folder / HEAD_FILE)


def _write_weights(
    side: Side, weights: TensorSource, folder: Path, recipe: Recipe, count: Callable[[int], None]
) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    parts = quantized_parts(
        side.stored,
        weights,
        gain_offset=side.gain_offset,
        progress=count,
    )
    return write_checkpoint(
        folder / WEIGHTS_FILE,
        side.contents.tensors(),
        side.renamed(parts),
        checkpoint_header(side.model_map, side.plan, side.contents, recipe.scheme, recipe.fit),
    )


def _checked(side: Side, recipe: Recipe, *paths: Path) -> Placement:
    """Placement of a side's projections; every planned one must be an integer product, and no other."""
    placement = check_models(paths, side.plan, TARGETS[recipe.target])
    quantized = {layer.name for layer in side.plan.layers if layer.quantized}
    assert set(placement.projections) == quantized, "the files differ from the plan"
    return placement


def write_manifests(
    folder: Path,
    model_map: ModelMap,
    plan: Plan,
    placements: Mapping[str, Placement],
    *,
    recipe: Recipe,
    permutes: Collection[str],
) -> None:
    """Writes three manifests; the host's has no name of the model, the client's has a hash of the host."""
    host_files = hash_files(folder / HOST)
    pair = hashlib.sha256(json.dumps(host_files, sort_keys=True).encode()).hexdigest()
    shared: dict[str, Any] = {
        "quantkit": quantkit.__version__,
        "pair": pair,
        "width": model_map.hidden_size,
        "context": model_map.context or DEFAULT_CONTEXT,
    }
    client = {
        "model": model_map.name,
        "scheme": recipe.scheme,
        "permutes": sorted(permutes),
        "plan": to_json(plan),
        "integer_operators": {side: placement.integer_operators for side, placement in placements.items()},
    }
    host = {"kind": HOST, **shared, "files": host_files, "sums": sum_files(folder / HOST)}
    _write_json(folder / HOST / MANIFEST, host)
    files = {"files": hash_files(folder / CLIENT), "sums": sum_files(folder / CLIENT)}
    _write_json(folder / CLIENT / MANIFEST, {"kind": CLIENT, **shared, **client, **files})
    sides = {"kind": "protected", "sides": [HOST, CLIENT], "files": hash_files(folder)}
    _write_json(folder / MANIFEST, sides)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
