"""Where a module stands in its model, and who reads whom: names resolved against a family's facts.

A family's row speaks in relative names; this is the only place that turns them into full ones and back,
whatever prefix a model with a head puts before them and whatever a newer transformers renamed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from torch import nn

from quantkit.model.config import ModelConfig
from quantkit.model.families.schema import CROSS, HEAD, LAST, Family, Stack, read_fact
from quantkit.model.model_map import FFN_ROLES, NormPlace, NormPlacement, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a module stands: its stack and block, and its name inside of the block."""

    stack: Stack
    block: str
    indices: tuple[int, ...]  # one for each star of the stack's path
    index: int
    inner: str


@dataclass(kw_only=True, slots=True)
class Walk:
    """What the walk knows while it runs."""

    module: nn.Module
    config: ModelConfig
    family: Family | None
    prefix: str
    names: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    owners: dict[int, str] = field(default_factory=dict)  # parameter -> the entry that counts it


def find_prefix(module: nn.Module, family: Family | None) -> str:
    """What stands before the base model's names: nothing, or the attribute that holds the base model."""
    if family is None:
        return ""
    anchor = family.stacks[0].path.split(".*")[0]
    candidates = ["", *(f"{name}." for name, _ in module.named_children())]
    for candidate in candidates:
        try:
            module.get_submodule(candidate + anchor)
        except AttributeError:
            continue
        return candidate
    return ""


def checkpoint_name(path: str, family: Family | None) -> str:
    """The name as checkpoints spell it, which does not change with the transformers version."""
    for newer, stored in (family.names if family else {}).items():
        if path == newer or path.startswith(f"{newer}."):
            return stored + path[len(newer) :]
    return path


def place_of(walk: Walk, name: str) -> Place | None:
    """The block that a name lies in, if any."""
    if walk.family is None or not name.startswith(walk.prefix):
        return None
    relative = name[len(walk.prefix) :]
    for stack in walk.family.stacks:
        pattern = re.escape(stack.path).replace(r"\*", r"(\d+)")
        found = re.match(rf"({pattern})(?:\.(.+))?$", relative)
        if found:
            block, *numbers, inner = found.groups()
            indices = tuple(int(number) for number in numbers)
            index = indices[-1] + sum(indices[:-1]) * int(walk.config.raw.get("inner_group_num", 1))
            return Place(
                stack=stack, block=walk.prefix + block, indices=indices, index=index, inner=inner or ""
            )
    return None


def calls(walk: Walk, place: Place | None) -> int:
    """How often one forward pass runs what stands here; never, what training alone runs."""
    if place is not None and place.inner in place.stack.training_only:
        return 0
    if place is None or place.stack.calls is None:
        return 1
    total, shared_by = (int(walk.config.raw[key]) for key in place.stack.calls)
    return max(1, total // shared_by)


def readers(walk: Walk, name: str, place: Place | None, head_name: str | None) -> tuple[str, ...]:
    """Full names of the modules that read a norm's output directly, as far as they exist."""
    if walk.family is None:
        return ()
    if place is not None:
        readers = read_fact(place.stack.norms, walk.config.raw).get(place.inner, ())
        following = _blocks_after(walk, place)
    else:
        outer = walk.family.outer_norms
        relative = name.removeprefix(walk.prefix)
        readers = outer.get(relative, outer.get(name, ()))
        following = list(_blocks_of(walk, walk.family.stacks[0]).values())[:1]
    existing = {known: names[0] for names in walk.names.values() for known in names}
    resolved: list[str] = []
    for reader in readers:
        if reader == CROSS:
            resolved.extend(_cross_readers(walk))
        elif reader == HEAD or (reader == LAST and not following):
            resolved.extend([head_name] if head_name else [])
        elif reader.startswith(">"):
            resolved.extend(f"{block}.{reader[1:]}" for block in following)
        else:
            resolved.append(f"{place.block}.{reader}" if place else walk.prefix + reader)
    # A module that several blocks share is read under its first name by all of them.
    return tuple(existing[reader] for reader in resolved if reader in existing)


def norm_place(walk: Walk, name: str, place: Place | None) -> NormPlace:
    """Where a norm stands, from what the family says that it feeds."""
    if walk.family is None:
        return NormPlace.OTHER
    if place is None:
        outer = walk.family.outer_norms
        fed = outer.get(name.removeprefix(walk.prefix), outer.get(name, ()))
        return NormPlace.FINAL if HEAD in fed else NormPlace.EMBEDDING
    if place.inner in place.stack.query_key_norms:
        return (NormPlace.QUERY, NormPlace.KEY)[place.stack.query_key_norms.index(place.inner)]
    return _place_in_block(walk, place, walk.family)


def _place_in_block(walk: Walk, place: Place, family: Family) -> NormPlace:
    norms = read_fact(place.stack.norms, walk.config.raw)
    names = list(norms)
    if place.inner not in norms:
        return NormPlace.OTHER
    if not norms[place.inner]:  # a norm on a sublayer's output: it follows that sublayer's own
        before = _fed_part(place.stack, norms[names[names.index(place.inner) - 1]])
        return NormPlace.AFTER_ATTENTION if before is NormPlace.BEFORE_ATTENTION else NormPlace.AFTER_FFN
    part = _fed_part(place.stack, norms[place.inner])
    is_post = read_fact(family.placement, walk.config.raw) is NormPlacement.POST
    # A post-norm that the next block reads follows the FFN, or attention where the block has nothing else.
    is_alone = len(names) == 1 and part is NormPlace.AFTER_FFN
    return NormPlace.AFTER_ATTENTION if is_post and (is_alone or part is NormPlace.BEFORE_FFN) else part


def _fed_part(stack: Stack, fed: tuple[str, ...]) -> NormPlace:
    if any(reader.startswith(">") for reader in fed):
        return NormPlace.AFTER_FFN
    roles = {role for reader in fed for role in stack.projections.get(reader, ())}
    if Role.ATTENTION_QUERY in roles:
        return NormPlace.BEFORE_ATTENTION
    return NormPlace.BEFORE_FFN if roles & set(FFN_ROLES) else NormPlace.OTHER


def _cross_readers(walk: Walk) -> list[str]:
    """The modules that read the encoder's last norm: keys and values of every cross attention."""
    readers = (Role.ATTENTION_KEY, Role.ATTENTION_VALUE)
    return [
        names[0]
        for names in walk.names.values()
        if (place := place_of(walk, names[0]))
        and any(role in readers for role in place.stack.cross_projections.get(place.inner, ()))
    ]


def _blocks_of(walk: Walk, stack: Stack) -> dict[tuple[int, ...], str]:
    """A stack's blocks by their indices, in order."""
    places = (place_of(walk, names[0]) for names in walk.names.values())
    return {place.indices: place.block for place in places if place and place.stack is stack}


def _blocks_after(walk: Walk, place: Place) -> list[str]:
    """The blocks that may run next: two, where a shared group ends by starting again or handing on."""
    blocks = _blocks_of(walk, place.stack)
    *outer, last = place.indices
    if (*outer, last + 1) in blocks:
        return [blocks[(*outer, last + 1)]]
    if not outer:
        return []
    again = [blocks[outer[0], 0]] if calls(walk, place) > 1 else []
    return again + [blocks[key] for key in [(outer[0] + 1, 0)] if key in blocks]
