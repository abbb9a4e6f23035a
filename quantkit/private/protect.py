"""`quantkit protect` on one screen: a model in, a host that computes and a client that understands.

Everything up to rounding is the way of every quantized model. Then the blocks are read in the secret order
and written alone; tables, last norm and head are written as they are, with the order beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantkit
from quantkit.errors import InputError
from quantkit.export.check import Placement, check_models
from quantkit.export.fused.split import Order, emit_blocks, emit_embedding, emit_head
from quantkit.export.genai import CONFIG_FILE
from quantkit.export.graph import save
from quantkit.export.rotary import context_of
from quantkit.model.model_map import ModelMap, to_json
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.export import (
    WEIGHTS_FILE,
    checkpoint_header,
    projection_formats,
    write_companions,
)
from quantkit.pipeline.folder import MANIFEST, folder_bytes, hash_files, new_artifact
from quantkit.pipeline.prepare import discard, prepare
from quantkit.pipeline.resolve import Resolved, resolve
from quantkit.plan.formats import SCHEMES
from quantkit.plan.plan import Plan
from quantkit.plan.targets import TARGETS
from quantkit.private.files import CLIENT, EMBEDDING_FILE, HEAD_FILE, HOST
from quantkit.private.keys import Key, create_key, fingerprint, open_key
from quantkit.private.sides import Side, client_side, host_side
from quantkit.progress import Progress
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.layout import Contents, contents_of
from quantkit.quantization.rounding import PLAIN
from quantkit.quantization.rounding.apply import quantized_parts
from quantkit.quantization.transforms.permutation import permute
from quantkit.quantization.transforms.source import TransformedTensors
from quantkit.quantization.transforms.spaces import require_spaces
from quantkit.recipe import Recipe, dump_recipe
from quantkit.runtime.graph import MODEL_FILE

RECIPE_FILE = "recipe.yaml"
DEFAULT_CONTEXT = 2048  # of a model that names none, as for a model in one piece
# What --permute may name -> the kind of space; the first is what makes the split.
PERMUTED: dict[str, str] = {"residual": "residual", "ffn": "ffn_hidden", "values": "value_heads"}
PROTECTED_SCHEMES = tuple(
    name for name, row in SCHEMES.items() if row.body.grid.bits == 8 and not row.body.is_static
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Protected:
    """What was written."""

    folder: Path
    key_file: Path
    makes_key: bool
    permutes: tuple[str, ...]
    scheme: str
    num_planned: dict[str, int]  # projections on each side, all of which are integer in its files
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
    """Quantize and split; the output appears only when all of it is done."""
    check_permutes(permutes)
    if key_file.absolute().is_relative_to(output.absolute()):
        raise InputError(
            "the key would lie inside the output, and a folder is easily copied whole",
            where=f"--key {key_file}",
            next_step="choose a place outside of it",
        )
    progress = Progress(quiet=quiet)
    opened = resolve(recipe, progress)
    recipe = opened.recipe
    require_decoder(opened)
    model = fingerprint(opened.source.config, opened.model_map, opened.weights)
    with new_artifact(output, force=force) as partial:
        makes_key = not key_file.exists()
        key = create_key(key_file, model) if makes_key else open_key(key_file, model)
        prepared = prepare(opened)
        plan = prepared.plan
        contents = contents_for(recipe, prepared.model_map, plan)
        weights = in_secret_order(prepared.model_map, prepared.weights, key, permutes)
        host, client = (
            host_side(prepared.model_map, plan, contents),
            client_side(prepared.model_map, plan, contents),
        )
        sizes: dict[str, Any] = {"total": recipe_weights(contents), "unit": "weights"}
        with progress.stage("quantize and split", **sizes) as count:
            limit = recipe.single_file_mb << 20
            made = {HOST: write_host(host, weights, partial / HOST, recipe, limit, count)}
            order_I = key.order("residual", prepared.model_map.hidden_size or 0)
            made[CLIENT] = write_client(client, prepared.weights, partial / CLIENT, recipe, order_I, count)
        write_companions(opened.source, prepared.model_map, partial / CLIENT)
        (partial / CLIENT / CONFIG_FILE).unlink(missing_ok=True)  # it describes a whole model
        (partial / CLIENT / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
        (partial / CLIENT).chmod(0o700)  # its order is as good as the key
        write_manifests(partial, prepared.model_map, plan, made, recipe=recipe, permutes=permutes)
    discard(prepared)
    return Protected(
        folder=output,
        key_file=key_file,
        makes_key=makes_key,
        permutes=tuple(name for name in PERMUTED if name in permutes),
        scheme=recipe.scheme,
        num_planned={side: len(placement.projections) for side, placement in made.items()},
        num_bytes={side: folder_bytes(output / side) for side in made},
        bytes_per_token=4 * (prepared.model_map.hidden_size or 0),
    )


def check_permutes(permutes: Collection[str]) -> None:
    """Refuse what names no space, and a split without an order."""
    unknown = [name for name in permutes if name not in PERMUTED]
    if unknown or "residual" not in permutes:
        raise InputError(
            f"'{unknown[0]}'"
            if unknown
            else "without 'residual' the host would see the features as they are",
            where="--permute",
            allowed=f"residual, and with it any of {', '.join(list(PERMUTED)[1:])}",
        )


def require_decoder(opened: Resolved) -> None:
    """Refuse what cannot be split, with the reason."""
    recipe, model_map = opened.recipe, opened.model_map
    if opened.kind != "decoder":
        raise InputError(
            f"{model_map.architecture} is not written as a fused decoder, and only those are split",
            where=model_map.name,
            next_step="'quantkit quantize' runs it in one piece",
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
            f"its residual permits no order of channels: {residual.why_not['permutation']}",
            where=model_map.name,
        )


def in_secret_order(
    model_map: ModelMap,
    weights: TensorSource,
    key: Key,
    permutes: Collection[str],
    **options: Any,
) -> TransformedTensors:
    """The weights with every chosen space in the order that the key gives it."""
    kinds = [PERMUTED[name] for name in permutes]
    spaces = [
        space.name
        for space in require_spaces(model_map)
        if space.kind in kinds and "permutation" in space.permits
    ]
    return permute(model_map, weights, spaces=spaces, orders=key.order, **options)[1]


def contents_for(recipe: Recipe, model_map: ModelMap, plan: Plan) -> Contents:
    """What the whole model would hold."""
    formats = projection_formats(model_map, recipe.scheme, recipe.target, recipe.layers)
    return contents_of(model_map, plan, formats, table_grid=SCHEMES[recipe.scheme].head.grid)


def recipe_weights(contents: Contents) -> int:
    """Weights of all projections, by which progress counts."""
    return sum(pack.out_features * pack.in_features for pack in contents.packs)


def write_host(
    side: Side,
    weights: TensorSource,
    folder: Path,
    recipe: Recipe,
    single_file_bytes: int,
    count: Callable[[int], None] = lambda _: None,
) -> Placement:
    """The blocks as one graph; weights beside it once they are large."""
    checkpoint = _write_weights(side, weights, folder, recipe, count)
    keeps_outside = checkpoint.path.stat().st_size > single_file_bytes
    graph = emit_blocks(
        side.model_map,
        side.contents,
        checkpoint,
        target=TARGETS[recipe.target],
        keeps_weights_outside=keeps_outside,
        metadata={"kind": HOST, "max_positions": context_of(side.model_map)},
    )
    save(graph, folder / MODEL_FILE)
    if not keeps_outside:
        checkpoint.path.unlink()
    return require_done(side, (folder / MODEL_FILE,), recipe)


def write_client(
    side: Side,
    weights: TensorSource,
    folder: Path,
    recipe: Recipe,
    order_I: Order,
    count: Callable[[int], None] = lambda _: None,
) -> Placement:
    """Two graphs that share one file of weights, since a tied table serves both."""
    checkpoint = _write_weights(side, weights, folder, recipe, count)
    options: dict[str, Any] = {"target": TARGETS[recipe.target], "metadata": {"kind": CLIENT}}
    for name, emit in ((EMBEDDING_FILE, emit_embedding), (HEAD_FILE, emit_head)):
        save(emit(side.model_map, side.contents, checkpoint, order_I, **options), folder / name)
    return require_done(side, (folder / EMBEDDING_FILE, folder / HEAD_FILE), recipe)


def _write_weights(
    side: Side, weights: TensorSource, folder: Path, recipe: Recipe, count: Callable[[int], None]
) -> Any:
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


def require_done(side: Side, paths: tuple[Path, ...], recipe: Recipe) -> Placement:
    """Every planned projection is an integer product of the side's files, and none besides."""
    placement = check_models(paths, side.plan, TARGETS[recipe.target])
    wanted = {layer.name for layer in side.plan.layers if layer.quantized}
    assert set(placement.projections) == wanted, "what was planned is not what was done"
    return placement


