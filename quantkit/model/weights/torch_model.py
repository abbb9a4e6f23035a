"""The transformers module of a model with its parameters from a `TensorSource`, transformed or not.

Calibration runs it, and so do the tests that a transform keeps the function. Modules are built with
parameters without storage and with real buffers, since rotary tables and masks are computed when a module is
built and are in no checkpoint. Each parameter is then filled a few rows at a time, without a second copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.model.architectures.reference import RmsNorm
from quantkit.model.families import family_of
from quantkit.model.load import Source, make_config, make_model, parameters_without_storage
from quantkit.model.model_map import EmbeddingKind, ModelMap, NormKind, Role
from quantkit.model.names import checkpoint_name
from quantkit.model.unknown.probes import norm_kind_of
from quantkit.model.weights.tensors import TensorSource

Drop = Callable[..., None]  # the weights of a block
CHUNK_VALUES = 1 << 22
FACTORS = "input_factors"
LEFT_OUT = "is_left_out"  # attribute of a module in whose place something else runs: it needs no weights
Chunks = Iterator[Tensor]  # consecutive rows of a tensor
# Module -> (dtype, path of a parameter that is streamed -> its values).
_streamed: MutableMapping[nn.Module, tuple[torch.dtype, dict[str, Callable[[], Chunks]]]] = (
    WeakKeyDictionary()
)


def torch_model(
    source: Source,
    model_map: ModelMap,
    tensors: TensorSource,
    dtype: torch.dtype = torch.float32,
    *,
    streams: bool = False,
    keeps_block: bool = False,
) -> nn.Module:
    """The module that the map describes, in evaluation mode, with these weights.

    With `streams` only the weights of the running block, and of its running expert, are held: read when it is
    entered and dropped when it is left, or with `keeps_block` when another block is entered. Tables read
    single rows and the head has no weights: enough to see the inputs of projections.
    """
    config = make_config(source)
    config.dtype = dtype
    config.use_cache = False
    if any(attention.softcap for block in model_map.blocks for attention in block.attentions):
        config._attn_implementation = "eager"  # transformers 4 leaves the cap out of its faster attention
    with parameters_without_storage():
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
    holders = set(_held_together(model_map, modules, with_experts=not keeps_block)) if streams else set()
    held: list[Drop] | None = [] if keeps_block else None
    unread: dict[str, Callable[[], Chunks]] = {}
    heads = [f"{layer.matrix}.weight" for layer in model_map.layers if layer.role is Role.LM_HEAD]
    # Tables that are looked up; one of distances is read whole.
    tables = [
        f"{table.name}.weight" for table in model_map.embeddings if table.kind is not EmbeddingKind.DISTANCE
    ]
    for paths in shared.values():
        names = sorted((checkpoint_name(path, family) for path in paths), key=lambda n: n not in preferred)
        stored = next((name for name in names if tensors.has(name)), None)
        if stored is None:
            raise InputError(
                f"the weights lack '{names[0]}'",
                where=model_map.name,
                next_step="copy or download the checkpoint again; config.json asks for this tensor",
            )
        holder = next((parent for parent in _parents(paths[0]) if parent in holders), None)
        if holder and all(path.startswith(f"{holder}.") for path in paths):
            waiting.setdefault(holder, []).extend((path, stored) for path in paths)
            unread |= dict.fromkeys(paths, partial(_chunks, tensors, stored, dtype))
        elif streams and stored in tables and (readers := _plain_tables(module, paths)):
            for table in readers:
                _look_up(table, tensors, stored, dtype)
            unread |= dict.fromkeys(paths, partial(_chunks, tensors, stored, dtype))
        elif streams and stored in heads:
            unread |= dict.fromkeys(paths, partial(_chunks, tensors, stored, dtype))
        else:
            _put(module, paths, _filled(tensors, stored, module.get_parameter(paths[0]), dtype))
    for block, parts in waiting.items():
        _fill_on_entry(module, block, parts, tensors, dtype, held)
    _streamed[module] = (dtype, unread)
    return module.eval()


def values_of(module: nn.Module) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], Chunks]]:
    """(name, dtype, shape, rows) of every parameter and buffer; rows of streamed ones are read here."""
    dtype, unread = _streamed.get(module, (torch.float32, {}))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in unread and tensor.is_meta:
            yield name, dtype, tuple(tensor.shape), unread[name]()
        else:
            yield name, tensor.dtype, tuple(tensor.shape), iter([tensor.detach()])


def _held_together(model_map: ModelMap, modules: Mapping[str, str], *, with_experts: bool) -> Iterator[str]:
    """Blocks and experts."""
    yield from (modules[block.name] for block in model_map.blocks)
    experts = (layer.matrix for layer in model_map.layers if with_experts and layer.expert is not None)
    yield from (modules[matrix].rpartition(".")[0] for matrix in experts)


def _parents(path: str) -> Iterator[str]:
    """The modules around a parameter, the innermost first."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _put(module: nn.Module, paths: Sequence[str], values: Tensor) -> None:
    parameter = nn.Parameter(values, requires_grad=False)
    for path in paths:
        _set(module, path, parameter)


