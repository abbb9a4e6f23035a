"""Tokens of pictures: the patches of a picture, row by row, multiplied by one matrix.

The tokens that stand for the whole picture come first; the positions are added to all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from quantkit.export.graph import CONTRIB, Graph
from quantkit.model.model_map import Picture

PIXELS = "pixel_values"


def pixel_input(graph: Graph, picture: Picture) -> str:
    """The input of a batch of pictures; their size is free where positions are stretched to it."""
    size: tuple[int | str, int | str] = ("height", "width") if picture.stretches else picture.size
    return graph.input(PIXELS, TensorProto.FLOAT, ["batch", picture.channels, *size])


def embed_picture(graph: Graph, picture: Picture, project: Callable[[str], str], width: int) -> str:
    """Tokens of the picture with their positions, [batch, tokens, width]."""
    x = project(patches_of(graph, picture))
    if picture.stretches:
        positions = _stretched(graph, picture, width)
    else:
        shape = graph.integers(1, picture.num_tokens, width)
        positions = graph.op("Reshape", graph.weight(picture.positions), shape)
    if picture.first:
        batch = graph.op("Shape", PIXELS, start=0, end=1)
        shape = graph.op("Concat", batch, graph.integers(1, width), axis=0)
        first = [graph.op("Expand", graph.weight(name), shape, name=name) for name in picture.first]
        x = graph.op("Concat", *first, x, axis=1)
    return graph.op("Add", x, positions, name=picture.positions)


def patches_of(graph: Graph, picture: Picture) -> str:
    """Pixels of each patch, [batch, patches, channels * height * width], in the order of its weight.

    What remains of a picture at its lower and right edges is left out.
    """
    (rows, columns), (high, wide), channels = picture.grid, picture.patch, picture.channels
    pixels, num_pixels = PIXELS, channels * high * wide
    if picture.stretches:
        num_rows, num_columns = _grid(graph, picture)
        ends = graph.op("Mul", graph.op("Concat", num_rows, num_columns, axis=0), graph.integers(high, wide))
        pixels = graph.op("Slice", pixels, graph.integers(0, 0), ends, graph.integers(2, 3))
        parts = (
            graph.integers(0, channels),
            num_rows,
            graph.integers(high),
            num_columns,
            graph.integers(wide),
        )
        split, patches = graph.op("Concat", *parts, axis=0), graph.integers(0, -1, num_pixels)
    else:
        if (rows * high, columns * wide) != picture.size:
            ends = graph.integers(rows * high, columns * wide)
            pixels = graph.op("Slice", pixels, graph.integers(0, 0), ends, graph.integers(2, 3))
        split = graph.integers(0, channels, rows, high, columns, wide)
        patches = graph.integers(0, rows * columns, num_pixels)
    by_patch = graph.op("Transpose", graph.op("Reshape", pixels, split), perm=[0, 2, 4, 1, 3, 5])
    return graph.op("Reshape", by_patch, patches)


def _grid(graph: Graph, picture: Picture) -> tuple[str, str]:
    """Rows and columns of patches of a picture of any size, [1] each."""
    sides = [graph.op("Shape", PIXELS, start=axis, end=axis + 1) for axis in (2, 3)]
    rows, columns = (
        graph.op("Div", side, graph.integers(step)) for side, step in zip(sides, picture.patch, strict=True)
    )
    return rows, columns


def _stretched(graph: Graph, picture: Picture, width: int) -> str:
    """Positions of a picture of any size: bicubic between those of patches, as torch interpolates."""
    (rows, columns), num_first = picture.table, len(picture.first)
    table = graph.op("Reshape", graph.weight(picture.positions), graph.integers(1, -1, width))
    first, end = graph.integers(num_first), graph.integers(rows * columns + num_first)
    patches = graph.op("Slice", table, first, end, graph.integers(1))
    grid = graph.op("Reshape", patches, graph.integers(1, rows, columns, width))
    grid = graph.op("Transpose", grid, perm=[0, 3, 1, 2])
    sizes = graph.op("Concat", graph.integers(1, width), *_grid(graph, picture), axis=0)
    grid = graph.op(
        "Resize", grid, "", "", sizes, name=f"{picture.positions}/stretched",
        mode="cubic", cubic_coeff_a=-0.75, coordinate_transformation_mode="half_pixel",
    )  # fmt: skip
    patches = graph.op("Transpose", graph.op("Reshape", grid, graph.integers(1, width, -1)), perm=[0, 2, 1])
    if not num_first:
        return patches
    own = graph.op("Slice", table, graph.integers(0), first, graph.integers(1))
    return graph.op("Concat", own, patches, axis=1)


def probe_tokens(graph: Graph, picture: Picture, x: str, *, width: int, num_heads: int) -> str:
    """Attention of the model's own query to all tokens, [batch, width]."""
    probe, weight, bias = picture.probe_parameters
    weights = graph.ops("Split", graph.weight(weight), wanted=(True,) * 3, axis=0, num_outputs=3)
    biases = graph.ops("Split", graph.weight(bias), wanted=(True,) * 3, axis=0, num_outputs=3)
    batch = graph.op("Shape", PIXELS, start=0, end=1)
    query = graph.op(
        "Expand", graph.weight(probe), graph.op("Concat", batch, graph.integers(1, width), axis=0)
    )
    parts = [
        graph.op("Add", graph.op("MatMul", given, graph.op("Transpose", weight_OI, perm=[1, 0])), bias_O)
        for given, weight_OI, bias_O in zip((query, x, x), weights, biases, strict=True)
    ]
    attended = graph.op(
        "MultiHeadAttention", *parts, name=f"{picture.probe}/attention", domain=CONTRIB, num_heads=num_heads
    )
    return graph.op("Squeeze", attended, graph.integers(1))
