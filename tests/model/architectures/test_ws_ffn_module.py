"""wsFFN against its formulas, spelled out number by number in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.model.architectures.ws_ffn import (
    Config,
    auxiliary_loss,
    contrastive_loss,
    length_loss,
    logits_z_loss,
    wsFFN,
)

pytestmark = pytest.mark.once


def make(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"d_model": 6, "d_ffn": 12, "n_head": 3, **changes}
    return wsFFN(Config(**sizes)).double()


def some_input(batch=2, length=5, width=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, width, generator=generator, dtype=torch.float64)


def weights_IO(ffn):
    """Weights as the formulas write them: x W with W of [in, out]."""
    return {name: getattr(ffn, name).weight.detach().numpy().T for name in ("w1", "w2", "w3", "latent")}


def silu(x):
    return x / (1 + math.exp(-x))


def by_hand(ffn, x):
    """(Y, Z) with loops over every token and every head."""
    w, (batch, length, width) = weights_IO(ffn), x.shape
    heads, size = ffn.config.n_head, ffn.config.d_ffn // ffn.config.n_head
    output, latent = np.zeros_like(x), np.zeros((batch, length, heads, size))
    for b in range(batch):
        for t in range(length):
            h1 = [sum(x[b, t, i] * w["w1"][i, f] for i in range(width)) for f in range(heads * size)]
            h2 = [sum(x[b, t, i] * w["w3"][i, f] for i in range(width)) for f in range(heads * size)]
            g = [silu(second) * first for first, second in zip(h1, h2, strict=True)]
            for i in range(width):
                output[b, t, i] = sum(g[f] * w["w2"][f, i] for f in range(heads * size))
            for h in range(heads):
                for z in range(size):
                    column = w["latent"][:, h * size + z]
                    latent[b, t, h, z] = sum(h1[f] * column[f] for f in range(heads * size))
    return output, latent


def length_loss_by_hand(z, lambda_z):
    rows = z.reshape(-1, z.shape[-1])
    return lambda_z * sum(sum(value * value for value in row) for row in rows) / len(rows)


def contrastive_loss_by_hand(z, lambda_c, tau):
    batch, length, heads, size = z.shape
    rows = [
        [sum(z[b, t, h, i] for t in range(length)) / length for i in range(size)]
        for b in range(batch)
        for h in range(heads)
    ]

    def cosine(one, other):
        lengths = math.sqrt(sum(v * v for v in one)) * math.sqrt(sum(v * v for v in other))
        return sum(a * b for a, b in zip(one, other, strict=True)) / lengths

    terms = []
    for i, row in enumerate(rows):
        total = sum(math.exp(cosine(row, other) / tau) for other in rows)
        terms.append(-math.log(math.exp(cosine(rows[i], rows[i]) / tau) / total))
    return lambda_c * sum(terms) / len(terms)


def drift(ffn):
    """Weights off the diagonal, as training leaves them."""
    with torch.no_grad():
        ffn.latent.weight += 0.1 * torch.randn_like(ffn.latent.weight)
    return ffn


@pytest.mark.parametrize("n_head", [1, 2, 3, 12])
def test_output_and_losses_are_the_formulas(n_head):
    ffn = drift(make(n_head=n_head))
    x = some_input()
    output, loss = ffn(x)
    expected, latent = by_hand(ffn, x.numpy())
    np.testing.assert_allclose(output.detach().numpy(), expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(ffn.latents(x).detach().numpy(), latent, rtol=1e-11, atol=1e-14)
    z_loss = length_loss_by_hand(latent, 1e-5)
    c_loss = contrastive_loss_by_hand(latent, 5e-3, 0.07)
    assert loss.item() == pytest.approx(z_loss + c_loss, rel=1e-11, abs=1e-16)
    assert length_loss(ffn.latents(x), 1e-5).item() == pytest.approx(z_loss, rel=1e-11)
    assert contrastive_loss(ffn.latents(x), 5e-3, 0.07).item() == pytest.approx(c_loss, rel=1e-10, abs=1e-16)


@settings(max_examples=25)
@given(
    shape=st.tuples(*(st.integers(1, 4) for _ in range(4))),
    tau=st.floats(0.05, 2.0),
    seed=st.integers(0, 1000),
)
def test_losses_are_the_formulas_at_any_shape_and_temperature(shape, tau, seed):
    z = np.random.default_rng(seed).normal(size=shape)
    made = contrastive_loss(torch.from_numpy(z), 0.3, tau).item()
    assert made == pytest.approx(contrastive_loss_by_hand(z, 0.3, tau), rel=1e-9, abs=1e-9)
    assert length_loss(torch.from_numpy(z), 0.2).item() == pytest.approx(
        length_loss_by_hand(z, 0.2), rel=1e-12
    )
    config = Config(
        d_model=1, d_ffn=shape[2] * shape[3], n_head=shape[2], lambda_z=0.2, lambda_c=0.3, tau=tau
    )
    both = contrastive_loss_by_hand(z, 0.3, tau) + length_loss_by_hand(z, 0.2)
    assert auxiliary_loss(torch.from_numpy(z), config).item() == pytest.approx(both, rel=1e-9, abs=1e-9)


def test_gradients_are_those_of_the_formulas():
    ffn = drift(make(d_model=3, d_ffn=4, n_head=2, lambda_z=0.3, lambda_c=0.2, tau=0.5))
    x = some_input(width=3, length=3).requires_grad_()
    names = list(dict(ffn.named_parameters()))

    def run(x, *values):
        return torch.func.functional_call(ffn, dict(zip(names, values, strict=True)), (x,))

    values = [parameter.detach().clone().requires_grad_() for parameter in ffn.parameters()]
    assert torch.autograd.gradcheck(run, (x, *values))
    output, loss = ffn(x)
    reached = torch.autograd.grad(output.sum(), ffn.latent.weight, allow_unused=True)[0]
    assert reached is None, "the output never reads the latent path"
    assert torch.autograd.grad(loss, ffn.latent.weight)[0].abs().min() > 0, "dense: every weight may drift"


def test_weights_off_the_diagonal_start_at_exactly_zero_and_each_head_as_a_linear_of_its_size():
    torch.manual_seed(0)
    ffn = wsFFN(Config(d_model=8, d_ffn=120, n_head=5))
    blocks = ffn.latent.weight.detach().numpy().reshape(5, 24, 5, 24)
    for out in range(5):
        for read in range(5):
            block = blocks[out, :, read]
            if out != read:
                assert not block.any()
            else:
                assert (block != 0).all()
                assert np.abs(block).max() <= 24**-0.5
                assert block.std() == pytest.approx((24 * 3) ** -0.5, rel=0.1)


def test_a_block_diagonal_head_reads_its_own_share_alone():
    ffn = make()
    h1 = some_input(width=12)
    before = ffn.heads(h1)
    changed = h1.clone()
    changed[..., 4:8] += 1.0
    moved = (ffn.heads(changed) - before).abs().amax(dim=(0, 1, 3))
    assert moved[1] > 0.1
    assert moved[0] == moved[2] == 0


@pytest.mark.parametrize(("training", "uses"), [(False, True), (True, False), (False, False)])
def test_without_losses_there_is_none_and_the_latent_is_not_computed(training, uses):
    ffn = make(use_aux_loss=uses).train(training)
    calls = []
    ffn.latent.register_forward_hook(lambda *_: calls.append(1))
    x = some_input()
    output, loss = ffn(x)
    assert loss is None
    assert not calls
    np.testing.assert_allclose(output.detach().numpy(), by_hand(ffn, x.numpy())[0], rtol=1e-12, atol=1e-14)


def test_the_latent_is_one_product():
    ffn = make()
    calls = []
    for module in ffn.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, *_: calls.append(module))
    ffn(some_input())
    assert [module is ffn.latent for module in calls].count(True) == 1
    assert len(calls) == 4


def test_the_loss_on_logits_is_its_formula_and_steers_nothing():
    logits = some_input(width=7).requires_grad_()
    values = logits.detach().numpy().reshape(-1, 7)
    expected = 1e-4 * sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in values) / len(values)
    made = logits_z_loss(logits, 1e-4)
    assert made.item() == pytest.approx(expected, rel=1e-12)
    assert not made.requires_grad


def test_half_precision_losses_are_computed_in_single():
    z = some_input(width=12).reshape(2, 5, 3, 4)
    config = Config(d_model=6, d_ffn=12, n_head=3)
    made = auxiliary_loss(z.bfloat16(), config)
    assert made.dtype == torch.float32
    assert made.item() == pytest.approx(auxiliary_loss(z, config).item(), rel=2e-2)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"n_head": 5}, "does not divide"),
        ({"n_head": 24}, "does not divide"),
        ({"n_head": 0}, "n_head"),
        ({"d_ffn": -12}, "d_ffn"),
        ({"tau": 0.0}, "tau"),
        ({"tau": float("nan")}, "tau"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(changes, word):
    with pytest.raises(InputError, match=word) as caught:
        Config(**{"d_model": 6, "d_ffn": 12, "n_head": 3, **changes})
    assert "\n" not in str(caught.value)
