"""The transformers module of a model with every parameter taken from a source of tensors, changed or not.

Calibration runs it, and the proof that a transform keeps the function does. Modules are built with parameters
that have no storage and buffers that do, since rotary tables and masks are computed when a module is made and
lie in no checkpoint; then each parameter is filled a few rows at a time, so there is never a second copy.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.model.companions import tokenizer_files
from quantkit.model.families import family_of
from quantkit.model.inspect import inspect_source
from quantkit.model.load import Source, make_config, make_model
from quantkit.model.model_map import ModelMap, NormKind, Role
from quantkit.model.names import checkpoint_name
from quantkit.model.weights.tensors import TensorSource

CHUNK_VALUES = 1 << 22


class RootMeanSquareNorm(nn.Module):
    """What a layer norm becomes when its writers take the mean away: no mean, no bias."""

    def __init__(self, features: int, epsilon: float) -> None:
        """Gains come with the other weights."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, device="meta"))
        self.eps = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x over its root mean square, times the gain, computed in the type of x."""
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = self.weight * (x * scale)
        return scaled


def torch_model(
    source: Source,
    model_map: ModelMap,
    tensors: TensorSource,
    dtype: torch.dtype = torch.float32,
    *,
    streams: bool = False,
) -> nn.Module:
    """The module that the map describes, in evaluation mode, with these weights.

    One that `streams` holds the weights of one block at a time, read as it is entered and dropped as it is
    left, of a table the rows that are asked for, and nothing of a head: enough to see what projections read.
    """
    config = make_config(source)
    config.dtype = dtype
    config.use_cache = False
    if any(attention.softcap for block in model_map.blocks for attention in block.attentions):
        config._attn_implementation = "eager"  # transformers 4 leaves the cap out of its faster attention
    with _parameters_without_storage():
        module = make_model(source, config)
    family = family_of(model_map.model_type)
    modules = {
        checkpoint_name(path, family): path for path, _ in module.named_modules(remove_duplicate=False)
    }
    _match_map(module, model_map, modules)
    shared: dict[int, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(path)
    preferred = _names_in_use(model_map)
    waiting: dict[str, list[tuple[str, str]]] = {}  # block -> (path, name) of what it reads when entered
    blocks = [modules[block.name] for block in model_map.blocks] if streams else []
    heads = [f"{layer.matrix}.weight" for layer in model_map.layers if layer.role is Role.LM_HEAD]
    tables = [f"{table.name}.weight" for table in model_map.embeddings]
    for paths in shared.values():
        names = sorted((checkpoint_name(path, family) for path in paths), key=lambda n: n not in preferred)
        found = next((name for name in names if tensors.has(name)), None)
        if found is None:
            raise InputError(
                f"the weights lack '{names[0]}'",
                where=model_map.name,
                next_step="copy or download the checkpoint again; config.json asks for this tensor",
            )
        inside = [block for block in blocks if all(path.startswith(f"{block}.") for path in paths)]
        if inside:
            waiting.setdefault(inside[0], []).extend((path, found) for path in paths)
        elif streams and found in tables and _is_plain_table(module, paths[0]):
            _look_up(module.get_submodule(paths[0].rpartition(".")[0]), tensors, found, dtype)
        elif not (streams and found in heads):
            _put(module, paths, _filled(tensors, found, module.get_parameter(paths[0]), dtype))
    for block, parts in waiting.items():
        _fill_on_entry(module, block, parts, tensors, dtype)
    return module.eval()


def _put(module: nn.Module, paths: Sequence[str], values: Tensor) -> None:
    made = nn.Parameter(values, requires_grad=False)
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(parent), leaf, made)


def _is_plain_table(module: nn.Module, path: str) -> bool:
    """Whether a lookup is all that it does: some classes scale, or move the ids."""
    return type(module.get_submodule(path.rpartition(".")[0])) is nn.Embedding


def _look_up(embedding: nn.Module, tensors: TensorSource, name: str, dtype: torch.dtype) -> None:
    """Let a plain embedding read its rows from the source."""

    def rows(ids: Tensor) -> Tensor:
        unique, places = torch.unique(ids, return_inverse=True)
        read = [torch.from_numpy(tensors.read(name, int(each), 1)) for each in unique]
        return torch.cat(read).to(dtype)[places]

    embedding.forward = rows


def _fill_on_entry(
    module: nn.Module, block: str, parts: Sequence[tuple[str, str]], tensors: TensorSource, dtype: torch.dtype
) -> None:
    shapes = {path: module.get_parameter(path) for path, _ in parts}

    def enter(*_: object) -> None:
        for path, name in parts:
            _put(module, [path], _filled(tensors, name, shapes[path], dtype))

    def leave(*_: object) -> None:
        for path, empty in shapes.items():
            _put(module, [path], empty)

    module.get_submodule(block).register_forward_pre_hook(enter)
    module.get_submodule(block).register_forward_hook(leave)


def write_folder(source: Source, model_map: ModelMap, tensors: TensorSource, folder: Path) -> Source:
    """A checkpoint of the changed model that transformers itself can load, which tracing needs.

    Only a change of values can be written: no transformers class has another kind of norm, a bias more, or a
    head untied against its config.
    """
    before = inspect_source(source)
    if (before.norms, before.layers) != (model_map.norms, model_map.layers):
        raise InputError(
            "the change altered the model's structure, and transformers has no class for that",
            where=model_map.name,
            allowed="smoothing, permutations and rotations within heads for models that are traced",
            next_step="leave out rotations of the residual and folded norms",
        )
    module: Any = torch_model(source, model_map, tensors)
    module.save_pretrained(folder)
    for path in tokenizer_files(source):
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    return dataclasses.replace(source, kind="folder", folder=folder)


def _names_in_use(model_map: ModelMap) -> set[str]:
    """The names by which the map's own entries are read, where a tensor has several."""
    names = {f"{table.name}.weight" for table in model_map.embeddings if not table.tied_to}
    names |= {f"{layer.matrix}.weight" for layer in model_map.layers if not layer.tied_to}
    names |= {f"{layer.matrix}.bias" for layer in model_map.layers}
    return names | {f"{norm.name}.{part}" for norm in model_map.norms for part in ("weight", "bias")}