def write_manifests(
    folder: Path,
    model_map: ModelMap,
    plan: Plan,
    made: dict[str, Placement],
    *,
    recipe: Recipe,
    permutes: Collection[str],
) -> None:
    """The host's says how wide it is and nothing of what it serves; the client's knows its host by a hash."""
    host_files = hash_files(folder / HOST)
    pair = hashlib.sha256(json.dumps(host_files, sort_keys=True).encode()).hexdigest()
    shared: dict[str, Any] = {"quantkit": quantkit.__version__, "pair": pair}
    shared |= {"width": model_map.hidden_size, "context": context_of(model_map) or DEFAULT_CONTEXT}
    _write_json(folder / HOST / MANIFEST, {"kind": HOST, **shared, "files": host_files})
    client: dict[str, Any] = {"kind": CLIENT, **shared, "model": model_map.name, "scheme": recipe.scheme}
    client |= {"permutes": sorted(permutes), "plan": to_json(plan)}
    client |= {"integer_operators": {side: placement.integer_operators for side, placement in made.items()}}
    _write_json(folder / CLIENT / MANIFEST, {**client, "files": hash_files(folder / CLIENT)})
    whole = {"kind": "protected", "sides": [HOST, CLIENT], "files": hash_files(folder)}
    _write_json(folder / MANIFEST, whole)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
