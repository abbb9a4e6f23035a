"""Opens the weights of a source: from its folder, from the Hub, or seeded random ones.

A checkpoint stores a shared tensor once, under any of its names, so every name is an alias of the others.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quantkit.errors import InputError
from quantkit.files import reading
from quantkit.model.experts import split_experts
from quantkit.model.gguf.folder import gguf_tensors, is_gguf_folder
from quantkit.model.hub import hub_is_reachable
from quantkit.model.load import DEMO_NAME, Source, build_on_meta, with_sentence
from quantkit.model.model_map import ModelMap
from quantkit.model.names import checkpoint_name, family_of_module, find_prefix
from quantkit.model.weights.as_mapped import as_mapped
from quantkit.model.weights.headers import StoredTensor, absent, compare, match, read_headers
from quantkit.model.weights.packed import with_packed
from quantkit.model.weights.scales import require_readable, why_not_read, with_scales
from quantkit.model.weights.tensors import CheckpointTensors, RandomTensors, TensorSource

WEIGHT_PATTERNS = ["*.safetensors", "*.json", "*.txt", "tokenizer.model", "*.jinja"]


def with_weights(source: Source, *, random_weights: bool) -> Source:
    """The source with a folder of weights, fetched from the Hub where it has none."""
    if random_weights:
        return source
    folder = source.folder or _fetch(source.name)
    require_readable(source.quantization, folder, source.name)
    return source if source.folder else with_sentence(dataclasses.replace(source, folder=folder))


def _fetch(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        offline = not hub_is_reachable(constants.ENDPOINT)
        return Path(snapshot_download(name, allow_patterns=WEIGHT_PATTERNS, local_files_only=offline))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise InputError(
            f"its weights are not here, and the Hub gave none ({type(error).__name__})",
            where=name,
            allowed=f"a local folder with safetensors, '{DEMO_NAME}', or a Hub name",
            next_step=(
                f"'hf download {name} --local-dir FOLDER' where there is a network, then give that folder; "
                "or pass --random-weights to measure size and speed alone"
            ),
        ) from error


def open_weights(source: Source, model_map: ModelMap, *, random_weights: bool, seed: int = 0) -> TensorSource:
    """The tensors of a source; no weight is read yet."""
    module = build_on_meta(source)
    if random_weights:
        random = RandomTensors(
            shapes={name: tuple(tensor.shape) for name, tensor in tensors_by_name(module).items()}
            | (source.sentence.tensors if source.sentence else {}),
            seed=seed,
            gain_offset=model_map.norm_gain_offset,
            num_values=model_map.num_parameters,
        )
        return as_mapped(random, model_map)
    return as_mapped(open_tensors(source, module), model_map)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The headers of a source beside the tensors of its module; weights are not read."""

    stored: Mapping[str, StoredTensor]  # with their scales, by their own names
    expected: Mapping[str, torch.Tensor]  # what the module has, by its names in checkpoints
    matched: Mapping[str, StoredTensor]  # by the names of `expected`
    computed: Mapping[str, NDArray[np.float32]]  # what no file holds and the class computes


def read_stored(folder: Path, source: Source) -> dict[str, StoredTensor]:
    """The tensors in the source's folder, by their own names."""
    if is_gguf_folder(folder):
        return gguf_tensors(folder, source.config)
    return with_scales(with_packed(read_headers(folder), source.quantization), source.quantization)


def read_checkpoint(source: Source, module: nn.Module) -> Checkpoint:
    stored = read_stored(source.folder, source) if source.folder else {}
    stored = split_experts(stored, source.config["model_type"])
    expected = tensors_by_name(module)
    matched = match(stored, expected, prefixes=prefixes_of(module))
    computed = _computed(module, absent(matched, expected)) if matched else {}
    return Checkpoint(stored=stored, expected=expected, matched=matched, computed=computed)


def open_tensors(source: Source, module: nn.Module) -> CheckpointTensors:
    """The module's weights in the source's folder; headers are read, weights are not."""
    assert source.folder is not None
    require_readable(source.quantization, source.folder, source.name)
    found = read_checkpoint(source, module)
    if not found.stored:
        raise InputError(
            "the folder holds no safetensors weights",
            where=str(source.folder),
            next_step="copy model.safetensors into it, or pass --random-weights for speed and size only",
        )
    tensors = CheckpointTensors(
        stored={**found.matched, **_dense_tensors(source)},
        aliases=_aliases(found.expected),
        computed=found.computed,
    )
    tensors.source_bytes()  # a type that is not read is refused here
    return tensors


