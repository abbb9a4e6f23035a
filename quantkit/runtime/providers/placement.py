"""Which provider runs which node of a graph, and what share of the products, by the runtime's own word.

onnxruntime keeps a record of what each provider took (`session.record_ep_graph_assignment_info`, from 1.24
on). It lists the nodes of the graph as the providers were offered it, before any of them fused what it took,
so a compiled part of a hundred nodes counts as a hundred and an operator that fell back keeps its name.

A share of nodes says little: one projection works more than all reshapes together. So each node's MACs are
counted too, from the shapes that onnxruntime's profiler notes while the CPU runs the same file once. That
needs no parser of ONNX files here and holds for free sizes too. What is counted are products of matrices,
attention and convolutions; everything else is nothing beside them.

Why a provider left a node is in no record. Some say it in their verbose log, which is read here.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.runtime.graph import TYPES
from quantkit.runtime.providers.table import Provider, open_on


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedOperator:
    """How many nodes of one operator a provider runs."""

    operator: str
    provider: str
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnplacedNode:
    """A node that the asked provider left to the CPU."""

    operator: str
    name: str
    layer: str | None = None  # of the model; None for a node that belongs to none
    reason: str | None = None  # where the runtime says


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How much of the graph one provider runs."""

    provider: str
    node_fraction: float
    mac_fraction: float | None = None
    num_nodes: int | None = None  # of the graph as it was shared out, before anything was fused
    operators: tuple[PlacedOperator, ...] | None = None  # None here and below: taken for granted, not read
    unplaced: tuple[UnplacedNode, ...] | None = None  # what it left to the CPU


RECORD = "session.record_ep_graph_assignment_info"
NUM_TOKENS = 8  # of the text that the CPU reads once to tell all shapes, where the graph leaves that free
# A plain product: every output value is a sum over the rows of the second factor.
PRODUCTS = frozenset(
    (
        "MatMul", "Gemm", "FusedMatMul", "FusedGemm", "MatMulNBits", "MatMulInteger", "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm", "MatMulBnb4", "MatMulFpQ4",
    )
)  # fmt: skip
COUNTED = PRODUCTS | {"GroupQueryAttention", "MultiHeadAttention", "Attention", "Conv", "QLinearConv"}

Shape = list[int]
Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assigned:
    """One file's nodes: each with its operator, the provider that took it, and its MACs."""

    nodes: tuple[tuple[str, str, str], ...]  # name, operator, provider
    macs: Mapping[str, int]  # by node name; empty where the CPU could not run the file


def record_options(*, threads: int, verbose: bool = False) -> onnxruntime.SessionOptions:
    """Options of a session that remembers who took what."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 0 if verbose else 3
    options.add_session_config_entry(RECORD, "1")
    return options


def assigned(session: onnxruntime.InferenceSession, macs: Mapping[str, int]) -> Assigned:
    """What a session that was opened with `record_options` remembers."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise RuntimeError(
            f"onnxruntime {onnxruntime.__version__} keeps no record of placement: "
            "pip install 'onnxruntime>=1.24'"
        )
    parts = session.get_provider_graph_assignment_info()
    nodes = tuple((node.name, node.op_type, part.ep_name) for part in parts for node in part.get_nodes())
    return Assigned(nodes=nodes, macs=macs)


def placement_of(
    provider: Provider, files: Sequence[Assigned], reasons: Mapping[str, str] | None = None
) -> Placement:
    """What the provider runs of all files together."""
    nodes = [node for each in files for node in each.nodes]
    is_placed = [owner == provider.onnxruntime_name for _, _, owner in nodes]
    counts = Counter((operator, owner) for _, operator, owner in nodes)
    return Placement(
        provider=provider.onnxruntime_name,
        node_fraction=sum(is_placed) / len(nodes) if nodes else 1.0,
        mac_fraction=_mac_fraction(provider, files),
        num_nodes=len(nodes),
        operators=tuple(
            PlacedOperator(operator=operator, provider=owner, num_nodes=count)
            for (operator, owner), count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))
        ),
        unplaced=tuple(
            UnplacedNode(
                operator=operator, name=name, layer=layer_of(name, operator), reason=(reasons or {}).get(name)
            )
            for (name, operator, _), placed in zip(nodes, is_placed, strict=True)
            if not placed
        ),
    )


