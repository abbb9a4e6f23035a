"""Every transform on every family: the function stays what it was, or a forbidden change says why.

The oracle is transformers' own model in float64; the changed model is the same modules with weights read
through the change, likewise in float64, so that only a wrong change can differ.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from doubles import CASES, logits_of, subject
from exporting import error

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.model_map import NormKind
from quantkit.model.weights.torch_model import torch_model
from quantkit.quantization.transforms import TRANSFORMS
from quantkit.quantization.transforms.basis import (
    Diagonal,
    HeadRotation,
    Permutation,
    head_permutation,
)
from quantkit.quantization.transforms.change import _put, apply_change
from quantkit.quantization.transforms.draft import Draft, opened
from quantkit.quantization.transforms.hadamard import random_hadamard
from quantkit.quantization.transforms.permutation import permute
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.spaces import spaces_of

pytestmark = pytest.mark.once
LARGEST_ERROR = 1e-9
ON_EVERY_FAMILY = pytest.mark.parametrize(
    ("family", "variant"), [pytest.param(name, index, id=f"{name}-{index}") for name, index in CASES]
)
# Families whose residual no rotation may touch, and why the error must say so.
NOT_ROTATED = {
    ("opt", 1): "post-norm",
    ("bloom", 0): "word_embeddings_layernorm",
    ("gemma2", 0): "sandwich",
    ("gemma3", 0): "sandwich",
    ("glm4", 0): "sandwich",
    ("olmo2", 0): "output norms",
    ("olmo3", 0): "output norms",
    ("exaone4", 0): "output norms",
    ("exaone4", 1): "output norms",
    ("bert", 0): "post-norm",
    ("roberta", 0): "post-norm",
    ("mpnet", 0): "post-norm",
    ("electra", 0): "post-norm",
    ("electra", 1): "only one of them is on the stream",
    ("deberta_v2", 0): "post-norm",
    ("deberta_v2", 1): "post-norm",
    ("modernbert", 0): "embeddings.norm",
    ("modernbert", 1): "embeddings.norm",
    ("distilbert", 0): "post-norm",
    ("albert", 0): "post-norm",
    ("albert", 1): "post-norm",
    **{(name, variant): "post-norm" for name in ("bart", "marian") for variant in (0, 1)},
    **{("mbart", variant): "layernorm_embedding" for variant in (0, 1)},
    ("quantkit_reference", 2): "post-norm",
    ("quantkit_reference", 3): "sandwich",
    ("quantkit_one_wide", 0): "shared",
    ("quantkit_one_wide", 2): "shared",
    ("ws_ffn", 1): "post-norm",
    ("ws_ffn", 2): "sandwich",
}
TOWERS = [(name, index) for name, index in CASES if FAMILIES[name].head_reads_one_token]
NOT_ROTATED |= dict.fromkeys(TOWERS, "without a language-model head")
FORBIDDEN = {
    **{("hadamard", *case): reason for case, reason in NOT_ROTATED.items()},
    ("fold", "opt", 1): "post-norm",
    **{("fold", name, variant): "post-norm" for name in ("bart", "marian") for variant in (0, 1)},
    ("fold", "quantkit_reference", 2): "post-norm",
    ("fold", "ws_ffn", 1): "post-norm",
    **{(name, "olmo", variant): "no gain" for name in ("fold", "hadamard") for variant in (0, 1)},
    **{
        ("head_hadamard", name, 1): "no attention of it permits a rotation"  # values are clipped
        for name in ("olmo", "olmoe")
    },
}


@pytest.fixture
def given(family, variant, tmp_path):
    return subject(family, variant, tmp_path)


def seen_by(model_map):
    """Statistics as calibration would give them, with a dead channel and strong ones."""
    random = np.random.default_rng(3)
    statistics = {}
    for layer in model_map.layers:
        peaks = np.exp(random.normal(size=layer.in_features))
        peaks[1], peaks[2] = 0.0, 300.0
        statistics[layer.matrix] = peaks
    return statistics


def run(name, model_map, tensors, **options):
    defaults = {"unties_head": True, "seed": 1, "statistics": seen_by(model_map)}
    settings = TransformSettings(**{**defaults, **options})
    return TRANSFORMS[name].apply(model_map, opened(model_map, tensors, np.float64), settings)


def names_of(model_map):
    names = {f"{layer.tied_to or layer.matrix}.weight" for layer in model_map.layers}
    names |= {f"{table.name}.weight" for table in model_map.embeddings}
    return names | {f"{norm.name}.weight" for norm in model_map.norms}


def num_changed(given, model_map, tensors):
    return sum(
        not np.array_equal(tensors.read(name), given.tensors.read(name))
        for name in names_of(model_map)
        if given.tensors.has(name)
    )


def largest_error(model_map, *, exactly=LARGEST_ERROR):
    """Weights that took in a scale of their outputs are float32 again."""
    return 1e-7 if any(layer.output_factors for layer in model_map.layers) else exactly


def assert_same_function(given, model_map, tensors):
    made = logits_of(torch_model(given.source, model_map, tensors, torch.float64))
    assert error(made, given.logits).relative < largest_error(given.map)


@ON_EVERY_FAMILY
def test_the_rebuilt_model_is_the_model(given):
    made = logits_of(torch_model(given.source, given.map, given.tensors, torch.float64))
    assert error(made, given.logits).relative < largest_error(given.map, exactly=1e-12)


@pytest.mark.parametrize("name", TRANSFORMS)
@ON_EVERY_FAMILY
def test_the_function_stays(name, family, variant, given):
    reason = FORBIDDEN.get((name, family, variant))
    if reason:
        with pytest.raises(InputError, match=reason):
            run(name, given.map, given.tensors)
        return
    model_map, tensors = run(name, given.map, given.tensors)
    assert num_changed(given, model_map, tensors) >= 2
    assert_same_function(given, model_map, tensors)
    assert given.map == subject(family, variant, None).map, "the map it was given is left alone"
    module = torch_model(given.source, model_map, tensors, torch.float64)
    assert model_map.num_parameters == sum(each.numel() for each in module.parameters())


@ON_EVERY_FAMILY
def test_whole_heads_move(given):
    spaces = [space for space in spaces_of(given.map) if "head_permutation" in space.permits]
    if not spaces:
        reasons = {space.forbidden.get("head_permutation") for space in spaces_of(given.map)}
        assert any("position bias of its own" in reason or "gain of its own" in reason for reason in reasons)
        return
    names = [space.name for space in spaces]
    doubled = opened(given.map, given.tensors, np.float64)
    model_map, tensors = permute(given.map, doubled, spaces=names, moves_heads=True)
    has_several = any(space.num_kv_heads > 1 for space in spaces)
    assert (num_changed(given, model_map, tensors) >= 2) == has_several
    assert_same_function(given, model_map, tensors)


@ON_EVERY_FAMILY
def test_changes_compose(family, variant, given):
    smoothed = run("smoothquant", given.map, given.tensors)
    mixed = smoothed
    if ("head_hadamard", family, variant) not in FORBIDDEN:
        mixed = run("head_hadamard", *mixed, seed=5)
    if ("hadamard", family, variant) not in FORBIDDEN:
        mixed = run("hadamard", *mixed)
    permuted = run("permutation", *mixed, seed=2)
    again = run("smoothquant", *permuted, alpha=0.8)
    assert_same_function(given, *again)


@ON_EVERY_FAMILY
def test_changes_branch(family, variant, given):
    """Several changes of one changed source, read in turn, as a search over candidates does."""
    first = run("smoothquant", given.map, given.tensors)
    branches = [run("smoothquant", *first, alpha=0.1 * step) for step in (1, 9)]
    names = ("head_hadamard", "permutation")
    branches += [run(name, *first) for name in names if (name, family, variant) not in FORBIDDEN]
    for branch in branches:
        assert_same_function(given, *branch)


@ON_EVERY_FAMILY
def test_an_untied_head_starts_from_the_changed_table(family, variant, given):
    permuted = run("permutation", given.map, given.tensors, unties_head=False)
    then = "fold" if ("hadamard", family, variant) in FORBIDDEN else "hadamard"
    if (then, family, variant) not in FORBIDDEN:
        assert_same_function(given, *run(then, *permuted))


@ON_EVERY_FAMILY
def test_a_tied_head_is_untied_only_when_asked(family, variant, given):
    is_free = ("hadamard", family, variant) not in FORBIDDEN
    if is_free and given.map.has_tied_head:
        with pytest.raises(InputError, match=r"unties_head=True"):
            run("hadamard", given.map, given.tensors, unties_head=False)
        model_map, tensors = run("hadamard", given.map, given.tensors)
        head = next(layer for layer in model_map.layers if layer.role == "lm_head")
        assert head.tied_to is None
        assert not model_map.has_tied_head
        assert tensors.has(f"{head.matrix}.weight")
    elif is_free:
        model_map, tensors = run("hadamard", given.map, given.tensors, unties_head=False)
        assert_same_function(given, model_map, tensors)
    model_map, _ = run("permutation", given.map, given.tensors)
    assert model_map.has_tied_head == given.map.has_tied_head, "a permutation suits both of its readers"


@ON_EVERY_FAMILY
def test_layer_norms_become_rms_norms_where_the_residual_is_rotated(family, variant, given):
    if ("hadamard", family, variant) in FORBIDDEN:
        return
    model_map, tensors = run("hadamard", given.map, given.tensors)
    residual = next(space for space in spaces_of(model_map) if space.kind == "residual")
    for norm in model_map.norms:
        if norm.name in residual.norms:
            assert norm.kind is NormKind.RMS_NORM
            gain = tensors.read(f"{norm.name}.weight") + model_map.norm_gain_offset
            assert (gain == 1).all()
            assert norm.num_parameters == norm.features
            assert not tensors.has(f"{norm.name}.bias")


def some_basis(space, kind):
    random = np.random.default_rng(0)
    if kind == "diagonal":
        return Diagonal(factors_I=np.exp(random.normal(size=space.width)))
    if kind == "permutation":
        return Permutation(order_I=random.permutation(space.width))
    if kind == "orthogonal":
        return random_hadamard(space.width, 0)
    heads, head_dim = space.num_kv_heads or 4, space.head_dim or space.width // 4
    if kind == "head_permutation":
        return head_permutation(random.permutation(heads), head_dim)
    turns = [random_hadamard(head_dim, head).matrix_II() for head in range(heads)]
    return HeadRotation(rotations_HDD=np.stack(turns))


@ON_EVERY_FAMILY
def test_every_forbidden_kind_raises_with_its_reason(given):
    num_forbidden = 0
    for space in spaces_of(given.map):
        for kind, reason in space.forbidden.items():
            assert len(reason) > 15
            with pytest.raises(InputError, match="forbidden") as raised:
                apply_change(given.map, given.tensors, {space.name: some_basis(space, kind)})
            assert " ".join(reason.split()) in str(raised.value)
            num_forbidden += 1
    assert num_forbidden > 5


def test_a_forbidden_change_would_have_changed_the_function(tmp_path):
    """What is forbidden is not merely untried: forced, it shows."""
    for family, kind, name in (
        ("gpt2", "diagonal", "ffn_hidden"),
        ("bert", "diagonal", "output.LayerNorm"),
        ("gemma2", "orthogonal", "residual"),
        ("bloom", "head_permutation", "value_heads"),
        ("llama", "diagonal", "residual"),
    ):
        given = subject(family, 0, tmp_path / family)
        space = next(each for each in spaces_of(given.map) if each.name.endswith(name))
        assert kind not in space.permits
        draft = Draft(given.map, opened(given.map, given.tensors, np.float64))
        _put(draft, space, some_basis(space, kind))
        made = logits_of(torch_model(given.source, *draft.finish(), torch.float64))
        assert error(made, given.logits).relative > 1e-4, (family, kind)
