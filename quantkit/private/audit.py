"""The attack that a permutation must fear, mounted: public weights against a host's folder.

Queries and keys are what they were in every split, because the cache is. Their rows therefore stand in a
known order, and each of their columns names its channel of the residual. With that order known, the rows of
an FFN and of the values name theirs, and features name their tokens. Beside it stands what sorted values
alone give, without any known order. The key is used for one thing: to count how much was found right.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.export.fused.split import read_blocks
from quantkit.model.model_map import Block, EmbeddingKind, ModelMap, Role
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.export import NOTHING
from quantkit.pipeline.prepare import discard, prepare
from quantkit.pipeline.resolve import resolve
from quantkit.plan.formats import Grid
from quantkit.plan.select import choose
from quantkit.private.files import HOST, read_half
from quantkit.private.keys import Key, fingerprint, open_key
from quantkit.private.matching import (
    agreement,
    nearest,
    nearest_in_heads,
    sorted_values,
    unit_rows,
)
from quantkit.private.protect import (
    check_permutes,
    contents_for,
    in_secret_order,
    require_decoder,
    write_host,
)
from quantkit.private.sides import host_side
from quantkit.progress import Progress
from quantkit.quantization.grid import decode_all, middle
from quantkit.quantization.rounding.rtn import round_to_nearest
from quantkit.quantization.transforms.basis import Space
from quantkit.quantization.transforms.draft import opened, row_chunks
from quantkit.quantization.transforms.spaces import require_spaces
from quantkit.recipe import Recipe
from quantkit.runtime.graph import MODEL_FILE

Floats = NDArray[np.float32]
Order = NDArray[np.int64]
MOST_BLOCKS = 3  # the first, the middle one, the last
MOST_TOKENS = 4096  # drawn from the vocabulary
SENT_GRID = Grid(block=128)  # at most as fine as a client's table
LEAST_AGREEMENT = 0.5  # between weights and the public ones in the key's order: less is another key


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """How much of the order of one kind of space was found, of 1."""

    weights: str  # "float32", or the scheme
    permutes: tuple[str, ...]
    space: str  # "residual", "ffn" or "values"; "tokens" are the words of a prompt
    positions: int
    by_known_rows: float
    by_sorted_values: float
    is_given: bool = False  # of the folder that was named, and not of one made for comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """A host's file beside the public weights, both as [out, in]."""

    model_map: ModelMap
    host: Mapping[str, NDArray[Any]]
    public: TensorSource
    numbers: Mapping[str, int]  # of blocks

    def both(self, block: Block, role: Role) -> tuple[Floats, Floats] | None:
        """(the host's rows, the public rows) of a projection."""
        layers = [each for each in self.model_map.layers if each.block == block.name and each.role is role]
        if not layers:
            return None
        tensors = opened(self.model_map, self.public, np.float32)
        known_OI = np.concatenate(list(row_chunks(tensors, layers[0]))).astype(np.float32)
        return self._rows(block, role, known_OI.shape), known_OI

    def _rows(self, block: Block, role: Role, shape: tuple[int, ...]) -> Floats:
        prefix = f"block.{self.numbers[block.name]}."
        for name in self.host:
            holder, _, kind = name.rpartition(".")
            roles = holder.removeprefix(prefix).split("+")
            if holder.startswith(prefix) and role in roles and kind in ("codes", "codes_IO", "weight_IO"):
                whole_OI = _decoded(self.host, holder, kind)[:, : shape[1]]
                sizes = [self._num_rows(block, each) for each in roles]
                start = sum(sizes[: roles.index(role)])
                return whole_OI[start : start + shape[0]]
        raise InputError(f"it has no weights for {role}", where=prefix.rstrip("."))

    def _num_rows(self, block: Block, role: str) -> int:
        layers = self.model_map.layers
        return next(each.out_features for each in layers if each.block == block.name and each.role == role)


