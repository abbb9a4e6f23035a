"""Recovers the permutation from the public weights: the attack that permuted features must withstand.

Queries and keys of the host are those of the original, because the KV cache is. Their rows therefore stand in
a known order, and each of their columns is found among the public ones by its direction: that is the order of
the residual stream. With this order known, the rows of an FFN and of the values are found by direction too,
and features are found among the public embeddings.

A second attack knows no order at all: it compares sorted values, which a permutation does not change.
Per-channel scales, as smoothing introduces them, are divided out. The key only serves to count correct
positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.export.fused.split import read_blocks
from quantkit.model.model_map import EmbeddingKind, ModelMap, Role
from quantkit.model.weights.tensors import TensorSource
from quantkit.pipeline.stages.export import NOTHING
from quantkit.pipeline.stages.prepare import discard, prepare
from quantkit.pipeline.stages.resolve import resolve
from quantkit.plan.formats import Grid
from quantkit.plan.select import choose
from quantkit.private.files import HOST, read_side
from quantkit.private.keys import Key, open_key
from quantkit.private.protect import (
    check_permutes,
    contents_for,
    fingerprint,
    in_secret_order,
    require_decoder,
    write_host,
)
from quantkit.private.sides import host_side
from quantkit.progress import Progress
from quantkit.quantization.grid import Floats, decode_all, middle
from quantkit.quantization.projections import weight_of
from quantkit.quantization.rounding.rtn import round_to_nearest
from quantkit.quantization.transforms.basis import Order, Space
from quantkit.quantization.transforms.spaces import require_spaces
from quantkit.recipe import Recipe
from quantkit.runtime.graph import MODEL_FILE
from quantkit.runtime.machine.disk import temporary_folder

Correct = NDArray[np.bool_]
MAX_TOKENS = 4096  # drawn from the vocabulary
CLIENT_GRID = Grid(block=128)  # of the embedding table; no client's is coarser
MIN_AGREEMENT = 0.5  # mean cosine of the host's and the public weights in the key's order; less: another key
ROWS_AT_ONCE = 2048
NUM_QUANTILES = 1024  # of sorted values; more add nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """Share of the positions of one kind of space whose original place was found, of 1."""

    weights: str  # "float32", or the scheme
    permutes: tuple[str, ...]
    space: str  # "residual", "ffn" or "values"; "tokens" are the words of a prompt
    positions: int
    by_known_rows: float
    by_sorted_values: float
    is_given: bool = False  # of the folder under audit, not of one made for comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Tensors of a host's file beside the public weights."""

    model_map: ModelMap
    host: Mapping[str, NDArray[Any]]
    public: TensorSource

    def both(self, block: int, role: Role) -> tuple[Floats, Floats] | None:
        """(host's, public) weight of a projection, [out, in]; None where a block has none."""
        block_name = self.model_map.blocks[block].name
        layers = {layer.role: layer for layer in self.model_map.layers if layer.block == block_name}
        if role not in layers:
            return None
        public_OI = weight_of(self.public, layers[role])
        prefix = f"block.{block}."
        for name in self.host:
            pack, _, kind = name.rpartition(".")
            roles = [Role(part) for part in pack.removeprefix(prefix).split("+") if part in layers]
            if pack.startswith(prefix) and role in roles and kind in ("codes", "codes_IO", "weight_IO"):
                start = sum(layers[before].out_features for before in roles[: roles.index(role)])
                host_OI = _decoded(self.host, pack, kind)
                return host_OI[start : start + len(public_OI), : public_OI.shape[1]], public_OI
        raise InputError(f"it has no weights for {role}", where=prefix.rstrip("."))


