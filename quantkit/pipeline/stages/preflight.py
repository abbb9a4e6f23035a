"""Checks before the first second of work: what tokenizer files and free disk space decide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.evaluation.text import read_text
from quantkit.model.companions import has_preprocessor
from quantkit.model.load import Source
from quantkit.model.model_map import EmbeddingKind, ModelMap
from quantkit.pipeline.stages.export import float_bytes
from quantkit.plan.formats import Format
from quantkit.plan.plan import Plan
from quantkit.plan.targets import TARGETS, may_saturate
from quantkit.quantization.layout import planned_bytes
from quantkit.quantization.rounding import FITS
from quantkit.recipe import Recipe
from quantkit.runtime.labels import OF_TEXTS
from quantkit.runtime.machine.cache import cache_folder
from quantkit.runtime.machine.disk import require_free
from quantkit.runtime.pictures import PREPROCESSOR_FILE, pictures_in, read_preprocessing, require_pillow
from quantkit.runtime.tokenizer import TOKENIZER_FILE, open_text

if TYPE_CHECKING:
    from quantkit.pipeline.stages.resolve import Resolved


def require_tokenizer(source: Source, model_map: ModelMap) -> None:
    """Refuse a tokenizer that cannot be read or that makes ids without a row in the embedding.

    Added tokens are left out: published Gemma 3 has one without a row, which stands for an image.
    """
    if source.folder is None or not (source.folder / TOKENIZER_FILE).exists():
        return
    tokenizer = open_text(source.folder).tokenizer
    rows = [table.num_rows for table in model_map.embeddings if table.kind is EmbeddingKind.TOKEN]
    num_tokens = tokenizer.get_vocab_size(with_added_tokens=False)
    if rows and num_tokens > max(rows):
        raise InputError(
            f"the tokenizer has {num_tokens} tokens, and the model {max(rows)} embeddings",
            where=str(source.folder / TOKENIZER_FILE),
            next_step="tokenizer and weights belong to different models; copy or download both again",
        )


def require_padding(source: Source, model_map: ModelMap) -> None:
    """Refuse a decoder that labels texts and has no padding token, by which it finds the end of a text."""
    is_causal = any(attention.is_causal for block in model_map.blocks for attention in block.attentions)
    is_classifier = model_map.architecture.endswith(OF_TEXTS)
    if is_causal and is_classifier and source.config.get("pad_token_id") is None:
        raise InputError(
            f"{model_map.architecture} has no 'pad_token_id', by which it finds the end of a text",
            where=source.name,
            next_step="set pad_token_id in config.json to the tokenizer's padding token",
        )


def require_readable_examples(recipe: Recipe, source: Source, model_map: ModelMap) -> None:
    """Refuse a text, or pictures and their preprocessing, that cannot be read."""
    if model_map.picture is None:
        if recipe.measure.accuracy:
            read_text(recipe.measure)
        return
    calibrated, measured = recipe.calibration.text, recipe.measure.text
    for flag, named in (("--calibration-text", calibrated), ("--text", measured)):
        if named:
            pictures_in(Path(named).expanduser(), flag)
    if has_preprocessor(source) and not recipe.random_weights:
        require_pillow()
        output = read_preprocessing(Path(str(source.folder))).output
        if output and not model_map.picture.stretches and output != model_map.picture.size:
            height, width = model_map.picture.size
            raise InputError(
                f"it gives {output[0]} x {output[1]} pixels, and the model reads {height} x {width}",
                where=str(Path(str(source.folder)) / PREPROCESSOR_FILE),
                next_step="correct size or crop_size there, or image_size in config.json",
            )


def require_exact_sums(
    model_map: ModelMap, plan: Plan, formats: Mapping[str, Format], target: str, *, saturates: bool
) -> None:
    """Refuse products whose sums a processor without VNNI, as this one, would cut off in any session.

    onnxruntime makes sums exact on request, and not where layers share weights.
    """
    shares = any(block.calls > 1 for block in model_map.blocks)
    planned = [formats[layer.name] for layer in plan.layers if layer.quantized]
    dynamic = [chosen for chosen in planned if not chosen.is_static]
    if saturates and shares and any(may_saturate(TARGETS[target], chosen) for chosen in dynamic):
        raise InputError(
            "its layers share weights, whose products in one scale a channel are wrong on processors without "
            "VNNI, such as this one",
            where=model_map.name,
            next_step="--target cpu-avx2, or --scheme int8_block32",
        )


def require_space(resolved: Resolved, output: Path) -> None:
    """Refuse a run whose files do not fit on the disks of output and cache."""
    for folder, (num_bytes, next_step) in _needed_bytes(resolved, output.absolute()).items():
        require_free(folder, num_bytes, what="the run", next_step=next_step)


def _needed_bytes(resolved: Resolved, output: Path) -> Mapping[Path, tuple[int, str]]:
    """Folder -> (bytes at the peak, remedy): weights beside the graph made of them, and statistics."""
    written = 2 * planned_bytes(resolved.contents.tensors())
    if resolved.kind == "traced":
        written += float_bytes(resolved.model_map)
    needed = {output.parent: (written, "free some space, or choose an output on another disk with -o")}
    if "second_moment" in FITS[resolved.recipe.fit].statistics:
        planned = {layer.name for layer in resolved.plan.layers if layer.quantized}
        layers = [layer for layer in resolved.model_map.layers if layer.name in planned]
        widths = {layer.matrix: layer.in_features for layer in layers}
        statistics = sum(4 * width**2 for width in widths.values())
        place = resolved.statistics or cache_folder() / "statistics"
        needed[place.absolute()] = (statistics, "free some space, or choose another disk with --statistics")
    return needed