def _mac_fraction(provider: Provider, files: Sequence[Assigned]) -> float | None:
    """None where a file's shapes are unknown, or where two providers share products under unknown names."""
    total = placed = 0
    for each in files:
        of_file = sum(each.macs.values())
        if not of_file:
            return None
        by_owner: Counter[str] = Counter()
        nameless: set[str] = set()  # who holds products that the optimiser has renamed
        for name, operator, owner in each.nodes:
            if name in each.macs:
                by_owner[owner] += each.macs[name]
            elif operator in COUNTED:
                nameless.add(owner)
        rest = of_file - by_owner.total()
        if rest and len(nameless) != 1:
            return None
        for owner in nameless:
            by_owner[owner] += rest
        total += of_file
        placed += by_owner[provider.onnxruntime_name]
    return placed / total if total else None


def layer_of(name: str, operator: str) -> str | None:
    """The layer that a node belongs to: its name, less what the writer of the graph put behind it."""
    if not name or re.fullmatch(rf"{re.escape(operator)}(_\w+)?", name):
        return None
    if name.startswith("/"):  # a tracer's: a path of modules, and the operator at its end
        return ".".join(name.split("/")[1:-1]) or None
    return name.split("/", maxsplit=1)[0]


def read_macs(path: Path, *, num_tokens: int = NUM_TOKENS) -> dict[str, int]:
    """MACs of every product by node name, for one text; empty where the CPU cannot run the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # The level at which graphs are shared out; above it, the CPU's own fusions would rename nodes.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.enable_profiling = True
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        options.profile_file_prefix = str(Path(folder) / "shapes")
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            session.run(None, feeds_of(session, num_tokens=num_tokens))
        except Exception:  # compiled for another provider, or types that the CPU has no kernels for
            return {}
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    macs: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            count = _macs(event["args"])
            if count:
                macs[event["name"].removesuffix("_kernel_time")] += count
    return dict(macs)


def _macs(event: Mapping[str, Any]) -> int:
    """Multiplications and additions of one node, from the shapes that went in and came out."""
    operator = event["op_name"]
    if operator not in COUNTED:
        return 0
    inputs: list[Shape]
    outputs: list[Shape]
    inputs, outputs = (
        [shape for each in event[f"{side}_type_shape"] for shape in each.values()]
        for side in ("input", "output")
    )
    if operator in PRODUCTS:
        first, out = inputs[0], outputs[0]
        summed = (
            math.prod(first[-2:]) // out[-2] if len(first) > 1 and len(out) > 1 and out[-2] else first[-1]
        )
        return math.prod(out) * int(summed)
    if operator in ("Conv", "QLinearConv"):
        weight = inputs[1 if operator == "Conv" else 3]
        return math.prod(outputs[0]) * math.prod(weight[1:])
    return _attention_macs(operator, inputs, outputs)


def _attention_macs(operator: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Queries by keys and weights by values, over all keys; masks leave work out that is counted here."""
    if operator == "GroupQueryAttention":
        num_keys = outputs[1][2] if len(outputs) > 1 else inputs[0][1]
        return 2 * math.prod(outputs[0]) * num_keys
    if operator == "Attention" and len(inputs[1]) == 2:  # onnxruntime's own, which multiplies the weights too
        rows, (width, num_columns) = math.prod(inputs[0][:-1]), inputs[1]
        return rows * width * num_columns + 2 * math.prod(outputs[0]) * inputs[0][1]
    return 2 * math.prod(outputs[0]) * inputs[1][-2]


