"""Models of fixed shapes: what a recipe leaves open of them, and the stages that write their graphs.

    checkpoint --emit--> float graph --run on calibration text--> ranges --round--> graphs that share weights

A decoder becomes two graphs, for a prompt and for one token after it; what other kinds become is the table
`WRITERS`. The ranges are those of the graph that is rounded, with its weights rounded already, and come from
windows as long as the texts that it will see.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.export.check import check_models
from quantkit.export.graph import ModelProto, save
from quantkit.export.rotary import context_of
from quantkit.export.static.decoder import StaticShape, emit_static, why_not_static
from quantkit.export.static.encoder import emit_static_encoder
from quantkit.export.static.operators import known_ranges
from quantkit.export.static.qdq import Bits, quantize_static
from quantkit.export.static.ranges import showing_ranges
from quantkit.export.static.shared_weights import share_weights
from quantkit.export.traffic import traffic_of
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.export import (
    SHARED_FILE,
    Count,
    Exported,
    formats_on,
    kind_of,
    metadata_of,
    write_rounded,
)
from quantkit.plan.formats import AUTO, DEFAULT_STATIC_SCHEME, SCHEMES, static_bits
from quantkit.plan.plan import Plan
from quantkit.plan.targets import TARGETS, Target
from quantkit.quantization.layout import Checkpoint, Contents, contents_of, planned_bytes
from quantkit.quantization.rounding.apply import Evidences
from quantkit.quantization.rounding.errors import Sums
from quantkit.recipe import Recipe, Static, override
from quantkit.runtime.graph import DECODE_FILE, MODEL_FILE, PROMPT_FILE
from quantkit.runtime.ranges import Ranges, observe_ranges
from quantkit.runtime.tokenizer import TOKENIZER_FILE, open_text

PROMPT, CACHE = 128, 512  # tokens, where the recipe names no numbers and the model allows them
BROKEN_PROMPT = 16  # the one length whose products Qualcomm's compiler gets wrong (docs/log.md)
HEADROOM = 1.25  # of 16-bit ranges: the largest error on unseen text fell from 3.9% to 0.4%, the mean stayed
WEIGHTS_ONLY_SCHEME, FLOAT_BITS = "int8_channel", 32
RANGES_FILE, RANGES_WEIGHTS = ".ranges.onnx", ".ranges.data"
Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticWork:
    """What a writer of graphs is given."""

    model_map: ModelMap
    contents: Contents
    checkpoint: Checkpoint
    folder: Path  # of the artifact; what is written there beside the graphs is removed again
    target: Target
    metadata: Mapping[str, Any]
    bits: Bits | None  # None: floats between operators
    prompt: int
    cache: int
    windows: NDArray[np.int64]  # of calibration text, [number, tokens]

    def ranges(self, model: ModelProto, feeds: list[Feeds]) -> Ranges:
        """What every value of a float graph reaches, with room for texts that reach further."""
        assert self.bits is not None, "the target has floats between operators"
        opened, names = showing_ranges(model)
        path, weights = self.folder / RANGES_FILE, self.folder / RANGES_WEIGHTS
        try:
            share_weights({RANGES_FILE: opened}, weights, kept_in=self.checkpoint.path)
            save(opened, path)
            seen = with_headroom(observe_ranges(path, names, feeds), self.bits.values)
        finally:
            path.unlink(missing_ok=True)
            weights.unlink(missing_ok=True)
        return {**seen, **known_ranges(self.checkpoint, self.contents, self.model_map.embedding_scale or 1.0)}

    def rounded(self, model: ModelProto, ranges: Ranges) -> ModelProto:
        """The float graph in integers."""
        assert self.bits is not None, "the target has floats between operators"
        return quantize_static(model, ranges, self.bits, kept_in=self.checkpoint.path.parent)


def decoder_graphs(work: StaticWork) -> dict[str, ModelProto]:
    """A prompt's graph, and that of one token behind a cache."""

    def emit(shape: StaticShape) -> ModelProto:
        return emit_static(
            work.model_map,
            work.contents,
            work.checkpoint,
            shape=shape,
            target=work.target,
            metadata=work.metadata,
        )

    shapes = {
        PROMPT_FILE: StaticShape(tokens=work.prompt, gives_all_logits=False),
        DECODE_FILE: StaticShape(tokens=1, past=work.cache),
    }
    if work.bits is None:
        return {name: emit(shape) for name, shape in shapes.items()}
    shown = np.ones((1, work.windows.shape[1]), np.int32)
    feeds: list[Feeds] = [
        {"input_ids": row[None].astype(np.int32), "attention_mask": shown} for row in work.windows
    ]
    ranges = work.ranges(emit(StaticShape(tokens=work.windows.shape[1])), feeds)
    return {name: work.rounded(emit(shape), ranges) for name, shape in shapes.items()}