def _set(module: nn.Module, path: str, child: nn.Module | nn.Parameter) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(parent), leaf, child)


def _plain_tables(module: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """The embeddings of a weight, if they only look up rows: some classes scale them, or shift the ids.

    Encoder and decoder may each have a module for the table that they share.
    """
    owners = {module.get_submodule(path.rpartition(".")[0]) for path in paths}
    embeddings: list[nn.Module] = [owner for owner in owners if isinstance(owner, nn.Embedding)]
    return embeddings if all(type(table) is nn.Embedding for table in embeddings) else []


def _look_up(embedding: nn.Module, tensors: TensorSource, name: str, dtype: torch.dtype) -> None:
    """Make an embedding read its rows from the source at each call."""

    def rows(ids: Tensor) -> Tensor:
        unique, places = torch.unique(ids, return_inverse=True)
        read = [torch.from_numpy(tensors.read(name, int(row), 1)) for row in unique]
        return torch.cat(read).to(dtype)[places]

    embedding.forward = rows


def _fill_on_entry(
    module: nn.Module,
    block: str,
    parts: Sequence[tuple[str, str]],
    tensors: TensorSource,
    dtype: torch.dtype,
    held: list[Drop] | None,
) -> None:
    """`held` is how to drop the block that was entered last; None: every block is dropped when it is left."""
    shapes = {path: module.get_parameter(path) for path, _ in parts}

    def enter(entered: nn.Module, *_: object) -> None:
        if getattr(entered, LEFT_OUT, False):
            return
        if held is not None:
            if held == [leave]:
                return
            for drop in held:
                drop()
            held[:] = [leave]
        for path, name in parts:
            _put(module, [path], _filled(tensors, name, shapes[path], dtype))

    def leave(*_: object) -> None:
        for path, empty in shapes.items():
            _put(module, [path], empty)

    module.get_submodule(block).register_forward_pre_hook(enter)
    if held is None:
        module.get_submodule(block).register_forward_hook(leave)


def _names_in_use(model_map: ModelMap) -> set[str]:
    """The names that the map uses, where a tensor has several."""
    names = {f"{table.name}.weight" for table in model_map.embeddings if not table.tied_to}
    names |= {f"{layer.matrix}.weight" for layer in model_map.layers if not layer.tied_to}
    names |= {f"{layer.matrix}.bias" for layer in model_map.layers}
    return names | {f"{norm.name}.{part}" for norm in model_map.norms for part in ("weight", "bias")}


def _filled(tensors: TensorSource, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor with the source's values, a few rows at a time."""
    shape = tuple(like.shape)
    assert tensors.shape(name) in (shape, tuple(like.flatten(1).shape) if like.dim() > 2 else shape), name
    filled = torch.empty(shape, dtype=dtype)
    start = 0
    for rows in _chunks(tensors, name, dtype):
        if not shape:
            return filled.copy_(rows.reshape(()))
        filled[start : start + len(rows)] = rows.reshape(-1, *shape[1:])
        start += len(rows)
    return filled


def _chunks(tensors: TensorSource, name: str, dtype: torch.dtype) -> Chunks:
    rows, *rest = tensors.shape(name) or (1,)
    step = max(1, CHUNK_VALUES // max(1, math.prod(rest)))
    for start in range(0, rows, step):
        yield torch.from_numpy(tensors.read(name, start, min(step, rows - start))).to(dtype)


def _scale_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first, *rest = inputs
    return (first * getattr(module, FACTORS), *rest)


def _match_map(module: nn.Module, model_map: ModelMap, modules: dict[str, str]) -> None:
    """Give the module the map's changed norms, added biases, factors of inputs and untied head."""
    for norm in model_map.norms:
        current: Any = module.get_submodule(modules[norm.name])
        if norm.kind is NormKind.RMS_NORM and norm_kind_of(current) is NormKind.LAYER_NORM:
            with torch.device("meta"):
                replacement = RmsNorm(norm.features, norm.epsilon, offset=model_map.norm_gain_offset)
            for name in (norm.name, *norm.aliases):
                _set(module, modules[name], replacement)
    tables = {id(module.get_submodule(modules[table.name]).weight) for table in model_map.embeddings}
    factors: dict[str, nn.Parameter] = {}
    for layer in model_map.layers:
        linear: Any = module.get_submodule(modules[layer.matrix])
        if layer.has_bias and linear.bias is None:
            width = sum(other.out_features for other in model_map.layers if other.matrix == layer.matrix)
            linear.bias = nn.Parameter(torch.empty(width, device="meta"))
        if layer.input_factors and not hasattr(linear, FACTORS):
            empty = nn.Parameter(torch.empty(layer.in_features, device="meta"))
            setattr(linear, FACTORS, factors.setdefault(layer.input_factors, empty))
            linear.register_forward_pre_hook(_scale_input)
        if not layer.tied_to and id(linear.weight) in tables:
            linear.weight = nn.Parameter(torch.empty_like(linear.weight))