def audit(recipe: Recipe, *, host: Path, key_file: Path, permutes: Collection[str]) -> tuple[Recovered, ...]:
    """Attack this host; and for comparison the same model in float, and with fewer orders."""
    check_permutes(permutes)
    half = read_half(host, HOST)
    progress = Progress()
    given = resolve(recipe, progress)
    require_decoder(given)
    model_map, recipe = given.model_map, given.recipe
    if half.width != model_map.hidden_size:
        raise InputError(
            f"its features are {half.width} wide, the model's {model_map.hidden_size}",
            where=str(host),
            next_step="name the model that the host was made from",
        )
    key = open_key(key_file, fingerprint(given.source.config, model_map, given.weights))
    found = list(
        attack(model_map, given.weights, host / MODEL_FILE, key, permutes, weights="as given", is_given=True)
    )
    prepared = prepare(given)
    plans = {
        "float32": choose(prepared.model_map, min_dim=NOTHING),
        recipe.scheme: prepared.plan,
    }
    for name, plan in plans.items():
        for chosen in (("residual",), ("residual", "ffn", "values")):
            with tempfile.TemporaryDirectory(prefix="quantkit-") as made:
                weights = in_secret_order(prepared.model_map, prepared.weights, key, chosen)
                side = host_side(prepared.model_map, plan, contents_for(recipe, prepared.model_map, plan))
                write_host(side, weights, Path(made), recipe, recipe.single_file_mb << 20)
                path = Path(made) / MODEL_FILE
                found.extend(attack(model_map, given.weights, path, key, chosen, weights=name))
    discard(prepared)
    return tuple(found)


