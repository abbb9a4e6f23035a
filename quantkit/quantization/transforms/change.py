"""The one mechanism behind every transform: a basis for each space, which writers absorb and readers undo.

A change that a space forbids raises an error with the reason. A rotation of the residual stream folds its
norms first, because only norms without gain are invariant to it; other changes need no folding.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.model.model_map import ModelMap, Role
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.basis import INPUTS, Basis, Space
from quantkit.quantization.transforms.draft import Draft
from quantkit.quantization.transforms.fold import fold
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.source import Changed
from quantkit.quantization.transforms.spaces import require_permitted, require_spaces


def apply_change(
    model_map: ModelMap,
    source: TensorSource,
    changes: Mapping[str, Basis],
    *,
    unties_head: bool = False,
) -> Changed:
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
    writers, readers_basis = space.writers, basis
    if space.kind == "ffn_hidden" and basis.kind == "diagonal":  # the output of a gate is activated
        gates = [layer.name for layer in draft.layers(writers) if layer.role is Role.FFN_GATE]
        writers = tuple(name for name in writers if name not in gates)
    elif space.kind == "value_heads":
        readers_basis = basis.for_queries(space.head_dim, space.query_group)
        if basis.kind == "head_permutation":
            for layer in draft.layers(space.aligned):
                is_query = layer.role is Role.ATTENTION_QUERY
                draft.write((layer.name,), readers_basis if is_query else basis)
    elif space.kind == "residual" and basis.kind == "permutation":  # a rotation folds the gains before
        draft.write(space.norms, basis)
        draft.write_input_factors(space.readers, basis)
    elif space.kind in INPUTS:
        draft.add_input_factors(space.readers)
        draft.write_input_factors(space.readers, basis)
    draft.write(writers, basis)
    draft.read(space.readers, readers_basis)
