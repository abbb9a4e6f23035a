"""Placement: which provider runs which node of a graph, and its share of the MACs, as onnxruntime records it.

onnxruntime records the nodes that each provider took (`session.record_ep_graph_assignment_info`, from 1.24
on), as they were before any provider fused them. So a compiled part of a hundred nodes counts as a hundred,
and an operator that fell back to the CPU keeps its name.

A share of nodes says little: one projection works more than all reshapes together. So the MACs of each node
are counted too, from the shapes that onnxruntime's profiler notes while the CPU runs the file once. That
needs no parser of ONNX files and holds for free sizes. Counted are matrix products, attention and
convolutions; everything else is nothing beside them.

No record gives the reason for a node that fell back. Some providers give it in their verbose log.
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

from quantkit.files import reading
from quantkit.runtime.graph import TYPES
from quantkit.runtime.machine.disk import OTHER_TEMPORARY, temporary_folder
from quantkit.runtime.providers.table import Provider, open_on


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedOperator:
    """Nodes of one operator on one provider."""

    operator: str
    provider: str
    num_nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnplacedNode:
    """A node that fell back to the CPU."""

    operator: str
    name: str
    layer: str | None = None  # of the model; None where the node belongs to no layer
    reason: str | None = None  # from the provider's log


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The part of a graph that one provider runs."""

    provider: str
    node_fraction: float
    mac_fraction: float | None = None
    num_nodes: int | None = None  # of the graph before any provider fused nodes
    operators: tuple[PlacedOperator, ...] | None = None  # None here and below: not read
    unplaced: tuple[UnplacedNode, ...] | None = None  # nodes left to the CPU


RECORD = "session.record_ep_graph_assignment_info"
NUM_TOKENS = 8  # of the text that the CPU reads once for its shapes, where the graph leaves the length free
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
    """Options of a session that records its placement."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 0 if verbose else 3
    options.add_session_config_entry(RECORD, "1")
    return options


def assigned(session: onnxruntime.InferenceSession, macs: Mapping[str, int]) -> Assigned:
    """The record of a session that was opened with `record_options`."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        raise RuntimeError(
            f"onnxruntime {onnxruntime.__version__} keeps no record of placement: "
            "pip install 'onnxruntime>=1.24'"
        )
    parts = session.get_provider_graph_assignment_info()
    nodes = tuple((node.name, node.op_type, part.ep_name) for part in parts for node in part.get_nodes())
    return Assigned(nodes=nodes, macs=macs)


def placement_of(provider: Provider, files: Sequence[Assigned]) -> Placement:
    """Placement of all files together."""
    nodes = [node for file in files for node in file.nodes]
    is_placed = [owner == provider.onnxruntime_name for _, _, owner in nodes]
    counts = Counter((operator, owner) for _, operator, owner in nodes)
    return Placement(
        provider=provider.onnxruntime_name,
        node_fraction=sum(is_placed) / len(nodes) if nodes else 1.0,
        mac_fraction=_mac_fraction(provider, files),
        num_nodes=len(nodes),
        operators=tuple(
            PlacedOperator(operator=operator, provider=owner, num_nodes=count)
            for (operator, owner), count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ),
        unplaced=tuple(
            UnplacedNode(operator=operator, name=name, layer=layer_of(name, operator))
            for (name, operator, _), placed in zip(nodes, is_placed, strict=True)
            if not placed
        ),
    )


def _mac_fraction(provider: Provider, files: Sequence[Assigned]) -> float | None:
    """None where the shapes of a file are unknown, or where two providers own renamed products."""
    total = placed = 0
    for file in files:
        of_file = sum(file.macs.values())
        if not of_file:
            return None
        by_owner: Counter[str] = Counter()
        nameless: set[str] = set()  # owners of products that the optimiser has renamed
        for name, operator, owner in file.nodes:
            if name in file.macs:
                by_owner[owner] += file.macs[name]
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
    """The layer that a node belongs to: its name without the suffix of the exporter."""
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
    with temporary_folder() as folder:
        options.profile_file_prefix = str(folder / "shapes")
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            session.run(None, feeds_of(session, num_tokens=num_tokens))
        except Exception:  # compiled for another provider, or types that the CPU has no kernels for
            return {}
        # onnxruntime writes the profile without a word where the disk is full.
        with reading(folder, "the profile of onnxruntime is cut off", next_step=OTHER_TEMPORARY):
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    macs: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            count = _macs(event["args"])
            if count:
                macs[event["name"].removesuffix("_kernel_time")] += count
    return dict(macs)


