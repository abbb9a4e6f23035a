"""Which projections are weighed, and what weighing them gains where it counts: in the predictions."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

import pytest
import torch

from quantkit.model.inspect import inspect_source
from quantkit.model.linears import weight_OI
from quantkit.model.load import open_source
from quantkit.model.model_map import Role
from quantkit.model.weights.open import with_weights
from quantkit.model.weights.torch_model import torch_model
from quantkit.pipeline.stages.prepare import discard, prepare
from quantkit.pipeline.stages.resolve import resolve
from quantkit.plan.formats import Grid
from quantkit.progress import Progress
from quantkit.quantization.calibration.output_weights import weighed_layers
from quantkit.quantization.calibration.replay import NotBlockwiseError
from quantkit.quantization.grid import decode_all
from quantkit.quantization.projections import rows_of
from quantkit.quantization.rounding.apply import prepared_fit
from quantkit.recipe import Recipe, override
from quantkit.runtime.tokenizer import open_text

FEW = {"calibration.windows": 12, "calibration.length": 256, "calibration.gradient_windows": 4}
LAST = {"select.include": ["transformer.h.4.*", "transformer.h.5.*"]}  # blocks; the rest stays float
GRID = Grid(bits=4, block=32)


def mapped(name="demo"):
    return inspect_source(with_weights(open_source(name), random_weights=name != "demo"))


def picked(model_map, planned=None, **changes):
    settings = {"fit": "gptq", "scheme": "int4_block32", "calibration.gradient_windows": 4, **changes}
    recipe = override(Recipe(), settings)
    every = frozenset(layer.name for layer in model_map.layers)
    num_windows = recipe.calibration.gradient_windows
    layers = weighed_layers(model_map, planned or every, fit=recipe.fit, num_windows=num_windows)
    return {layer.name for layer in layers}


@pytest.mark.once
def test_what_is_weighed():
    model_map = mapped()
    body = {layer.name for layer in model_map.layers if layer.role is not Role.LM_HEAD}
    assert picked(model_map) == body, "a head is read by the prediction alone"
    assert picked(model_map, fit="mse") == set(), "a fit that makes no use of it"
    assert picked(model_map, scheme="int8_block64") == body, "eight bits gain from it too"
    assert picked(model_map, **{"calibration.gradient_windows": 0}) == set()
    names = frozenset(name for name in body if name.endswith("mlp.c_fc"))
    assert picked(model_map, names) == names, "what stays in float has nothing to make up for"
    encoder = replace(model_map, layers=tuple(each for each in model_map.layers if each.name in body))
    assert picked(encoder) == set(), "nothing is predicted"


def _last(opened):
    return [layer for layer in opened.model_map.layers if layer.role is Role.FFN_DOWN][-1]


def divergence(prepared, statistics, tokens_BT):
    """KL of the next token when every projection is fitted with what was seen."""
    module = torch_model(prepared.resolved.source, prepared.model_map, prepared.weights)
    with torch.no_grad():
        reference = module(input_ids=tokens_BT).logits.double().log_softmax(-1)
        for layer in prepared.model_map.layers:
            if layer.name in prepared.planned:
                seen, rows = statistics(layer), rows_of(layer.rows)
                fitting = prepared_fit("gptq", GRID, seen)
                target_OI = weight_OI(module.get_submodule(layer.matrix), layer.stored_as)
                fit = fitting.jointly(seen) or fitting.encode
                made = fit(target_OI[rows].contiguous().numpy())
                target_OI[rows] = torch.from_numpy(decode_all(made, layer.in_features))
        changed = module(input_ids=tokens_BT).logits.double().log_softmax(-1)
    return float((reference.exp() * (reference - changed)).sum(-1).mean())


@pytest.mark.slow
def test_predictions_on_unseen_text_gain(tmp_path):
    settings = {"model": "demo", "scheme": "int4_block32", "transforms": [], **FEW, **LAST}
    progress = Progress(quiet=True)
    opened = resolve(override(Recipe(), settings), progress, statistics=tmp_path)
    prepared = prepare(opened)
    text = (resources.files("quantkit") / "assets" / "demo" / "evaluation.txt").read_text(encoding="utf-8")
    ids = open_text(opened.source.folder).encode(text[:20_000])
    tokens_BT = torch.tensor(ids[:1536]).reshape(6, 256)

    def one_sided(layer):
        return replace(prepared.statistics(layer), gradient_OO=None)

    plain = divergence(prepared, one_sided, tokens_BT)
    found = divergence(prepared, prepared.statistics, tokens_BT)
    assert prepared.statistics(_last(opened)).num_gradients == 4 * 256
    assert 0 < found < 0.75 * plain
    assert discard(prepared) is None
    assert {each.name for each in tmp_path.iterdir()} == {"0-fit", "0-gradients"}, "asked to be kept"


@pytest.mark.once
def test_a_model_that_is_no_chain_is_fitted_all_the_same(tmp_path, monkeypatch):
    """The reason is said, and GPTQ goes on without."""

    def refusing(*_, **__):
        raise NotBlockwiseError("block 'x' runs more than once")

    monkeypatch.setattr("quantkit.quantization.calibration.output_weights.collect_gradients", refusing)
    settings = {"model": "demo", "scheme": "int4_block32", "transforms": [], **FEW, **LAST}
    progress = Progress(quiet=True)
    opened = resolve(override(Recipe(), settings), progress, statistics=tmp_path)
    prepared = prepare(opened)
    assert prepared.notes[-1] == "GPTQ weighs all outputs the same: block 'x' runs more than once"
    seen = prepared.statistics(_last(opened))
    assert seen.second_moment_II is not None
    assert seen.gradient_OO is None
