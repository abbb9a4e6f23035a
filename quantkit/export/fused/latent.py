"""Latents of an FFN as outputs of their own: one product, or one for each head of a block-diagonal weight.

A latent is trained beside the FFN and read by no later layer; it is an output where the user keeps it.
Under a block-diagonal weight a head reads only its own inputs: one small product a head divides the bytes by
the number of heads, and everything off the diagonal stays exactly zero. The products read slices of one
stored tensor, whose rows are ordered by head.
"""

from __future__ import annotations

from onnx import TensorProto

from quantkit.export import operators
from quantkit.export.graph import CONTRIB, Graph
from quantkit.model.model_map import Block, Role
from quantkit.quantization.layout import Contents, Pack


def keeps_latents(contents: Contents, block: Block) -> bool:
    return contents.pack_of(Role.FFN_LATENT, block.name) is not None


def add_latents(graph: Graph, contents: Contents, block: Block, hidden: str) -> None:
    """An output `latents.{i}` of [batch, sequence, heads, width], where the block keeps its latents."""
    pack = contents.pack_of(Role.FFN_LATENT, block.name)
    if pack is None:
        return
    heads = pack.layers[0].num_heads
    width = pack.out_features // heads
    if pack.num_groups == 1:
        latents = operators.matmul(graph, pack, hidden)
    elif pack.format is None:
        latents = _float_heads(graph, pack, hidden)
    else:
        latents = _integer_heads(graph, pack, hidden)
    latents = graph.op("Reshape", latents, graph.integers(0, 0, heads, width), name=f"{pack.name}/heads")
    name = f"latents.{block.index}"
    graph.output(latents, name, TensorProto.FLOAT, ["batch", "sequence", heads, width])


def _integer_heads(graph: Graph, pack: Pack, hidden: str) -> str:
    assert pack.format is not None
    grid, heads = pack.format.grid, pack.num_groups
    width = pack.in_features  # of one head
    parts = graph.ops("Split", hidden, graph.integers(*([width] * heads)), wanted=(True,) * heads, axis=-1)
    graph.integer_nodes[pack.name] = [layer.name for layer in pack.layers]
    graph.num_blocks[pack.name] = heads
    products = []
    for head, part in enumerate(parts):
        rows = (head * width, width)
        weights = [graph.weight(f"{pack.name}.codes", rows), graph.scales(pack.name, rows)]
        zeros = "" if grid.is_symmetric else graph.weight(f"{pack.name}.zeros", rows)
        bias = graph.weight(f"{pack.name}.bias", rows) if pack.has_bias else ""
        products.append(
            graph.op(
                "MatMulNBits", part, *weights, zeros, "", bias, name=pack.name, domain=CONTRIB,
                K=width, N=width, bits=grid.bits, block_size=grid.block,
                accuracy_level=operators.INTEGER_ACTIVATIONS,
            )
        )  # fmt: skip
    return graph.op("Concat", *products, axis=-1)


def _float_heads(graph: Graph, pack: Pack, hidden: str) -> str:
    """One batched product: [B, L, H, 1, Z] times [H, Z, Z]."""
    heads, width = pack.num_groups, pack.in_features
    weight = graph.op("Reshape", graph.weight(f"{pack.name}.weight_IO"), graph.integers(width, heads, width))
    weight = graph.op("Transpose", weight, perm=[1, 0, 2])
    rows = graph.op("Reshape", hidden, graph.integers(0, 0, heads, 1, width))
    return graph.op("MatMul", rows, weight, name=pack.name)
