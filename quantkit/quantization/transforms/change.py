"""The one mechanism behind every transform: a basis for each space, which writers absorb and readers undo.

A change that a space forbids raises an error with the reason. A rotation of the residual stream folds its
norms first, because only norms without gain are invariant to it; other changes need no folding.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.model.model_map import ModelMap, Role
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.basis import Basis, Space
from quantkit.quantization.transforms.draft import Draft
from quantkit.quantization.transforms.fold import fold
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.source import TransformedTensors
from quantkit.quantization.transforms.spaces import require_permitted, require_spaces


def apply_change(
    model_map: ModelMap,
    source: TensorSource,
    changes: Mapping[str, Basis],
    *,
    unties_head: bool = False,
) -> tuple[ModelMap, TransformedTensors]:
    """The model with each named space in another basis; tensors are computed when they are read."""
    spaces = {space.name: space for space in require_spaces(model_map)}
    for name, basis in changes.items():
        space = require_permitted(model_map, spaces, name, basis.kind, unties_head=unties_head)
        assert basis.width == space.width, f"{name} is {space.width} wide, the change {basis.width}"
    residual = spaces["residual"]
    if "residual" in changes and changes["residual"].kind == "orthogonal":
        settings = TransformSettings(unties_head=unties_head)
        model_map, source = fold(model_map, source, settings, norms=residual.norms)
    draft = Draft(model_map, source)
    if any(basis.kind not in spaces[name].permits for name, basis in changes.items()) and any(
        layer.tied_to for layer in model_map.layers
    ):
        draft.untie_head()
    for name, basis in changes.items():
        _put(draft, spaces[name], basis)
    return draft.finish()


def _put(draft: Draft, space: Space, basis: Basis) -> None:
    writers, readers = draft.layers(space.writers), draft.layers(space.readers)
    if space.kind == "norm_output":
        norm = next(norm for norm in draft.map.norms if norm.name == space.name)
        draft.write_norm(norm, basis)
        draft.read(readers, basis)
    elif space.kind == "ffn_hidden":
        for layer in writers:
            if not (basis.kind == "diagonal" and layer.role is Role.FFN_GATE):  # its output is activated
                draft.write(layer, basis)
        draft.read(readers, basis)
    elif space.kind == "value_heads":
        _put_in_heads(draft, space, basis)
    else:
        _put_in_stream(draft, space, basis)


def _put_in_heads(draft: Draft, space: Space, basis: Basis) -> None:
    for_queries = basis.for_queries(space.head_dim, space.query_group)
    for layer in draft.layers(space.writers):
        draft.write(layer, basis)
    if basis.kind == "head_permutation":
        for layer in draft.layers(space.aligned):
            draft.write(layer, for_queries if layer.role is Role.ATTENTION_QUERY else basis)
    draft.read(draft.layers(space.readers), for_queries)


def _put_in_stream(draft: Draft, space: Space, basis: Basis) -> None:
    for table in draft.map.embeddings:
        if table.name in space.writers:
            draft.write_table(table, basis)
    for layer in draft.layers(space.writers):
        draft.write(layer, basis)
    if basis.kind == "permutation":  # before a rotation the gains were folded, and are one
        for norm in draft.map.norms:
            if norm.name in space.norms:
                draft.write_norm(norm, basis)
    # A tied head reads the table, which is in the new basis already.
    draft.read([layer for layer in draft.layers(space.readers) if not layer.tied_to], basis)
