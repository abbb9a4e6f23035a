"""Which projections are fitted to what their outputs do to predictions, and the pass that sees it.

Eight bits lose too little for it, a head is read by nothing but the prediction itself, and where a model
predicts no tokens there is nothing to weigh: those are fitted to their outputs alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quantkit.model.load import Source
from quantkit.model.model_map import Layer, ModelMap, Role
from quantkit.model.names import modules_by_name
from quantkit.model.weights.tensors import TensorSource
from quantkit.model.weights.torch_model import torch_model
from quantkit.progress import Progress
from quantkit.quantization.calibration import GradientsFile, NotPlainError, collect_gradients
from quantkit.quantization.layout import Evidence
from quantkit.quantization.rounding import QUANTIZERS
from quantkit.quantization.rounding.apply import Evidences
from quantkit.quantization.simulate import rows_of
from quantkit.recipe import Recipe


def weighed(recipe: Recipe, planned: frozenset[str], model_map: ModelMap) -> tuple[Layer, ...]:
    """The projections whose outputs are to be weighed."""
    predicts = any(layer.role is Role.LM_HEAD for layer in model_map.layers)
    if QUANTIZERS[recipe.fit].join is None or not predicts or not recipe.calibration.gradient_windows:
        return ()
    return tuple(
        layer
        for layer in model_map.layers
        if layer.name in planned and layer.role is not Role.LM_HEAD and layer.num_groups == 1
    )


def weigh(
    source: Source,
    model_map: ModelMap,
    weights: TensorSource,
    layers: tuple[Layer, ...],
    tokens_BT: NDArray[np.int64],
    *,
    recipe: Recipe,
    folder: Path,
    progress: Progress,
) -> GradientsFile | str:
    """What was seen of the gradients at their outputs, or why nothing can be."""
    tokens_BT = tokens_BT[:: -(-len(tokens_BT) // recipe.calibration.gradient_windows)]
    with progress.stage("weights of outputs", total=int(tokens_BT.size), unit="tokens") as count:
        module = torch_model(source, model_map, weights)
        named = modules_by_name(module)
        try:
            return collect_gradients(
                module,
                tokens_BT,
                outputs={layer.name: (named[layer.matrix], rows_of(layer.rows)) for layer in layers},
                blocks={block.name: named[block.name] for block in model_map.blocks},
                folder=folder,
                seed=recipe.calibration.seed,
                progress=count,
            )
        except NotPlainError as error:
            return str(error)


def with_gradients(evidence: Evidences, found: GradientsFile) -> Evidences:
    """What was seen of inputs and outputs together."""

    def both(layer: Layer) -> Evidence | None:
        seen = evidence(layer)
        if seen is None:
            return None
        return replace(seen, gradient_OO=found.read(layer.name), num_gradients=found.num_rows)

    return both