def audit(recipe: Recipe, *, host: Path, key_file: Path, permutes: Collection[str]) -> tuple[Recovered, ...]:
    """Attacks a host and, for comparison, the same model in float and with the residual permuted alone."""
    check_permutes(permutes)
    width = read_side(host, HOST).width
    progress = Progress()
    given = resolve(recipe, progress)
    require_decoder(given)
    model_map, recipe = given.model_map, given.recipe
    if width != model_map.hidden_size:
        raise InputError(
            f"its features are {width} wide, the model's {model_map.hidden_size}",
            where=str(host),
            next_step="name the model that the host was made from",
        )
    key = open_key(key_file, fingerprint(given.source.config, model_map, given.weights))
    results = [
        *attack(model_map, given.weights, host / MODEL_FILE, key, permutes, weights="as given", is_given=True)
    ]
    prepared = prepare(given)
    plans = {
        "float32": choose(prepared.model_map, min_dim=NOTHING),
        recipe.scheme: prepared.plan,
    }
    for name, plan in plans.items():
        for compared in (("residual",), ("residual", "ffn", "values")):
            with temporary_folder() as folder:
                weights = in_secret_order(prepared.model_map, prepared.weights, key, compared)
                side = host_side(prepared.model_map, plan, contents_for(recipe, prepared.model_map, plan))
                write_host(side, weights, folder, recipe)
                path = folder / MODEL_FILE
                results.extend(attack(model_map, given.weights, path, key, compared, weights=name))
    discard(prepared)
    return tuple(results)


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
    """Recovers permutations from a host's file, in the first, the middle and the last block."""
    both = Weights(model_map=model_map, host=read_blocks(path), public=public)
    count = len(model_map.blocks)
    blocks = sorted({0, count // 2, count - 1})
    order_I = key.order("residual", model_map.hidden_size or 0)
    by_rows_I, by_values_I = _residual_orders(both, blocks, order_I, str(path))
    correct: dict[str, list[tuple[Correct, Correct]]] = {
        "residual": [(by_rows_I == order_I, by_values_I == order_I)],
        "tokens": _tokens(model_map, public, order_I, by_rows_I),
        "ffn": [],
        "values": [],
    }
    spaces: dict[tuple[str | None, str], Space] = {
        (space.block, space.kind): space for space in require_spaces(model_map)
    }
    for name, kind, role in (
        ("ffn", "ffn_hidden", Role.FFN_UP),
        ("values", "value_heads", Role.ATTENTION_VALUE),
    ):
        for block in blocks if name in permutes else ():
            space = spaces.get((model_map.blocks[block].name, kind))
            pair = both.both(block, role)
            if space is None or pair is None or "permutation" not in space.permits:
                continue
            order_O = _order_of(key, space)
            # Columns of unit length on both sides: smoothing scales are gone.
            host_OI, public_OI = (unit_rows(weight_OI.T).T for weight_OI in pair)
            head_dim = space.head_dim or space.width
            _require_agreement(host_OI, public_OI[:, order_I], order_O, str(path))
            by_rows_O = nearest_in_heads(unit_rows(host_OI), unit_rows(public_OI[:, by_rows_I]), head_dim)
            by_values_O = nearest_in_heads(sorted_values(host_OI), sorted_values(public_OI), head_dim)
            correct[name].append((by_rows_O == order_O, by_values_O == order_O))
    return tuple(
        Recovered(
            weights=weights,
            permutes=tuple(permutes),
            space=name,
            positions=sum(len(by_rows) for by_rows, _ in results),
            by_known_rows=float(np.concatenate([by_rows for by_rows, _ in results]).mean()),
            by_sorted_values=float(np.concatenate([by_values for _, by_values in results]).mean()),
            is_given=is_given,
        )
        for name, results in correct.items()
        if results
    )


def _residual_orders(
    both: Weights, blocks: Collection[int], order_I: Order, where: str
) -> tuple[Order, Order]:
    """Orders by the columns of queries and keys, and by the sorted columns of all readers."""
    columns: list[tuple[Floats, Floats]] = []
    values: list[tuple[Floats, Floats]] = []
    for block in blocks:
        for role in (Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.FFN_UP, Role.FFN_GATE):
            pair = both.both(block, role)
            if pair is None:
                continue
            host_IO, public_IO = (unit_rows(weight_OI.T) for weight_OI in pair)
            if role in (Role.ATTENTION_QUERY, Role.ATTENTION_KEY):
                columns.append((host_IO, public_IO))
            values.append((sorted_values(host_IO), sorted_values(public_IO)))
    host_IF, public_IF = (np.concatenate(parts, axis=1) for parts in zip(*columns, strict=True))
    _require_agreement(host_IF, public_IF, order_I, where)
    host_IV, public_IV = (np.concatenate(parts, axis=1) for parts in zip(*values, strict=True))
    return nearest(host_IF, public_IF), nearest(host_IV, public_IV)


def _tokens(
    model_map: ModelMap, public: TensorSource, order_I: Order, by_rows_I: Order
) -> list[tuple[Correct, Correct]]:
    """Tokens recovered from the features that a client sends for the first position of a prompt."""
    tables = {table.kind: table for table in model_map.embeddings}
    table = tables[EmbeddingKind.TOKEN]
    if table.num_columns != len(order_I):  # a projection stands between the table and the features
        return []
    ids = np.sort(np.random.default_rng(0).permutation(table.num_rows)[:MAX_TOKENS])
    name = f"{table.tied_to or table.name}.weight"
    public_VI = np.concatenate([public.read(name, int(token), 1) for token in ids])
    sent_VI = decode_all(round_to_nearest(public_VI, CLIENT_GRID), public_VI.shape[1])
    if EmbeddingKind.POSITION in tables:
        first_I = public.read(f"{tables[EmbeddingKind.POSITION].name}.weight", model_map.position_offset, 1)
        public_VI, sent_VI = public_VI + first_I, sent_VI + first_I
    sent_VI = sent_VI[:, order_I]
    numbers = np.arange(len(ids))
    by_rows = nearest(unit_rows(sent_VI), unit_rows(public_VI[:, by_rows_I])) == numbers
    return [(by_rows, nearest(sorted_values(sent_VI), sorted_values(public_VI)) == numbers)]


def _order_of(key: Key, space: Space) -> Order:
    if space.kind != "value_heads":
        return key.order(space.name, space.width)
    heads = range(space.num_kv_heads)
    parts = [key.order(f"{space.name}/head{head}", space.head_dim) + head * space.head_dim for head in heads]
    return np.concatenate(parts)


def _require_agreement(host_NF: Floats, public_NF: Floats, order: Order, where: str) -> None:
    """Refuses a wrong key or --permute, which would look like a failed attack."""
    cosine = (unit_rows(host_NF) * unit_rows(public_NF[order])).sum(axis=1).mean()
    if cosine < MIN_AGREEMENT:
        raise InputError(
            "it is not in the order of this key",
            where=where,
            allowed="the host, the key and the --permute of one 'quantkit protect'",
            next_step="name the key and the --permute that made it",
        )


def _decoded(host: Mapping[str, NDArray[Any]], pack: str, kind: str) -> Floats:
    """Weight of a pack in float, [out, in]."""
    if kind == "weight_IO":
        return np.asarray(host[f"{pack}.weight_IO"].T, np.float32)
    scales = host[f"{pack}.scales"].astype(np.float32)
    if kind == "codes_IO":
        return np.asarray(host[f"{pack}.codes_IO"].T * scales[:, None], np.float32)
    codes = host[f"{pack}.codes"].astype(np.float32) - middle(8)
    return np.asarray((codes * scales[..., None]).reshape(len(codes), -1), np.float32)


def unit_rows(rows_NF: Floats) -> Floats:
    """Rows at unit length."""
    lengths = np.linalg.norm(rows_NF, axis=1, keepdims=True)
    return np.asarray(rows_NF / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def sorted_values(rows_NF: Floats) -> Floats:
    """Quantiles of every row's magnitudes, at unit length."""
    ordered = np.sort(np.abs(rows_NF), axis=1)
    if ordered.shape[1] > NUM_QUANTILES:
        ordered = ordered[:, np.linspace(0, ordered.shape[1] - 1, NUM_QUANTILES).round().astype(int)]
    return unit_rows(ordered)


def nearest(rows_NF: Floats, known_MF: Floats) -> Order:
    """For each row, the index of the nearest known row."""
    centre = known_MF.mean(axis=0)
    rows, known = (rows_NF - centre).astype(np.float64), (known_MF - centre).astype(np.float64)
    squares = (known * known).sum(axis=1)
    indices = [
        (squares - 2 * rows[start : start + ROWS_AT_ONCE] @ known.T).argmin(axis=1)
        for start in range(0, len(rows), ROWS_AT_ONCE)
    ]
    return np.concatenate(indices).astype(np.int64)


def nearest_in_heads(rows_NF: Floats, known_NF: Floats, head_dim: int) -> Order:
    """For each row, the index of the nearest known row of its head."""
    indices = [
        nearest(rows_NF[start : start + head_dim], known_NF[start : start + head_dim]) + start
        for start in range(0, len(rows_NF), head_dim)
    ]
    return np.concatenate(indices)
