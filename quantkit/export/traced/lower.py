"""Lowering a traced float graph: planned products become the integer operators that emitted graphs have.

A tracer renames and transposes weights as it likes, so a product is recognised by what it multiplies with:
the bytes of its initializer, held against those of every stored matrix and its transpose. Biases are taken
in where they follow at once, embeddings are read from the integer tables, and every file of a model points
to the same checkpoint. A planned projection that is found nowhere is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from quantkit.errors import InputError
from quantkit.export import operators
from quantkit.export.graph import CONTRIB, METADATA_KEY, Graph
from quantkit.plan.targets import Target
from quantkit.quantization.layout import Checkpoint, Contents, Pack, TableEntry

OLDEST_OPSET = 13  # from here on, axes are inputs, as the operators for tables write them
LARGEST_FILE_BYTES = (1 << 31) - 1  # of a protocol buffer
Digest = tuple[tuple[int, ...], bytes]


class Source(Protocol):
    """What is needed of the float weights."""

    def read(self, name: str, start: int = 0, count: int | None = None) -> NDArray[np.float32]:
        """Rows as float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What the bytes of an initializer may be."""

    matrices: Mapping[Digest, tuple[tuple[Pack, ...], ...]]  # [in, out]; several, where values are equal
    tables: Mapping[Digest, TableEntry]


def lower(
    models: Mapping[str, onnx.ModelProto],
    contents: Contents,
    checkpoint: Checkpoint,
    source: Source,
    *,
    target: Target,
    transposed: Mapping[str, bool],
    keeps_weights_outside: bool,
    metadata: Mapping[str, Any],
) -> dict[str, onnx.ModelProto]:
    """The files of one model, by name, with all that is planned in integers.

    `contents` has its packs as they are stored (`contents_of(..., packs_attention=False)`), `source` holds
    the weights that the files were traced with.
    """
    known = known_weights(contents, source, transposed)
    floats = _stored_floats(checkpoint) if keeps_weights_outside else {}
    lowered, done = {}, set()
    for name, model in models.items():
        _require_opset(model, name)
        graph = Graph(checkpoint=checkpoint, keeps_weights_outside=keeps_weights_outside)
        run = _Lowering(graph=graph, model=model, contents=contents, known=known, floats=floats)
        lowered[name] = run.build(target, metadata)
        done |= integer_projections(lowered[name])
        if lowered[name].ByteSize() > LARGEST_FILE_BYTES:
            raise InputError(
                "more than 2 GB of it would stay float inside of one file",
                where=name,
                next_step="lower --min-dim, so that more of it is quantized",
            )
    planned = [layer.name for pack in contents.packs if pack.grid for layer in pack.layers]
    missing = [name for name in dict.fromkeys(planned) if name not in done]
    if missing:
        raise InputError(
            f"{len(missing)} planned projections are not found in the traced graph: {', '.join(missing[:4])}",
            where=", ".join(models),
            next_step="exclude them with --exclude, and report this architecture",
        )
    return lowered


def integer_projections(model: onnx.ModelProto) -> set[str]:
    """The projections that integer nodes of this file compute."""
    properties = {entry.key: entry.value for entry in model.metadata_props}
    owners = json.loads(properties[METADATA_KEY])["integer_nodes"]
    nodes = {node.name for node in model.graph.node if node.domain == CONTRIB}
    return {name for node, names in owners.items() if node in nodes for name in names}


def known_weights(contents: Contents, source: Source, transposed: Mapping[str, bool]) -> Known:
    """Digests of every planned matrix, as [in, out], and of every integer table."""
    packs: dict[str, list[Pack]] = defaultdict(list)
    for pack in contents.packs:
        matrices = {layer.matrix for layer in pack.layers}
        assert len(matrices) == 1, f"{pack.name} is packed from {matrices}"
        packs[matrices.pop()].append(pack)
    matrices_of: dict[Digest, tuple[tuple[Pack, ...], ...]] = defaultdict(tuple)
    for members in packs.values():
        if not any(pack.grid for pack in members):
            continue
        first = members[0].layers[0]
        stored = source.read(f"{first.tied_to or first.matrix}.weight")
        is_transposed = transposed[first.stored_as] and not first.tied_to
        _require_stored_order(members, stored.shape[1 if is_transposed else 0])
        matrices_of[digest_of(stored if is_transposed else stored.T)] += (tuple(members),)
    tables = {
        digest_of(source.read(f"{entry.table.name}.weight")): entry for entry in contents.tables if entry.grid
    }
    return Known(matrices=dict(matrices_of), tables=tables)


def _require_stored_order(members: list[Pack], num_rows: int) -> None:
    rows = [layer.rows for pack in members for layer in pack.layers]
    starts = [row.start for row in rows]
    ends = [row.start + row.total for row in rows]
    assert [*starts, num_rows] == [0, *ends], f"{members[0].name} is not in stored order"


def digest_of(values: NDArray[Any]) -> Digest:
    """What tells one tensor from another: its shape and its bytes."""
    return values.shape, hashlib.blake2b(np.ascontiguousarray(values, np.float32).data).digest()


def _stored_floats(checkpoint: Checkpoint) -> dict[Digest, str]:
    """Float tensors of the checkpoint that a graph may point to instead of holding a copy."""
    return {
        digest_of(checkpoint.read(name)): name
        for name, slot in checkpoint.slots.items()
        if slot.spec.dtype == "F32" and slot.length >= 1024
    }


def _require_opset(model: onnx.ModelProto, name: str) -> None:
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset < OLDEST_OPSET:
        raise InputError(
            f"its operators are of opset {opset}",
            where=name,
            allowed=f"opset {OLDEST_OPSET} or newer",
            next_step="export it again with a newer opset",
        )


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, in its branches too."""
    yield from node.input
    yield from _captures(node)


