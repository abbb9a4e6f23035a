"""The two sides of a protected model: the client's tables and head, the host's blocks under neutral names.

A host's tensors are named by their function (`block.0.ffn_down`) instead of the checkpoint's names. A
client's tensors are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quantkit.model.model_map import Layer, ModelMap, Norm
from quantkit.plan.plan import Plan
from quantkit.quantization.layout import Contents, Pack, Part

HOST_NAME = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    model_map: ModelMap
    contents: Contents  # under the names of the file
    stored: Contents  # the same contents under the names of the checkpoint
    plan: Plan
    gain_offset: float  # of the checkpoint's norm gains; a file holds whole gains
    names: Mapping[str, str]  # pack or norm of the checkpoint -> its name in the file

    def renamed(self, parts: Iterator[Part]) -> Iterator[Part]:
        """Parts of tensors under the names of the file."""
        for name, part in parts:
            holder, _, kind = name.rpartition(".")
            yield f"{self.names.get(holder, holder)}.{kind}", part


def client_side(model_map: ModelMap, plan: Plan, contents: Contents) -> Side:
    contents = _part(contents, in_blocks=False)
    names = {layer.name for pack in contents.packs for layer in pack.layers}
    return Side(
        model_map=model_map,
        contents=contents,
        stored=contents,
        plan=replace(plan, layers=tuple(layer for layer in plan.layers if layer.name in names)),
        gain_offset=model_map.norm_gain_offset,
        names={},
    )


def host_side(model_map: ModelMap, plan: Plan, contents: Contents) -> Side:
    stored = replace(_part(contents, in_blocks=True), tables=(), loose=())
    blocks = {block.name: f"block.{number}" for number, block in enumerate(model_map.blocks)}
    packs: list[Pack] = []
    norms: list[Norm] = []
    layers: dict[str, str] = {}
    names: dict[str, str] = {}
    for pack in stored.packs:
        block = blocks[pack.layers[0].block or ""]
        renamed = tuple(_renamed_layer(layer, block) for layer in pack.layers)
        layers |= {layer.name: new.name for layer, new in zip(pack.layers, renamed, strict=True)}
        names[pack.name] = f"{block}.{'+'.join(layer.role for layer in pack.layers)}"
        packs.append(replace(pack, name=names[pack.name], layers=renamed))
    for norm in stored.norms:
        block = blocks[norm.block or ""]
        names[norm.name] = f"{block}.norm_{norm.place}"
        norms.append(replace(norm, name=names[norm.name], block=block, feeds=(), aliases=()))
    assert len(set(names.values())) == len(packs) + len(norms), "two tensors under one name"
    neutral_map = replace(
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
        logit_scale=None,
        layers=tuple(layer for pack in packs for layer in pack.layers),
        embeddings=(),
        norms=tuple(norms),
        blocks=tuple(replace(block, name=blocks[block.name]) for block in model_map.blocks),
        unmapped=(),
        notes=(),
        norm_gain_offset=0.0,
        position_offset=0,
    )
    return Side(
        model_map=neutral_map,
        contents=replace(
            stored,
            packs=tuple(packs),
            norms=tuple(norms),
            norm_biases=frozenset(names[name] for name in stored.norm_biases),
        ),
        stored=stored,
        plan=replace(
            plan,
            layers=tuple(
                replace(layer, name=layers[layer.name], matrix=layers[layer.name])
                for layer in plan.layers
                if layer.name in layers
            ),
        ),
        gain_offset=model_map.norm_gain_offset,
        names=names,
    )


def _part(contents: Contents, *, in_blocks: bool) -> Contents:
    """The packs and norms inside of the blocks, or those outside of them."""
    norms = tuple(norm for norm in contents.norms if (norm.block is not None) == in_blocks)
    return replace(
        contents,
        packs=tuple(pack for pack in contents.packs if (pack.layers[0].block is not None) == in_blocks),
        norms=norms,
        norm_biases=contents.norm_biases & {norm.name for norm in norms},
    )


def _renamed_layer(layer: Layer, block: str) -> Layer:
    name = f"{block}.{layer.role}"
    return replace(layer, name=name, matrix=name, block=block, tied_to=None, aliases=())
