"""Second moments of gradients against one backward pass through the whole model, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exporting import build_tiny

from quantkit.model.families import FAMILIES
from quantkit.quantization.calibration.gradients import collect_gradients
from quantkit.quantization.calibration.replay import NotBlockwiseError

TOKENS = np.random.default_rng(0).integers(1, 60, (3, 11))
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "transformer.h", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    "llama": (
        "LlamaForCausalLM",
        "model.layers",
        ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    ),
    "gemma2": ("Gemma2ForCausalLM", "model.layers", ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")),
}


def opened(name):
    architecture, blocks, linears = MODELS[name]
    model = build_tiny(architecture, dict(FAMILIES[name].tiny), dtype=torch.float64, spread=0.3)
    found = {f"{blocks}.{number}": model.get_submodule(f"{blocks}.{number}") for number in range(2)}
    matrices = {
        f"{block}.{linear}": child.get_submodule(linear)
        for block, child in found.items()
        for linear in linears
    }
    return model, found, matrices


def gradients_of(model, matrices, tokens=TOKENS):
    """Rows [T, O] of the log-likelihood's gradient; labels are drawn as the pass under test draws them."""
    chances, rows, kept = torch.Generator().manual_seed(0), {name: [] for name in matrices}, {}

    def watch(name):
        def hook(_, __, output):
            output.retain_grad()
            kept[name] = output

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in matrices.items()]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for window in tokens:
        logits_TV = model(input_ids=torch.from_numpy(window[None])).logits[0]
        chance_TV = logits_TV.detach().float().softmax(-1)
        drawn = [torch.multinomial(part, 1, generator=chances) for part in (chance_TV[:1], chance_TV[1:])]
        torch.nn.functional.nll_loss(
            logits_TV.log_softmax(-1), torch.cat(drawn)[:, 0], reduction="sum"
        ).backward()
        for name, output in kept.items():
            rows[name].append(output.grad[0].double().numpy())
    for handle in handles:
        handle.remove()
    return {name: np.concatenate(found) for name, found in rows.items()}


@pytest.mark.parametrize("name", [*MODELS])
def test_they_are_those_of_the_whole_model(name, tmp_path):
    model, blocks, matrices = opened(name)
    rows = {each: torch.arange(linear_rows) for each, linear_rows in _sizes(model, matrices).items()}
    wanted = gradients_of(model, matrices)
    told = []
    outputs = {each: (linear, rows[each]) for each, linear in matrices.items()}
    found = collect_gradients(
        model, TOKENS, outputs=outputs, blocks=blocks, folder=tmp_path, progress=told.append
    )
    assert found.num_tokens == TOKENS.size == sum(told)
    for each, gradient_TO in wanted.items():
        moment_OO = gradient_TO.T @ gradient_TO / len(gradient_TO)
        assert np.abs(found.read(each).second_moment_II - moment_OO).max() < 1e-5 * np.abs(moment_OO).max()
    assert not list(tmp_path.glob("hidden_*")), "nothing is left of the way"
    assert all(parameter.grad is None or parameter.requires_grad is False for parameter in model.parameters())


def _sizes(model, matrices):
    """Outputs of every matrix, seen and not asked."""
    sizes = {}

    def watch(name):
        return lambda _, __, output: sizes.__setitem__(name, output.shape[-1])

    handles = [module.register_forward_hook(watch(name)) for name, module in matrices.items()]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(TOKENS[:1]))
    for handle in handles:
        handle.remove()
    return sizes


def test_parts_of_a_fused_matrix_have_moments_of_their_own(tmp_path):
    """Rows in any order, as interleaved heads have them."""
    model, blocks, matrices = opened("gpt2")
    name = "transformer.h.0.attn.c_attn"
    picked = torch.tensor([7, 3, 40, 41])
    wanted_TO = gradients_of(model, {name: matrices[name]})[name][:, picked.numpy()]
    found = collect_gradients(
        model, TOKENS, outputs={"keys": (matrices[name], picked)}, blocks=blocks, folder=tmp_path
    )
    wanted_OO = wanted_TO.T @ wanted_TO / len(wanted_TO)
    assert np.abs(found.read("keys").second_moment_II - wanted_OO).max() < 1e-5 * np.abs(wanted_OO).max()
    assert [*found.requested] == ["keys"]


def test_finished_ones_are_taken_and_others_are_not(tmp_path, monkeypatch):
    model, blocks, matrices = opened("llama")
    outputs = {name: (linear, torch.arange(4)) for name, linear in matrices.items()}
    first = collect_gradients(model, TOKENS, outputs=outputs, blocks=blocks, folder=tmp_path)
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    told = []
    again = collect_gradients(
        model, TOKENS, outputs=outputs, blocks=blocks, folder=tmp_path, progress=told.append
    )
    assert (again, calls, sum(told)) == (first, [], TOKENS.size)
    other = collect_gradients(model, TOKENS[:2], outputs=outputs, blocks=blocks, folder=tmp_path)
    handle.remove()
    assert calls
    assert other.key != first.key


def test_a_model_without_logits_or_without_a_chain_is_refused(tmp_path):
    model, blocks, matrices = opened("gpt2")
    outputs = {name: (linear, torch.arange(4)) for name, linear in matrices.items()}
    with pytest.raises(NotBlockwiseError, match="no logits"):
        collect_gradients(model.transformer, TOKENS, outputs=outputs, blocks=blocks, folder=tmp_path)
    with pytest.raises(NotBlockwiseError, match="no blocks"):
        collect_gradients(model, TOKENS, outputs=outputs, blocks={}, folder=tmp_path)