def _captures(node: onnx.NodeProto) -> Iterator[str]:
    """What only its branches read."""
    for attribute in node.attribute:
        for branch in (attribute.g, *attribute.graphs):
            for inner in branch.node:
                yield from _reads(inner)
            yield from (output.name for output in branch.output)


@dataclass(kw_only=True, slots=True)
class _Lowering:
    graph: Graph
    model: onnx.ModelProto
    contents: Contents
    known: Known
    floats: Mapping[Digest, str]
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    meanings: dict[str, tuple[str, bool]] = field(default_factory=dict)  # value -> initializer, transposed
    readers: dict[str, list[onnx.NodeProto]] = field(default_factory=lambda: defaultdict(list))
    digests: dict[tuple[str, bool], Digest] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    uses: Counter[Digest] = field(default_factory=Counter)
    folded: set[str] = field(default_factory=set)  # outputs that another node already makes

    def build(self, target: Target, metadata: Mapping[str, Any]) -> onnx.ModelProto:
        source = self.model.graph
        self.initializers = {tensor.name: tensor for tensor in source.initializer}
        self.meanings = {name: (name, False) for name in self.initializers}
        shaped = (
            value for value in (*source.input, *source.value_info) if value.type.tensor_type.HasField("shape")
        )
        self.ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in shaped}
        for node in source.node:
            for name in set(_reads(node)):
                self.readers[name].append(node)
            if node.op_type in ("Identity", "Transpose") and node.input[0] in self.meanings:
                name, is_turned = self.meanings[node.input[0]]
                turns = node.op_type == "Transpose" and len(self.initializers[name].dims) == 2
                if turns or node.op_type == "Identity":
                    self.meanings[node.output[0]] = (name, is_turned != turns)
        rules = {"MatMul": self.product, "Gemm": self.product, "Gather": self.gather}
        for node in source.node:
            is_done = node.output[0] in self.folded or (
                node.op_type in rules and not node.domain and rules[node.op_type](node)
            )
            if not is_done:
                kept = onnx.NodeProto()
                kept.CopyFrom(node)
                # A tracer stores equal tensors once and names the others by Identity; those names are the
                # checkpoint's, and would stand twice in the graph.
                for index, name in enumerate(kept.input):
                    stored, is_turned = self.meanings.get(name, (name, False))
                    kept.input[index] = name if is_turned else stored
                self.graph.nodes.append(kept)
        return self.finish(target, metadata)

    def digest(self, value: str, *, turned: bool = False) -> Digest | None:
        """The digest of a constant float matrix, or of its transpose."""
        if value not in self.meanings:
            return None
        name, is_turned = self.meanings[value]
        tensor, is_turned = self.initializers[name], is_turned != turned
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) != 2:
            return None
        if (name, is_turned) not in self.digests:
            values = numpy_helper.to_array(tensor)
            self.digests[name, is_turned] = digest_of(values.T if is_turned else values)
        return self.digests[name, is_turned]

    def product(self, node: onnx.NodeProto) -> bool:
        """Replace one product, and the sum with its bias that follows."""
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        digest = self.digest(node.input[1], turned=bool(attributes.get("transB")))
        candidates = self.known.matrices.get(digest, ()) if digest else ()
        if digest is None or not candidates:
            return False
        if attributes.get("transA") or {attributes.get("alpha", 1.0), attributes.get("beta", 1.0)} != {1.0}:
            return False
        packs = candidates[self.uses[digest] % len(candidates)]
        self.uses[digest] += 1
        bias, made = self.bias_of(node)
        takes_bias = bias is not None and self.is_bias_of(packs, bias)
        parts = [operators.matmul(self.graph, _with_bias(pack, takes_bias), node.input[0]) for pack in packs]
        if len(parts) > 1:
            self.graph.op("Concat", *parts, axis=-1)
        if takes_bias:
            self.folded.add(made)
        else:
            made = node.output[0]
            if len(node.input) > 2:  # a Gemm whose last input is no bias of this matrix
                self.graph.op("Add", self.graph.nodes[-1].output[0], node.input[2])
        self.graph.nodes[-1].output[0] = made
        return True

    def bias_of(self, node: onnx.NodeProto) -> tuple[NDArray[Any] | None, str]:
        """(the vector added to a product, the name of the sum)."""
        if len(node.input) > 2:
            return self.vector(node.input[2]), node.output[0]
        outputs = {output.name for output in self.model.graph.output}
        following = self.readers[node.output[0]]
        if len(following) != 1 or following[0].op_type != "Add" or node.output[0] in outputs:
            return None, ""
        others = [name for name in following[0].input if name != node.output[0]]
        return (self.vector(others[0]) if others else None), following[0].output[0]

    def vector(self, value: str) -> NDArray[Any] | None:
        tensor = self.initializers.get(self.meanings.get(value, ("", False))[0])
        return numpy_helper.to_array(tensor) if tensor is not None and len(tensor.dims) == 1 else None

    def is_bias_of(self, packs: tuple[Pack, ...], bias: NDArray[Any]) -> bool:
        if not all(pack.has_bias for pack in packs):
            return False
        stored = np.concatenate([self.graph.checkpoint.read(f"{pack.name}.bias") for pack in packs])
        return np.array_equal(stored, bias)

    def gather(self, node: onnx.NodeProto) -> bool:
        """Read rows from the integer table."""
        digest = self.digest(node.input[0])
        entry = self.known.tables.get(digest) if digest else None
        axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
        if entry is None or axis != 0:
            return False
        graph, ids = self.graph, node.input[1]
        if self.ranks.get(ids) == 2:  # as tables are read: [batch, sequence]
            operators.lookup(graph, entry, ids)
        else:
            rows = operators.lookup(graph, entry, graph.op("Reshape", ids, graph.integers(1, -1)))
            columns = graph.integers(entry.table.num_columns)
            graph.op("Reshape", rows, graph.op("Concat", graph.op("Shape", ids), columns, axis=0))
        graph.nodes[-1].output[0] = node.output[0]
        return True

    def finish(self, target: Target, metadata: Mapping[str, Any]) -> onnx.ModelProto:
        """The model, without what nothing reads any more."""
        source, graph = self.model.graph, self.graph
        own = [node for node in graph.nodes if node.output[0] not in graph.initializers]
        nodes = _used_nodes(own, {output.name for output in source.output})
        used = {name for node in nodes for name in _reads(node)}
        captured = {name for node in nodes for name in _captures(node)}
        moved = self.moved(used - captured)
        for node in nodes:
            for index, name in enumerate(node.input):
                node.input[index] = moved.get(name, name)
        kept = [tensor for name, tensor in self.initializers.items() if name in used and name not in moved]
        names = {tensor.name for tensor in kept}
        made = [tensor for name, tensor in graph.initializers.items() if name not in names]
        lowered = helper.make_graph(nodes, source.name, source.input, source.output, [*kept, *made])
        opsets = [each for each in self.model.opset_import if each.domain != CONTRIB]
        model = helper.make_model(
            lowered,
            producer_name="quantkit",
            ir_version=target.ir_version,
            opset_imports=[*opsets, helper.make_opsetid(CONTRIB, 1)],
            functions=self.model.functions,
        )
        described = {**metadata, "integer_nodes": graph.projections()}
        helper.set_model_props(model, {METADATA_KEY: json.dumps(described, sort_keys=True)})
        return model

    def moved(self, names: set[str]) -> dict[str, str]:
        """Float initializers that the checkpoint holds too -> its name for them."""
        found = {}
        for name in sorted(names & set(self.initializers)) if self.floats else ():
            tensor = self.initializers[name]
            if tensor.data_type == TensorProto.FLOAT and (
                stored := self.floats.get(digest_of(numpy_helper.to_array(tensor)))
            ):
                found[name] = self.graph.weight(stored)
        return found


def _with_bias(pack: Pack, takes_bias: bool) -> Pack:
    if takes_bias or not pack.has_bias:
        return pack
    return replace(pack, layers=tuple(replace(layer, has_bias=False) for layer in pack.layers))


def _used_nodes(nodes: list[onnx.NodeProto], wanted: set[str]) -> list[onnx.NodeProto]:
    """The nodes that the outputs depend on, in order."""
    used, kept = set(wanted), []
    for node in reversed(nodes):
        if used.intersection(node.output):
            kept.append(node)
            used.update(_reads(node))
    return kept[::-1]
