"""What each side of a protected model holds: the blocks under names that say nothing, and all the rest.

The host's tensors are named by what a block does and not by what the checkpoint calls it; its weights are
read in the secret order. The client's are those of the whole model, untouched, with the order beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.model.model_map import Layer, ModelMap, Norm
from quantkit.plan.plan import Plan
from quantkit.quantization.layout import Contents, Pack, Part

HOST_NAME = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A part of a model as it is written: its map and contents, and what they are called in the weights."""

    model_map: ModelMap
    contents: Contents  # under the names of the file
    stored: Contents  # the same under the names of the checkpoint
    plan: Plan
    gain_offset: float  # of the gains as the checkpoint has them; a file has them whole
    names: Mapping[str, str]  # a pack or norm of the checkpoint -> its name in the file

    def renamed(self, parts: Iterator[Part]) -> Iterator[Part]:
        """Tensors as they come, under the names of the file."""
        for name, part in parts:
            holder, _, kind = name.rpartition(".")
            yield f"{self.names.get(holder, holder)}.{kind}", part


def client_side(model_map: ModelMap, plan: Plan, contents: Contents) -> Side:
    """Tables, last norm and head."""
    own = replace(
        contents,
        packs=tuple(pack for pack in contents.packs if pack.layers[0].block is None),
        norms=tuple(norm for norm in contents.norms if norm.block is None),
        norm_biases=frozenset(
            norm.name for norm in contents.norms if norm.block is None and norm.name in contents.norm_biases
        ),
    )
    return Side(
        model_map=model_map,
        contents=own,
        stored=own,
        plan=_part_of(plan, own.packs),
        gain_offset=model_map.norm_gain_offset,
        names={},
    )


def host_side(model_map: ModelMap, plan: Plan, contents: Contents) -> Side:
    """The blocks, under names by which no model is known."""
    numbers = {block.name: f"block.{number}" for number, block in enumerate(model_map.blocks)}
    packs = tuple(pack for pack in contents.packs if pack.layers[0].block is not None)
    norms = tuple(norm for norm in contents.norms if norm.block is not None)
    biased = frozenset(norm.name for norm in norms if norm.name in contents.norm_biases)
    stored = replace(contents, packs=packs, tables=(), norms=norms, norm_biases=biased, loose=())
    pack_names = {pack.name: _pack_name(pack, numbers) for pack in packs}
    norm_names = {norm.name: f"{numbers[norm.block or '']}.norm_{norm.place}" for norm in norms}
    names = pack_names | norm_names
    assert len(set(names.values())) == len(packs) + len(norms), "two tensors under one name"
    new_norms = tuple(_renamed_norm(norm, norm_names[norm.name], numbers) for norm in norms)
    contents = replace(
        stored,
        packs=tuple(
            replace(
                pack,
                name=names[pack.name],
                layers=tuple(_renamed_layer(layer, numbers) for layer in pack.layers),
            )
            for pack in packs
        ),
        norms=new_norms,
        norm_biases=frozenset(names[name] for name in biased),
    )
    anonymous = replace(
        model_map,
        name=HOST_NAME,
        model_type="",
        architecture="",
        family=None,
        num_parameters=0,
        vocab_size=None,
        has_tied_head=False,
        embedding_scale=None,
        head_scale=None,
        final_softcap=None,
        layers=tuple(layer for pack in contents.packs for layer in pack.layers),
        embeddings=(),
        norms=new_norms,
        blocks=tuple(replace(block, name=numbers[block.name]) for block in model_map.blocks),
        unmapped=(),
        notes=(),
        norm_gain_offset=0.0,
        position_offset=0,
    )
    return Side(
        model_map=anonymous,
        contents=contents,
        stored=stored,
        plan=_part_of(plan, packs, renamed=numbers),
        gain_offset=model_map.norm_gain_offset,
        names=names,
    )


def _pack_name(pack: Pack, numbers: Mapping[str, str]) -> str:
    return f"{numbers[pack.layers[0].block or '']}.{'+'.join(layer.role for layer in pack.layers)}"


def _layer_name(layer: Layer, numbers: Mapping[str, str]) -> str:
    return f"{numbers[layer.block or '']}.{layer.role}"


def _renamed_layer(layer: Layer, numbers: Mapping[str, str]) -> Layer:
    name = _layer_name(layer, numbers)
    return replace(layer, name=name, matrix=name, block=numbers[layer.block or ""], tied_to=None, aliases=())


def _renamed_norm(norm: Norm, name: str, numbers: Mapping[str, str]) -> Norm:
    return replace(norm, name=name, block=numbers[norm.block or ""], feeds=(), aliases=())


def _part_of(plan: Plan, packs: tuple[Pack, ...], renamed: Mapping[str, str] | None = None) -> Plan:
    """The plan of some packs, under the names that their file has; counts stay those of the whole model."""
    layers = {layer.name: layer for pack in packs for layer in pack.layers}
    entries: list[Any] = []
    for entry in plan.layers:
        if entry.name in layers:
            layer = layers[entry.name]
            name = _layer_name(layer, renamed) if renamed is not None else entry.name
            entries.append(replace(entry, name=name, matrix=name if renamed is not None else entry.matrix))
    return replace(plan, layers=tuple(entries))