def encoder_graphs(work: StaticWork) -> dict[str, ModelProto]:
    """The one graph of an encoder; a text is as long as it, or shorter."""
    model = emit_static_encoder(
        work.model_map,
        work.contents,
        work.checkpoint,
        tokens=work.prompt,
        target=work.target,
        metadata={**work.metadata, "max_positions": work.prompt},
    )
    if work.bits is None:
        return {MODEL_FILE: model}
    has_tokenizer = (work.folder / TOKENIZER_FILE).exists()
    frame = open_text(work.folder).encode("") if has_tokenizer else []
    names = {each.name for each in model.graph.input}
    feeds: list[Feeds] = [
        {name: values for name, values in each.items() if name in names}
        for each in encoder_texts(work.windows[:, : work.prompt], work.prompt, frame)
    ]
    return {MODEL_FILE: work.rounded(model, work.ranges(model, feeds))}


def with_headroom(ranges: Ranges, bits: int) -> Ranges:
    """Ranges with room for texts that reach further; at 8 bits a coarser step costs more than it saves."""
    factor = HEADROOM if bits > 8 else 1.0
    return {name: (low * factor, high * factor, peak) for name, (low, high, peak) in ranges.items()}


def encoder_texts(windows: NDArray[np.int64], length: int, frame: Sequence[int]) -> list[Feeds]:
    """Windows as an encoder meets texts: bare, between the tokens that frame one, as a pair, and short.

    The tokens of a frame have the largest values of all in many encoders, and cut-off ones would spoil those.
    """
    texts: list[Feeds] = []
    for number, row in enumerate(windows):
        is_framed, is_pair, is_short = number % 4 > 0, number % 4 == 2, number % 4 == 3
        count = len(row) // 2 + 1 if is_short else len(row)
        ids, shown, kinds = (np.zeros((1, length), np.int32) for _ in range(3))
        ids[0, :count], shown[0, :count] = row[:count], 1
        if is_framed and len(frame) > 1:
            ids[0, 0], ids[0, count - 1] = frame[0], frame[-1]
        if is_pair:
            kinds[0, count // 2 : count] = 1
        texts.append({"input_ids": ids, "attention_mask": shown, "token_type_ids": kinds})
    return texts


# Kind of model, as `stages.kind_of` tells it -> its integer graphs by file.
WRITERS: dict[str, Callable[[StaticWork], dict[str, ModelProto]]] = {
    "decoder": decoder_graphs,
    "encoder": encoder_graphs,
}


def settle(recipe: Recipe, model_map: ModelMap) -> Recipe:
    """The recipe with sizes and scheme decided; what a target of fixed shapes cannot do is refused."""
    if not TARGETS[recipe.target].is_static:
        if recipe.static != Static():
            raise InputError(
                f"target '{recipe.target}' takes texts of any length",
                where="static",
                allowed=f"sizes where the target is {', '.join(_static_targets())}",
                next_step="leave prompt and cache lengths out, or choose that target",
            )
        return recipe
    kind, where = kind_of(model_map), f"--target {recipe.target}"
    if kind not in WRITERS:
        raise InputError(
            f"{model_map.architecture} is {kind}, and there are no graphs of fixed shapes for that",
            where=where,
            allowed=f"architectures that are written as a fused {' or '.join(WRITERS)}",
            next_step="leave --target out",
        )
    names = _schemes(recipe.target)
    if recipe.scheme == AUTO:
        recipe = override(recipe, {"scheme": names[0]})
    if recipe.scheme not in names:
        raise InputError(f"scheme '{recipe.scheme}'", where=where, allowed=", ".join(names))
    refused = {
        "--layer": (bool(recipe.layers), "one scheme serves all of a static graph"),
        "--cache": (recipe.cache != "float32", "what its keys and values are is the target's to say"),
        "a budget": (
            recipe.budget.max_ppl_increase is not None or recipe.budget.max_kl is not None,
            "there is one format, so nothing to search",
        ),
        "--keep-latent": (recipe.keep_latent, "its graphs give logits, keys and values alone"),
        "--min-dim auto": (recipe.select.min_dim == AUTO, "times of this CPU say nothing about an NPU"),
    }
    for flag, (is_asked, reason) in refused.items():
        if is_asked:
            raise InputError(f"{flag}: {reason}", where=where, next_step=f"leave {flag} out")
    return override(recipe, _sizes(recipe.static, model_map, kind, where))


def _schemes(target: str) -> list[str]:
    """What a static target can be asked for, its default first."""
    if not TARGETS[target].rounds_values:
        return [WEIGHTS_ONLY_SCHEME]
    others = [name for name in SCHEMES if static_bits(name) is not None and name != DEFAULT_STATIC_SCHEME]
    return [DEFAULT_STATIC_SCHEME, *others]


def _static_targets() -> list[str]:
    return [name for name, row in TARGETS.items() if row.is_static]


def _sizes(asked: Static, model_map: ModelMap, kind: str, where: str) -> dict[str, int]:
    """Numbers that were typed are held to, others shrink to what the model takes."""
    windows = [each.window for block in model_map.blocks for each in block.attentions if each.window]
    context = context_of(model_map) or CACHE + PROMPT
    if kind != "decoder":
        context -= model_map.position_offset
    longest = min([context, *windows])
    prompt = asked.prompt or min(PROMPT, longest - (kind == "decoder"))
    if asked.prompt is None and prompt == BROKEN_PROMPT:
        prompt -= 1
    if prompt == BROKEN_PROMPT:
        raise InputError(
            f"{prompt} tokens are the one length that Qualcomm's compiler gets wrong",
            where="static.prompt",
            allowed=f"any other from 2 to {longest}",
        )
    if prompt > longest:
        raise InputError(
            f"{prompt} tokens", where="static.prompt", allowed=f"2 to {longest} for {model_map.architecture}"
        )
    if kind != "decoder":
        if asked.cache is not None:
            raise InputError("an encoder keeps no cache", where="static.cache", next_step="leave it out")
        return {"static.prompt": prompt}
    cache = asked.cache or max(prompt, min(CACHE, longest - 1))
    if not prompt <= cache < longest:
        raise InputError(
            f"{cache} tokens",
            where="static.cache",
            allowed=f"{prompt} (the prompt) to {longest - 1}: the token behind it counts too",
        )
    reason = why_not_static(model_map, StaticShape(tokens=1, past=cache))
    if reason:
        raise InputError(f"no static graph for it: {reason}", where=where)
    return {"static.prompt": prompt, "static.cache": cache}


def window_length(recipe: Recipe, model_map: ModelMap) -> int:
    """Tokens of a calibration window: as far as the graphs look, so that no position is new to a range."""
    reach = recipe.static.cache + 1 if recipe.static.cache else recipe.static.prompt
    assert reach is not None, "settled before"
    return reach if kind_of(model_map) != "decoder" else min(reach, max(recipe.calibration.length, 2))


def static_contents(
    model_map: ModelMap,
    plan: Plan,
    *,
    scheme_name: str,
    target_name: str,
    adds_biases: bool = False,
) -> Contents:
    """What static graphs are made from: tables are floats, which get a grid as a value of the graph.

    One that a head in halves shares is read from those.
    """
    contents = contents_of(
        model_map, plan, formats_on(model_map, scheme_name, target_name), adds_biases=adds_biases
    )
    tables = [
        entry
        if entry.grid is not None and entry.grid.in_halves
        else replace(entry, grid=None, shares=entry.table.tied_to)
        for entry in contents.tables
    ]
    return replace(contents, tables=tuple(tables))


def write_static(
    model_map: ModelMap,
    plan: Plan,
    source: TensorSource,
    folder: Path,
    *,
    windows: NDArray[np.int64],
    sizes: Static,
    scheme_name: str,
    fit: str,
    target_name: str,
    keeps_checkpoint: bool = False,
    adds_biases: bool = False,
    evidence: Evidences = lambda _: None,
    losses: dict[str, Sums] | None = None,
    count: Count = lambda _: None,
) -> Exported:
    """Quantize and export for a target of fixed shapes; every file is read again, held against the plan."""
    kind, target, bits = kind_of(model_map), TARGETS[target_name], static_bits(scheme_name)
    assert (bits is not None) == target.rounds_values and sizes.prompt is not None, "settled before"
    contents = static_contents(
        model_map, plan, scheme_name=scheme_name, target_name=target_name, adds_biases=adds_biases
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
    work = StaticWork(
        model_map=model_map,
        contents=contents,
        checkpoint=checkpoint,
        folder=folder,
        target=target,
        metadata=metadata_of(model_map, contents, scheme_name, kind),
        bits=Bits(values=bits, products=bits) if bits else None,
        prompt=sizes.prompt,
        cache=sizes.cache or 0,
        windows=windows,
    )
    models = WRITERS[kind](work)
    share_weights(models, folder / SHARED_FILE, kept_in=checkpoint.path)
    paths = tuple(folder / name for name in models)
    for path, model in zip(paths, models.values(), strict=True):
        save(model, path)
    if not keeps_checkpoint:
        checkpoint.path.unlink()
    return Exported(
        folder=folder,
        kind=kind,
        paths=paths,
        contents=contents,
        placement=check_models(paths, plan, target, in_each=True),
        planned_bytes=_planned_bytes(contents, bits or FLOAT_BITS)
        + sum(path.stat().st_size for path in paths),
        traffic=traffic_of(model_map, contents),
    )


def _planned_bytes(contents: Contents, bits: int) -> int:
    """Of tensors; tables are stored as codes of the graph's width."""
    tables = planned_bytes(spec for entry in contents.tables for spec in entry.tensors())
    return planned_bytes(contents.tensors()) - tables + tables * bits // 32


def notes_of(recipe: Recipe, plan: Plan) -> tuple[str, ...]:
    """What a reader of the report should know."""
    if not TARGETS[recipe.target].is_static:
        return ()
    notes = []
    kept = plan.projections.total - plan.projections.quantized
    if kept and TARGETS[recipe.target].rounds_values:
        notes.append(f"not picked, and with 8-bit weights all the same, since an NPU has no floats: {kept}")
    if recipe.static.cache:
        notes.append(
            f"prompt.onnx reads {recipe.static.prompt} tokens at once, decode.onnx one token behind up to "
            f"{recipe.static.cache} others; longer prompts go on token by token"
        )
    if TARGETS[recipe.target].rounds_values and recipe.measure.latency:
        notes.append(
            "times are of the CPU, which computes these graphs in floats; 'bench --provider' asks others"
        )
    if static_bits(recipe.scheme) == 8:
        notes.append(
            "8-bit ranges that calibration fixed lose the most of all schemes: look at the accuracy before "
            "using it, int8_static16 keeps more"
        )
    return tuple(notes)
