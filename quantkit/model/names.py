"""Module names: full names from the relative ones of a family's row, and places in blocks from full names.

A model with a head puts a prefix before the names of its base model, and newer versions of transformers
rename modules; no other file resolves either.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from quantkit.model.config import ModelConfig
from quantkit.model.families import family_of
from quantkit.model.families.schema import Family, NormRow, Stack, read_fact
from quantkit.model.model_map import EXPERT, Role
from quantkit.model.rope import Rope


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A module's stack, block and name inside of the block."""

    stack: Stack
    block: str
    indices: tuple[int, ...]  # one for each star of the stack's path
    index: int
    inner: str

    @property
    def row(self) -> str:
        """The inner name as a family's row spells it: a star for the number of an expert."""
        return EXPERT.sub("experts.*.", self.inner)


@dataclass(kw_only=True, slots=True)
class Walk:
    """State of one walk over a model."""

    module: nn.Module
    config: ModelConfig
    family: Family | None
    prefix: str
    names: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    owners: dict[int, str] = field(default_factory=dict)  # parameter -> the entry that counts it
    modules: dict[str, nn.Module] = field(default_factory=dict)  # by their names in checkpoints
    parents: dict[str, nn.Module] = field(default_factory=dict)  # the module that holds each of them
    ropes: Mapping[str, Rope] = field(default_factory=dict)  # by the kind of layer; empty without rotation

    def claim(self, module: nn.Module, name: str) -> None:
        """Count a module's parameters under this name, unless another entry counts them."""
        for parameter in module.parameters(recurse=False):
            self.owners.setdefault(id(parameter), name)


def find_prefix(module: nn.Module, family: Family | None) -> str:
    """The prefix of the base model's names: empty, or the attribute that holds the base model."""
    if family is None:
        return ""
    anchor = family.stacks[0].path.split(".*")[0]
    names = {checkpoint_name(path, family) for path, _ in module.named_modules()}
    candidates = ["", *(f"{name}." for name, _ in module.named_children())]
    return next((candidate for candidate in candidates if candidate + anchor in names), "")


def checkpoint_name(path: str, family: Family | None) -> str:
    """A module's name in checkpoints, which is independent of the transformers version."""
    for newer, stored in (family.names if family else {}).items():
        path = re.sub(rf"(?<![^.]){re.escape(newer)}(?![^.])", stored, path)
    return path


def family_of_module(module: nn.Module) -> Family | None:
    return family_of(getattr(getattr(module, "config", None), "model_type", "") or "")


def modules_by_name(module: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by their checkpoint names, a shared module under each of its names."""
    family = family_of_module(module)
    return {
        checkpoint_name(path, family): child for path, child in module.named_modules(remove_duplicate=False)
    }


def place_of(walk: Walk, name: str) -> Place | None:
    """The block that a name lies in, if any."""
    if walk.family is None or not name.startswith(walk.prefix):
        return None
    relative = name[len(walk.prefix) :]
    for stack in walk.family.stacks:
        pattern = re.escape(stack.path).replace(r"\*", r"(\d+)")
        match = re.match(rf"({pattern})(?:\.(.+))?$", relative)
        if match:
            block, *numbers, inner = match.groups()
            indices = tuple(int(number) for number in numbers)
            index = indices[-1] + sum(indices[:-1]) * int(walk.config.raw.get("inner_group_num", 1))
            return Place(
                stack=stack, block=walk.prefix + block, indices=indices, index=index, inner=inner or ""
            )
    return None


def calls(walk: Walk, place: Place | None) -> int:
    """Calls of a module in one forward pass at inference."""
    if place is not None and place.inner in place.stack.training_only:
        return 0
    if place is None or place.stack.calls is None:
        return 1
    depth, num_groups = (int(walk.config.raw[key]) for key in place.stack.calls)
    return [int(level / (depth / num_groups)) for level in range(depth)].count(place.indices[0])


def norm_row(walk: Walk, name: str, place: Place | None) -> NormRow | None:
    """The family's row for a norm, or None."""
    if walk.family is None:
        return None
    if place is not None:
        row: NormRow | None = read_fact(place.stack.norms, walk.config.raw).get(place.inner)
        return row
    return walk.family.outer_norms.get(name.removeprefix(walk.prefix), walk.family.outer_norms.get(name))


def readers(
    walk: Walk, row: NormRow, name: str, place: Place | None, head_name: str | None
) -> tuple[str, ...]:
    """Full names of the existing modules that read a norm's output directly."""
    assert walk.family is not None
    base = f"{place.block}." if place else walk.prefix
    alone = row.feeds_alone and base + row.feeds_alone
    if alone and any(alone in names for names in walk.names.values()):
        return (alone,)
    following = _blocks_after(walk, place) if place else _first_block(walk, _stack_beside(walk, name))
    full_names = [base + reader for fed in row.feeds for reader in _of_experts(walk, fed)]
    if walk.prefix and not place:  # modules of a head lie outside of the base model
        full_names += row.feeds
    full_names += [f"{block}.{reader}" for reader in row.feeds_next_block for block in following]
    blocks = _blocks_of(walk, walk.family.stacks[0]).values() if row.feeds_every_block else ()
    full_names += [f"{block}.{reader}" for block in blocks for reader in row.feeds_every_block]
    if row.feeds_cross_attention and not (place and following):
        full_names += _cross_readers(walk)
    if row.feeds_head and head_name and not (place and following):
        full_names.append(head_name)
    first_names = {alias: names[0] for names in walk.names.values() for alias in names}
    # A module that several blocks share is read under its first name by all of them.
    return tuple(first_names[reader] for reader in full_names if reader in first_names)


def _of_experts(walk: Walk, name: str) -> list[str]:
    """The name for each expert, where it has a star for their numbers."""
    if "*" not in name:
        return [name]
    return [name.replace("*", str(number)) for number in range(walk.config.num_experts or 0)]


def _cross_readers(walk: Walk) -> list[str]:
    """Keys and values of every cross attention."""
    readers = (Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
    return [
        names[0]
        for names in walk.names.values()
        if (place := place_of(walk, names[0]))
        and any(role in readers for role in place.stack.cross_projections.get(place.inner, ()))
    ]


def _stack_beside(walk: Walk, name: str) -> Stack:
    """The stack that a norm outside of blocks stands before: of two, the one in the same module."""
    assert walk.family is not None
    module = name.removeprefix(walk.prefix).partition(".")[0]
    stacks = walk.family.stacks
    return next((stack for stack in stacks if stack.path.startswith(f"{module}.")), stacks[0])


def _blocks_of(walk: Walk, stack: Stack) -> dict[tuple[int, ...], str]:
    """A stack's blocks by their indices, in order."""
    places = (place_of(walk, names[0]) for names in walk.names.values())
    return {place.indices: place.block for place in places if place and place.stack is stack}


def _first_block(walk: Walk, stack: Stack) -> list[str]:
    return list(_blocks_of(walk, stack).values())[:1]


def _blocks_after(walk: Walk, place: Place) -> list[str]:
    """The blocks that may run next: two at the end of a shared group, which repeats or ends."""
    blocks = _blocks_of(walk, place.stack)
    *outer, last = place.indices
    if (*outer, last + 1) in blocks:
        return [blocks[(*outer, last + 1)]]
    if not outer:
        return []
    again = [blocks[outer[0], 0]] if calls(walk, place) > 1 else []
    return again + [blocks[key] for key in [(outer[0] + 1, 0)] if key in blocks]