def _filled(tensors: TensorSource, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor with the source's values, a few rows at a time."""
    shape = tensors.shape(name)
    assert shape == tuple(like.shape), f"{name} is {shape} and not {tuple(like.shape)}"
    made = torch.empty(shape, dtype=dtype)
    if not shape:
        return made.copy_(torch.from_numpy(tensors.read(name)).reshape(()))
    step = max(1, CHUNK_VALUES // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        rows = tensors.read(name, start, min(step, shape[0] - start))
        made[start : start + step] = torch.from_numpy(rows)
    return made


def _match_map(module: nn.Module, model_map: ModelMap, modules: dict[str, str]) -> None:
    """Norms of another kind, biases that were not there, a head with weights of its own."""
    for norm in model_map.norms:
        current: Any = module.get_submodule(modules[norm.name])
        if norm.kind is NormKind.RMS_NORM and isinstance(current, nn.LayerNorm):
            replacement = RootMeanSquareNorm(norm.features, norm.epsilon)
            for name in (norm.name, *norm.aliases):
                _replace(module, modules[name], replacement)
    tables = {id(module.get_submodule(modules[table.name]).weight) for table in model_map.embeddings}
    for layer in model_map.layers:
        linear: Any = module.get_submodule(modules[layer.matrix])
        if layer.has_bias and linear.bias is None:
            sharing = [each for each in model_map.layers if each.matrix == layer.matrix]
            width = sum(each.out_features for each in sharing)
            linear.bias = nn.Parameter(torch.empty(width, device="meta"))
        if not layer.tied_to and id(linear.weight) in tables:
            linear.weight = nn.Parameter(torch.empty_like(linear.weight))


def _replace(module: nn.Module, path: str, other: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, other)


@contextmanager
def _parameters_without_storage() -> Iterator[None]:
    """Modules made meanwhile keep their buffers and only the shapes of their parameters."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(self, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