def feeds_of(
    session: onnxruntime.InferenceSession,
    *,
    num_tokens: int = NUM_TOKENS,
    ids: NDArray[np.int64] | None = None,
) -> Feeds:
    """Whatever the graph declares, for one text: `ids` [1, S] where given, and empty caches where it may."""
    inputs = session.get_inputs()
    fixed = [
        each.shape[-1] for each in inputs if each.name == "input_ids" and isinstance(each.shape[-1], int)
    ]
    count = ids.shape[1] if ids is not None else fixed[0] if fixed else num_tokens
    feeds: Feeds = {}
    for each in inputs:
        is_past = each.name.startswith("past")
        shape = [
            size
            if isinstance(size, int)
            else 1
            if axis == 0
            else 0
            if is_past and "past" in str(size)
            else count
            for axis, size in enumerate(each.shape)
        ]
        kind = TYPES.get(each.type)
        if kind is None:
            raise ValueError(f"input {each.name} has the type {each.type}")
        if each.name in ("input_ids", "decoder_input_ids"):
            feeds[each.name] = np.ones(shape, kind)
            if ids is not None:  # a shorter text than the graph takes stands at its beginning
                feeds[each.name][:, :count] = ids[:, : shape[1]]
        elif each.name == "attention_mask":
            feeds[each.name] = np.ones(shape, kind)
            if ids is not None and len(shape) == 2:
                feeds[each.name][:, count:] = 0
        elif each.name == "logit_position":
            feeds[each.name] = np.full(shape, count - 1, kind)
        elif each.name == "position_ids":
            feeds[each.name] = np.ascontiguousarray(np.broadcast_to(np.arange(shape[-1], dtype=kind), shape))
        else:
            feeds[each.name] = np.zeros(shape, kind)
    for each in session.get_overridable_initializers():
        if each.name == "num_logits" and ids is not None:
            feeds[each.name] = np.array([count], TYPES[each.type])
    return feeds


def read_reasons(provider: Provider, path: Path, *, threads: int) -> dict[str, str]:
    """Why nodes were left, by node name, as far as the provider's verbose log says."""
    with _caught_errors() as log:
        try:
            open_on(provider, str(path), record_options(threads=threads, verbose=True))
        except Exception:  # the log up to there is as good
            return reasons_in(log())
        return reasons_in(log())


def reasons_in(log: str) -> dict[str, str]:
    """QNN's form: the nodes of a group, each on a line of its own, and then one reason for them all."""
    reasons: dict[str, str] = {}
    names: list[str] = []
    for line in log.splitlines():
        found = re.search(r"Operator type:\s*\S+\s+Node name:\s*(\S+)\s+Node index:", line)
        if found:
            names.append(found.group(1))
        elif line.strip().startswith("REASON"):
            reason = " ".join(line.partition(":")[2].split())
            # A sentence that only repeats a node's name would keep like reasons apart.
            named = "|".join(map(re.escape, names))
            alike = re.sub(rf"\.?[^.`]*`(?:{named})`.*$", "", reason) if names else reason
            for name in names:
                reasons.setdefault(name, alike.strip(" .") or reason)
            names = []
        elif line.strip():
            names = []
    return reasons


@contextmanager
def _caught_errors() -> Iterator[Callable[[], str]]:
    """What native code writes to standard error meanwhile, which no Python stream sees."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)

        def text() -> str:
            file.seek(0)
            return file.read().decode("utf-8", errors="replace")

        try:
            yield text
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def place(provider: Provider, paths: Sequence[Path], *, threads: int = 1) -> Placement:
    """Open each file on the provider and ask who took what; reasons are read where something was left."""
    files = [
        assigned(open_on(provider, str(path), record_options(threads=threads)), read_macs(path))
        for path in paths
    ]
    return explained(placement_of(provider, files), provider, paths, threads=threads)


def explained(placement: Placement, provider: Provider, paths: Sequence[Path], *, threads: int) -> Placement:
    """The same with reasons, for which every file is opened once more."""
    if not placement.unplaced:
        return placement
    reasons: dict[str, str] = {}
    for path in paths:
        reasons = read_reasons(provider, path, threads=threads) | reasons
    unplaced = tuple(replace(node, reason=reasons.get(node.name)) for node in placement.unplaced)
    return replace(placement, unplaced=unplaced)
