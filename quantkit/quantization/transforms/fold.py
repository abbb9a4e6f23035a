"""Folding norms: gains and biases go into the projections that read the norms.

A layer norm also subtracts the mean of the residual stream. Where every writer of the stream subtracts the
mean of its own output, the sum has no mean and the layer norm is an RMS norm, which permits rotations.
https://arxiv.org/abs/2401.15024, section 3
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from quantkit.model.model_map import ModelMap, Norm, NormKind
from quantkit.model.weights.tensors import TensorSource
from quantkit.quantization.transforms.basis import Centring, Diagonal, Space
from quantkit.quantization.transforms.draft import Draft
from quantkit.quantization.transforms.settings import DEFAULT, TransformSettings
from quantkit.quantization.transforms.source import Changed
from quantkit.quantization.transforms.spaces import no_space, require_permitted, require_spaces


def fold(
    model_map: ModelMap,
    source: TensorSource,
    settings: TransformSettings = DEFAULT,
    norms: Collection[str] | None = None,
) -> Changed:
    """Fold these norms, or all that only linears read; layer norms become RMS norms where all of them can."""
    spaces = require_spaces(model_map)
    outputs = {space.name: space for space in spaces if space.kind == "norm_output"}
    residual = next(space for space in spaces if space.kind == "residual")
    foldable = [name for name, space in outputs.items() if "diagonal" in space.permits | space.permits_untied]
    chosen = foldable if norms is None else norms
    if not chosen:
        reason = next(iter(outputs.values())).forbidden["diagonal"]
        raise no_space(model_map, f"no norm can be folded: {reason}")
    for name in chosen:
        require_permitted(model_map, outputs, name, "diagonal", unties_head=settings.unties_head)
    by_name = {norm.name: norm for norm in model_map.norms}
    draft = Draft(model_map, source)
    if any("diagonal" not in outputs[name].permits for name in chosen):
        draft.untie_head()
    centres = (
        "orthogonal" in residual.permits | residual.permits_untied
        and set(residual.norms) <= set(chosen)
        and any(by_name[name].kind is NormKind.LAYER_NORM for name in residual.norms)
    )
    for name in chosen:
        _fold_one(draft, by_name[name], outputs[name], as_rms=centres and name in residual.norms)
    if centres:
        draft.write(residual.writers, Centring(width=residual.width))
        blocks = tuple(replace(block, norm_kind=NormKind.RMS_NORM) for block in draft.map.blocks)
        draft.map = replace(draft.map, blocks=blocks)
    return draft.finish()


def _fold_one(draft: Draft, norm: Norm, space: Space, *, as_rms: bool) -> None:
    gain_I = draft.tensors.exact(f"{norm.name}.weight") + draft.map.norm_gain_offset
    if norm.num_parameters > norm.features:
        bias_I = draft.tensors.exact(f"{norm.name}.bias")
        if bias_I.any():
            draft.add_to_bias(space.readers, bias_I)
    if (gain_I != 1).any():
        draft.read(space.readers, Diagonal(factors_I=gain_I), inverse=False)
    draft.set_norm(norm, as_rms=as_rms)