def _dense_tensors(source: Source) -> dict[str, StoredTensor]:
    """The projections behind a pooling, each under the name of its folder."""
    stored: dict[str, StoredTensor] = {}
    for dense in source.sentence.dense if source.sentence else ():
        assert source.folder is not None
        headers = read_headers(source.folder / dense.name)
        tensors = {f"{dense.name}.{name}": tensor for name, tensor in headers.items()}
        for name, shape in dense.tensors.items():
            if name not in tensors or tensors[name].shape != shape:
                is_shape = list(tensors[name].shape) if name in tensors else "missing"
                raise InputError(
                    f"the tensor '{name}' is {is_shape}",
                    where=str(source.folder / dense.name),
                    allowed=f"{list(shape)}, as config.json beside it has it",
                    next_step="copy or download the folder again",
                )
        stored |= tensors
    return stored


def require_names(weights: TensorSource, names: Iterable[str], where: str) -> None:
    """Name every one of these tensors that the weights lack."""
    missing = sorted({name for name in names if not weights.has(name)})
    if missing:
        raise InputError(
            f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:4])}",
            where=where,
            next_step="copy or download the checkpoint again; config.json asks for these",
        )


def require_complete(source: Source, model_map: ModelMap) -> None:
    """Refuse a checkpoint that lacks what the model runs: transformers draws missing weights at random."""
    used = model_map.at_inference
    names = [f"{table.name}.weight" for table in used.embeddings]
    names += [f"{layer.matrix}.weight" for layer in used.layers]
    names += [f"{layer.matrix}.bias" for layer in used.layers if layer.has_bias]
    names += [f"{norm.name}.weight" for norm in used.norms if norm.num_parameters]
    require_names(open_tensors(source, build_on_meta(source)), names, source.name)


def stores(source: Source, module: nn.Module, name: str) -> bool:
    """Whether the source's folder holds this tensor; a folder without weights may."""
    if why_not_read(source.quantization):
        return True
    matched = read_checkpoint(source, module).matched
    return not matched or name in matched


def header_notes(source: Source, module: nn.Module) -> list[str]:
    """Tensors that are missing or not used; a reason instead where the weights cannot be read."""
    reason = why_not_read(source.quantization)
    if reason:
        return [f"{reason}: they are not read" if source.folder else reason]
    found = read_checkpoint(source, module)
    expected = {name: tensor for name, tensor in found.expected.items() if name not in found.computed}
    return compare(found.stored, found.matched, expected, where=source.name)


def _computed(module: nn.Module, names: Collection[str]) -> dict[str, NDArray[np.float32]]:
    """Those weights that the class computes and does not train, such as Marian's table of sinusoids.

    Its own initialiser gives them, the same twice; Marian's checkpoints leave them out. Classes of torch
    itself compute none.
    """
    family = family_of_module(module)
    computed = {}
    for path, _ in module.named_parameters():
        name = checkpoint_name(path, family)
        owner = module.get_submodule(path.rpartition(".")[0])
        if name in names and not type(owner).__module__.startswith("torch.nn."):
            first, second = (_initialised(module, owner, path.rpartition(".")[2]) for _ in range(2))
            if not first.requires_grad and torch.equal(first, second):
                computed[name] = first.numpy()
    return computed


def _initialised(module: nn.Module, owner: nn.Module, leaf: str) -> torch.Tensor:
    """One weight as the model's class initialises it; NaN where it does not."""
    alone = copy.deepcopy(owner).to_empty(device="cpu")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for parameter in alone.parameters():
            parameter.fill_(torch.nan)
        with reading("config.json", "its settings of the initialiser are not right"):
            getattr(module, "_init_weights", lambda _: None)(alone)
    return alone.get_parameter(leaf).float()


def tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's tensors by their names in checkpoints, a shared one under each of its names."""
    family = family_of_module(module)
    state = module.state_dict(keep_vars=True)
    return {checkpoint_name(path, family): tensor for path, tensor in state.items()}


def prefixes_of(module: nn.Module) -> tuple[str, ...]:
    """What a model with a head puts before the names of its base model."""
    family = family_of_module(module)
    prefixes = (find_prefix(module, family), f"{getattr(module, 'base_model_prefix', '')}.")
    return tuple(dict.fromkeys(prefix for prefix in prefixes if prefix.strip(".")))


def _aliases(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, tuple[str, ...]]:
    """Name -> the other names of the same tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    return {
        name: tuple(other for other in names if other != name)
        for names in groups.values()
        if len(names) > 1
        for name in names
    }
