"""One projection by itself, for tests of what is done to a single matrix."""

from __future__ import annotations

from quantkit.model.model_map import Layer, Role, Rows


def one_layer(
    out_features: int,
    in_features: int,
    rows: Rows | None = None,
    *,
    name: str = "w",
    matrix: str | None = None,
    role: Role = Role.OTHER,
    has_bias: bool = False,
    stored_as: str = "linear",
) -> Layer:
    """Rows of a matrix, by default all of one that bears the projection's name."""
    return Layer(
        name=name,
        role=role,
        in_features=in_features,
        out_features=out_features,
        has_bias=has_bias,
        matrix=matrix or name,
        rows=rows or Rows(start=0, length=out_features, stride=out_features),
        stored_as=stored_as,
    )