def _macs(event: Mapping[str, Any]) -> int:
    """MACs of one node, from the shapes of its inputs and outputs."""
    operator = event["op_name"]
    if operator not in COUNTED:
        return 0
    inputs: list[Shape]
    outputs: list[Shape]
    inputs, outputs = (
        [shape for typed in event[f"{side}_type_shape"] for shape in typed.values()]
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
    """Queries by keys and weights by values, over all keys, masked ones too."""
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
    """Every input that the graph declares, for one text: `ids` [1, S] where given, and empty caches."""
    inputs = session.get_inputs()
    fixed = [
        value.shape[-1] for value in inputs if value.name == "input_ids" and isinstance(value.shape[-1], int)
    ]
    count = ids.shape[1] if ids is not None else fixed[0] if fixed else num_tokens
    feeds: Feeds = {}
    for value in inputs:
        is_past = value.name.startswith("past")
        shape = [
            size if isinstance(size, int) else 1 if axis == 0 else 0 if is_past and "past" in size else count
            for axis, size in enumerate(value.shape)
        ]
        kind = TYPES.get(value.type)
        if kind is None:
            raise ValueError(f"input {value.name} has the type {value.type}")
        if value.name in ("input_ids", "decoder_input_ids"):
            feeds[value.name] = np.ones(shape, kind)
            if ids is not None:  # a shorter text than the graph takes stands at its beginning
                feeds[value.name][:, :count] = ids[:, : shape[1]]
        elif value.name == "attention_mask":
            feeds[value.name] = np.ones(shape, kind)
            if ids is not None and len(shape) == 2:
                feeds[value.name][:, count:] = 0
        elif value.name == "logit_position":
            feeds[value.name] = np.full(shape, count - 1, kind)
        elif value.name == "position_ids":
            feeds[value.name] = np.ascontiguousarray(np.broadcast_to(np.arange(shape[-1], dtype=kind), shape))
        else:
            feeds[value.name] = np.zeros(shape, kind)
    if ids is not None and not fixed and _has_one_position(session):
        feeds["attention_mask"] *= count  # the number of positions with logits
    return feeds


def _has_one_position(session: onnxruntime.InferenceSession) -> bool:
    """Whether the graph declares logits of one position, as fused decoders do."""
    return any(value.name == "logits" and value.shape[1:2] == [1] for value in session.get_outputs())


def read_reasons(provider: Provider, path: Path, *, threads: int) -> dict[str, str]:
    """Reasons of nodes that fell back, by node name, from the provider's verbose log."""
    with _caught_errors() as log:
        try:
            open_on(provider, str(path), record_options(threads=threads, verbose=True))
        except Exception:  # the log up to there is as good
            return reasons_in(log())
        return reasons_in(log())


def reasons_in(log: str) -> dict[str, str]:
    """QNN's log: the nodes of a group, each on a line of its own, then one reason for them all."""
    reasons: dict[str, str] = {}
    names: list[str] = []
    for line in log.splitlines():
        match = re.search(r"Operator type:\s*\S+\s+Node name:\s*(\S+)\s+Node index:", line)
        if match:
            names.append(match.group(1))
        elif line.strip().startswith("REASON"):
            reason = " ".join(line.partition(":")[2].split())
            # A sentence with a node's name in it would make equal reasons differ.
            patterns = "|".join(map(re.escape, names))
            alike = re.sub(rf"\.?[^.`]*`(?:{patterns})`.*$", "", reason) if names else reason
            for name in names:
                reasons.setdefault(name, alike.strip(" .") or reason)
            names = []
        elif line.strip():
            names = []
    return reasons


@contextmanager
def _caught_errors() -> Iterator[Callable[[], str]]:
    """The standard error of native code, which no Python stream sees."""
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
    """Open each file on the provider; reasons are read where nodes fell back."""
    files = [
        assigned(open_on(provider, str(path), record_options(threads=threads)), read_macs(path))
        for path in paths
    ]
    return explained(placement_of(provider, files), provider, paths, threads=threads)


def explained(placement: Placement, provider: Provider, paths: Sequence[Path], *, threads: int) -> Placement:
    """The placement with reasons, for which every file is opened once more."""
    if not placement.unplaced:
        return placement
    reasons: dict[str, str] = {}
    for path in paths:
        reasons = read_reasons(provider, path, threads=threads) | reasons
    unplaced = tuple(replace(node, reason=reasons.get(node.name)) for node in placement.unplaced)
    return replace(placement, unplaced=unplaced)