def attack(
    model_map: ModelMap,
    public: TensorSource,
    path: Path,
    key: Key,
    permutes: Collection[str],
    *,
    weights: str,
    is_given: bool = False,
) -> tuple[Recovered, ...]:
    """What the holder of the public weights finds out about one host's file."""
    seen = _Seen(
        model_map=model_map,
        host=read_blocks(path),
        public=public,
        numbers={block.name: number for number, block in enumerate(model_map.blocks)},
    )
    count = len(model_map.blocks)
    blocks = [model_map.blocks[number] for number in sorted({0, count // 2, count - 1})][:MOST_BLOCKS]
    truth_I = key.order("residual", model_map.hidden_size or 0)
    found_I, sorted_I = _residual(seen, blocks, truth_I, str(path))
    rows = [("residual", len(truth_I), found_I == truth_I, sorted_I == truth_I)]
    rows.extend(_tokens(model_map, public, truth_I, found_I))
    spaces: dict[tuple[str | None, str], Space] = {
        (space.block, space.kind): space for space in require_spaces(model_map)
    }
    for name, kind, role in (
        ("ffn", "ffn_hidden", Role.FFN_UP),
        ("values", "value_heads", Role.ATTENTION_VALUE),
    ):
        right: list[NDArray[np.bool_]] = []
        right_sorted: list[NDArray[np.bool_]] = []
        for block in blocks:
            space = spaces.get((block.name, kind))
            both = seen.both(block, role)
            if name not in permutes or space is None or both is None or "permutation" not in space.permits:
                continue
            truth_O = _truth(key, space)
            # Columns at length one on both sides: the scales that smoothing put in are gone.
            host_OI, known_OI = unit_rows(both[0].T).T, unit_rows(both[1].T).T
            heads = space.head_dim or space.width
            _require_agreement(agreement(host_OI, known_OI[:, truth_I], truth_O), str(path))
            directions = unit_rows(host_OI), unit_rows(known_OI[:, found_I])
            right.append(nearest_in_heads(*directions, heads) == truth_O)
            values = sorted_values(host_OI), sorted_values(known_OI)
            right_sorted.append(nearest_in_heads(*values, heads) == truth_O)
        if right:
            rows.append((name, sum(map(len, right)), np.concatenate(right), np.concatenate(right_sorted)))
    return tuple(
        Recovered(
            weights=weights,
            permutes=tuple(permutes),
            space=name,
            positions=positions,
            by_known_rows=float(by_rows.mean()),
            by_sorted_values=float(by_values.mean()),
            is_given=is_given,
        )
        for name, positions, by_rows, by_values in rows
    )


def _residual(seen: _Seen, blocks: Collection[Block], truth_I: Order, where: str) -> tuple[Order, Order]:
    """(order by columns of queries and keys, order by sorted columns of everything that reads it)."""
    hosts, knowns, sorted_hosts, sorted_knowns = [], [], [], []
    for block in blocks:
        for role in (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.FFN_UP, Role.FFN_GATE):
            both = seen.both(block, role)
            if both is None:
                continue
            columns_IO, known_IO = unit_rows(both[0].T), unit_rows(both[1].T)
            if role in (Role.ATTENTION_QUERY, Role.ATTENTION_KEY):
                hosts.append(columns_IO)
                knowns.append(known_IO)
            sorted_hosts.append(sorted_values(columns_IO))
            sorted_knowns.append(sorted_values(known_IO))
    seen_IF, known_IF = np.concatenate(hosts, axis=1), np.concatenate(knowns, axis=1)
    _require_agreement(agreement(seen_IF, known_IF, truth_I), where)
    by_sorted = nearest(np.concatenate(sorted_hosts, axis=1), np.concatenate(sorted_knowns, axis=1))
    return nearest(seen_IF, known_IF), by_sorted


def _tokens(
    model_map: ModelMap, public: TensorSource, truth_I: Order, found_I: Order
) -> list[tuple[str, int, NDArray[np.bool_], NDArray[np.bool_]]]:
    """Which tokens a prompt's first position had, told from the features that a host is sent for it."""
    tables = {table.kind: table for table in model_map.embeddings}
    table = tables[EmbeddingKind.TOKEN]
    if table.num_columns != len(truth_I):  # a projection stands between the table and the features
        return []
    chances = np.random.default_rng(0)
    ids = np.sort(chances.permutation(table.num_rows)[:MOST_TOKENS])
    name = f"{table.tied_to or table.name}.weight"
    known_VI = np.concatenate([public.read(name, int(token), 1) for token in ids])
    seen_VI = decode_all(round_to_nearest(known_VI, SENT_GRID), known_VI.shape[1])  # as a client's table is
    if EmbeddingKind.POSITION in tables:
        first_I = public.read(f"{tables[EmbeddingKind.POSITION].name}.weight", model_map.position_offset, 1)
        known_VI, seen_VI = known_VI + first_I, seen_VI + first_I
    seen_VI = seen_VI[:, truth_I]
    numbers = np.arange(len(ids))
    by_order = nearest(unit_rows(seen_VI), unit_rows(known_VI[:, found_I])) == numbers
    by_values = nearest(sorted_values(seen_VI), sorted_values(known_VI)) == numbers
    return [("tokens", len(ids), by_order, by_values)]


def _truth(key: Key, space: Space) -> Order:
    """The order that the key gives a space."""
    if space.kind != "value_heads":
        return key.order(space.name, space.width)
    heads = range(space.num_kv_heads)
    parts = [key.order(f"{space.name}/head{head}", space.head_dim) + head * space.head_dim for head in heads]
    return np.concatenate(parts)


def _require_agreement(cosine: float, where: str) -> None:
    """A wrong key or a wrong --permute would look like an attack that failed."""
    if cosine < LEAST_AGREEMENT:
        raise InputError(
            "it is not in the order of this key",
            where=where,
            allowed="the host, the key and the --permute of one 'quantkit protect'",
            next_step="name the key and the --permute that made it",
        )


def _decoded(host: Mapping[str, NDArray[Any]], holder: str, kind: str) -> Floats:
    """Weights as [out, in], in floats."""
    if kind == "weight_IO":
        return np.asarray(host[f"{holder}.weight_IO"].T, np.float32)
    scales = host[f"{holder}.scales"]
    if kind == "codes_IO":
        return np.asarray(host[f"{holder}.codes_IO"].T * scales[:, None], np.float32)
    codes = host[f"{holder}.codes"].astype(np.float32) - middle(8)
    return np.asarray((codes * scales[..., None]).reshape(len(codes), -1), np.float32)
