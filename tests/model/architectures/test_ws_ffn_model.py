"""The whole decoder with wsFFN: its losses, its cache, saving and loading, and what it refuses."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
import transformers

from quantkit.errors import InputError
from quantkit.model.architectures.register import OWN_MODELS
from quantkit.model.architectures.ws_ffn import WsFfnConfig, WsFfnForCausalLM
from quantkit.model.inspect import inspect

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_latent_heads": 4,
}
IDS = torch.from_numpy(np.random.default_rng(0).integers(1, 60, (2, 11)))
PLACEMENTS = pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])


def make(**changes):
    torch.manual_seed(0)
    return WsFfnForCausalLM(WsFfnConfig(**{**SIZES, **changes}))


def off_diagonal(ffn):
    width = ffn.config.z_dim
    return torch.block_diag(*[torch.ones(width, width)] * ffn.config.n_head) == 0


def some_steps(model, number=12):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(number):
        output = model(IDS, labels=IDS)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append({name: loss.item() for name, loss in output.losses.items()})
    return losses


def latent_losses_by_hand(z, lambda_z, lambda_c, tau):
    """L_Z + L_C of one block, by numpy alone."""
    rows = z.reshape(-1, z.shape[-1])
    means = z.mean(axis=1).reshape(-1, z.shape[-1])
    unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    scores = unit @ unit.T / tau
    share = np.exp(np.diag(scores)) / np.exp(scores).sum(axis=1)
    return lambda_z * (rows**2).sum(axis=1).mean() - lambda_c * np.log(share).mean()


@PLACEMENTS
def test_losses_are_the_sum_of_their_formulas(placement):
    changes = {"lambda_z": 0.01, "lambda_c": 0.3, "lambda_logits_z": 0.02, "tau": 0.5}
    model = make(norm_placement=placement, **changes).double().train()
    output = model(IDS, labels=IDS)
    logits, ids = output.logits.detach().numpy(), IDS.numpy()
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    told = np.take_along_axis(logits[:, :-1], ids[:, 1:, None], axis=2)[..., 0] - log_sums[:, :-1]
    with torch.no_grad():
        latents = [each.numpy() for each in model.latents(IDS)]
    expected = {
        "main": -told.mean(),
        "wsffn_aux": sum(latent_losses_by_hand(each, 0.01, 0.3, 0.5) for each in latents),
        "z": 0.02 * (log_sums**2).mean(),
    }
    expected["total"] = sum(expected.values())
    assert set(output.losses) == set(expected)
    for name, value in expected.items():
        assert output.losses[name].item() == pytest.approx(value, rel=1e-6), name
    assert output.loss is output.losses["total"]


@pytest.mark.parametrize(("training", "uses"), [(False, True), (True, False)])
def test_without_auxiliary_losses_the_total_is_the_main_loss(training, uses):
    model = make(use_aux_loss=uses).train(training)
    ran = []
    for ffn in model.model.ffns():
        ffn.latent.register_forward_hook(lambda *_: ran.append(1))
    losses = model(IDS, labels=IDS).losses
    assert not ran
    assert losses["total"].item() == losses["main"].item() > 0
    assert losses["wsffn_aux"].item() == losses["z"].item() == 0


def test_a_pass_leaves_no_graph_behind_and_a_copy_is_its_own():
    model = make().train()
    model(IDS)
    assert all(ffn.loss is None for ffn in model.model.ffns())
    twin = copy.deepcopy(model)
    losses = [each(IDS, labels=IDS).losses["wsffn_aux"].item() for each in (model, twin)]
    assert losses[0] == losses[1] > 0


def test_latents_start_block_diagonal_and_drift_only_with_the_losses():
    with_losses, without = make(), make(use_aux_loss=False)
    for model in (with_losses, without):
        for ffn in model.model.ffns():
            outside = off_diagonal(ffn)
            assert (ffn.latent.weight[outside] == 0).all()
            assert (ffn.latent.weight[~outside] != 0).all()
    for one, other in zip(with_losses.parameters(), without.parameters(), strict=True):
        assert torch.equal(one, other), "the losses change no start"
    curves = [some_steps(model) for model in (with_losses, without)]
    for curve in curves:
        assert curve[-1]["main"] < 0.8 * curve[0]["main"]
    assert curves[0][-1]["wsffn_aux"] > 0
    for ffn in with_losses.model.ffns():
        assert (ffn.latent.weight[off_diagonal(ffn)] != 0).float().mean() > 0.9
    for ffn in without.model.ffns():
        assert (ffn.latent.weight[off_diagonal(ffn)] == 0).all()


def test_a_stronger_contrastive_loss_makes_heads_less_alike():
    def alike(model):
        means = torch.cat([each.mean(1) for each in model.eval().latents(IDS)])
        unit = torch.nn.functional.normalize(means, dim=-1)
        return (unit @ unit.transpose(1, 2))[:, ~torch.eye(4, dtype=torch.bool)].mean().item()

    found = {}
    for lambda_c in (0.0, 1.0):
        model = make(lambda_c=lambda_c, tau=0.5)
        some_steps(model, 25)
        with torch.no_grad():
            found[lambda_c] = alike(model)
    assert found[1.0] < found[0.0] - 0.05


@PLACEMENTS
def test_a_saved_model_comes_back_with_what_its_latents_have_become(placement, tmp_path):
    model = make(norm_placement=placement)
    some_steps(model, 2)
    model.eval().save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is WsFfnForCausalLM is OWN_MODELS["WsFfnForCausalLM"]
    assert set(model.state_dict()) == set(again.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert torch.equal(model(IDS).logits, again(IDS).logits)
    assert [again.config.lambda_z, again.config.tau, again.config.num_latent_heads] == [1e-5, 0.07, 4]


def test_latents_that_a_checkpoint_lacks_start_block_diagonal(tmp_path):
    model = make()
    some_steps(model, 2)
    state = {name: tensor for name, tensor in model.state_dict().items() if "latent" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.model.layers[0].mlp.w1.weight, model.model.layers[0].mlp.w1.weight)
    for ffn in again.model.ffns():
        assert (ffn.latent.weight[off_diagonal(ffn)] == 0).all()
        assert (ffn.latent.weight[~off_diagonal(ffn)] != 0).all()


@PLACEMENTS
def test_the_cache_changes_nothing(placement):
    model = make(norm_placement=placement).double().eval()
    with torch.no_grad():
        whole = model(IDS).logits
        output = model(IDS[:, :5], use_cache=True)
        made = [output.logits]
        for place in range(5, IDS.shape[1]):
            output = model(IDS[:, place : place + 1], past_key_values=output.past_key_values, use_cache=True)
            made.append(output.logits)
    torch.testing.assert_close(torch.cat(made, dim=1), whole, rtol=1e-10, atol=1e-12)
    settings = {"max_new_tokens": 6, "do_sample": False}
    tokens = [model.generate(IDS[:, :5], use_cache=cached, **settings) for cached in (True, False)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_latent_heads": 5}, "does not divide"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"ffn_kind": "standard"}, "ffn_kind"),
        ({"uses_bias": True}, "uses_bias"),
    ],
)
def test_a_config_that_no_wsffn_has_is_refused(changes, word):
    with pytest.raises(InputError, match=word):
        WsFfnConfig(**{**SIZES, **changes})


def test_a_checkpoint_whose_sizes_do_not_divide_is_refused_in_one_line(tmp_path):
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    with pytest.raises(InputError, match="d_ffn 50 does not divide into n_head 4") as caught:
        inspect(str(tmp_path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="does not divide"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_map_needs_no_weights_and_says_what_is_not_run(tmp_path):
    config = make().config
    config.architectures = ["WsFfnForCausalLM"]
    config.save_pretrained(tmp_path)
    found = inspect(str(tmp_path))
    latents = [layer for layer in found.layers if layer.role == "ffn_latent"]
    assert [(each.calls, each.num_heads, each.in_features, each.out_features) for each in latents] == [
        (0, 4, 48, 48)
    ] * 3
    running = found.at_inference
    assert running.num_parameters == found.num_parameters - 3 * 48 * 48
    assert not [layer for layer in running.layers if layer.role == "ffn_latent"]
    assert math.prod((3, 48, 48)) == found.num_parameters - running.num_parameters
    assert any("training alone" in note for note in found.notes)


def test_a_row_padded_on_the_left_is_continued_as_if_it_were_alone():
    model = make().double().eval()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    settings = {"max_new_tokens": 6, "do_sample": False}
    together = model.generate(IDS, attention_mask=mask, **settings)[:, IDS.shape[1] :]
    for row, start in enumerate((4, 0)):
        alone = model.generate(IDS[row : row + 1, start:], **settings)[0, IDS.shape[1] - start :]
        assert torch.equal(together[row], alone)
