"""Static graphs on the CPU: in float they are the model, in integers they are the formulas of their grids."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from exporting import build_tiny, decoder_cases, error
from hypothesis import given, settings
from hypothesis import strategies as st
from static_graphs import emit_both, round_both

from quantkit.errors import InputError
from quantkit.export.static.decoder import why_not_static
from quantkit.export.static.operators import StaticShape
from quantkit.export.static.qdq import Bits, ValueGrid
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.pipeline.stages.static_recipe import settle_static
from quantkit.recipe import Recipe, override
from quantkit.runtime.generate import generate
from quantkit.runtime.static_decoder import StaticRow, join, open_static_session, run_prompt

CASES = [case for case in decoder_cases(mixtures=False) if "clip_qkv" not in case.values[1]]  # nothing clips
PROMPT, PAST, GIVEN = 12, 30, 10
IDS = np.random.default_rng(0).integers(1, 60, 26)
WINDOWS = np.random.default_rng(1).integers(1, 60, (12, PROMPT))


def build(name, sizes, folder):
    sizes = {**sizes, **({"sliding_window": 64} if "sliding_window" in sizes else {})}
    model = build_tiny(FAMILIES[name].tiny_class, sizes)
    model.save_pretrained(folder)
    return model


def opened(paths, **options):
    return join(*(open_static_session(paths[kind], threads=1, **options) for kind in ("prompt", "decode")))


def step_by_step(decoder, ids, given):
    """Logits after a prompt and after each token that follows."""
    row = StaticRow(decoder=decoder, prompt=ids[:given])
    logits = row.read()
    return np.concatenate([logits, *(row.step(int(token)) for token in ids[given:])])


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_the_float_graphs_are_the_model(name, sizes, tmp_path):
    model = build(name, sizes, tmp_path / "model")
    graphs = emit_both(tmp_path / "model", tmp_path / "out", prompt=PROMPT, past=PAST)
    for each in graphs.models.values():
        onnx.checker.check_model(each, full_check=True)
        assert {node.domain for node in each.graph.node} <= {"", "ai.onnx"}
    decoder = opened(graphs.save("float"))
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(IDS[None])).logits[0].numpy()
    assert error(run_prompt(decoder.prompt, IDS[:GIVEN])[0], wanted[:GIVEN]).relative < 1e-5
    assert error(step_by_step(decoder, IDS, GIVEN), wanted[GIVEN - 1 :]).relative < 1e-5


@pytest.mark.parametrize("bits", [Bits(), Bits(products=8)], ids=["16", "16-8"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_prompt_and_steps_share_their_grids(name, bits, tmp_path):
    """Stepping over a cache of codes gives what reading all at once gives: both graphs round alike."""
    build(name, FAMILIES[name].tiny, tmp_path / "model")
    graphs = round_both(
        emit_both(tmp_path / "model", tmp_path / "out", prompt=PROMPT, past=PAST), WINDOWS, bits
    )
    decoder = opened(graphs.save("integers"))
    whole = run_prompt(decoder.prompt, WINDOWS[0])[0]
    stepped = step_by_step(decoder, WINDOWS[0], 4)
    # Only the order of float sums differs, which may move a value to the neighbouring code.
    assert error(stepped, whole[3:]).relative < (0.002 if bits.products == 16 else 0.05)


@pytest.mark.parametrize(
    ("bits", "bar"), [(Bits(), 0.03), (Bits(products=8), 0.1), (Bits(values=8, products=8), 0.2)]
)
def test_integers_stay_near_the_floats(bits, bar, tmp_path):
    build("gpt2", FAMILIES["gpt2"].tiny, tmp_path / "model")
    graphs = emit_both(tmp_path / "model", tmp_path / "out", prompt=PROMPT, past=PAST)
    integers = opened(round_both(graphs, WINDOWS, bits).save("integers"))
    floats = opened(graphs.save("float"))
    made, wanted = (run_prompt(each.prompt, WINDOWS[3])[0] for each in (integers, floats))
    assert 0 < error(made, wanted).relative < bar


def test_stored_codes_are_handed_over_as_they_are(tmp_path):
    build("gpt2", FAMILIES["gpt2"].tiny, tmp_path / "model")
    graphs = emit_both(
        tmp_path / "model", tmp_path / "out", prompt=PROMPT, past=PAST, min_dim=1, scheme="int8_channel"
    )
    before, after = (
        {
            each.name: onnx.numpy_helper.to_array(each, base_dir=str(graphs.folder))
            for each in model.graph.initializer
        }
        for model in (graphs.models["prompt"], round_both(graphs, WINDOWS, Bits()).models["prompt"])
    )
    name = next(each.removesuffix(".codes_IO") for each in before if each.endswith("c_attn.codes_IO"))
    for kind in ("codes_IO", "scales"):
        np.testing.assert_array_equal(after[f"{name}.{kind}"], before[f"{name}.{kind}"])


def test_every_value_between_operators_is_an_integer(tmp_path):
    build("llama", FAMILIES["llama"].tiny, tmp_path / "model")
    graphs = emit_both(tmp_path / "model", tmp_path / "out", prompt=PROMPT, past=PAST)
    for model in round_both(graphs, WINDOWS, Bits()).models.values():
        onnx.checker.check_model(model, full_check=True)
        makers = {name: node.op_type for node in model.graph.node for name in node.output}
        for node in model.graph.node:
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                continue
            for name in node.input:
                assert makers.get(name, "constant or input") in ("DequantizeLinear", "constant or input")
        floats = [each.name for each in model.graph.initializer if each.data_type == 1 and each.dims]
        assert all(name.endswith("/scales") for name in floats)
        caches = [each for each in model.graph.input if each.name.startswith("past")]
        assert all(each.type.tensor_type.elem_type == onnx.TensorProto.INT16 for each in caches)
        zeros = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
        gives = {
            node.output[0]: node.input[2] for node in model.graph.node if node.op_type == "DequantizeLinear"
        }
        products = [node for node in model.graph.node if node.op_type == "MatMul"]
        between = [
            node for node in products if makers[node.input[1]] and zeros[gives[node.input[1]]].ndim == 0
        ]
        assert len(between) == 2 * FAMILIES["llama"].tiny["num_hidden_layers"]
        assert all(zeros[gives[node.input[1]]].dtype == np.int16 for node in between), "8 bits of others"


def test_logits_of_one_token_are_those_among_all(tmp_path):
    build("qwen3", FAMILIES["qwen3"].tiny, tmp_path / "model")
    made = []
    for wants_all in (True, False):
        folder = tmp_path / str(wants_all)
        graphs = emit_both(tmp_path / "model", folder, prompt=PROMPT, past=PAST, gives_all_logits=wants_all)
        prompt = open_static_session(graphs.save("float")["prompt"], threads=1)
        made.append([run_prompt(prompt, IDS[:count])[0][-1] for count in (1, 5, PROMPT)])
        wide = next(each for each in prompt.get_outputs() if each.name == "logits").shape[1]
        assert wide == (PROMPT if wants_all else 1)
    assert error(np.stack(made[1]), np.stack(made[0])).relative < 1e-5


def test_the_cache_ends_and_says_so(tmp_path):
    build("gpt2", FAMILIES["gpt2"].tiny, tmp_path / "model")
    graphs = emit_both(tmp_path / "model", tmp_path / "out", prompt=PROMPT, past=14)
    decoder = opened(graphs.save("float"))
    made = list(generate(decoder, [[1, 2, 3]], max_new_tokens=12))
    assert len(made) == 12  # 14 in the cache, and one behind it
    row = StaticRow(decoder=decoder, prompt=IDS[:12])
    _ = row.read()
    for _ in range(3):
        row.step(1)
    with pytest.raises(InputError, match="up to 14"):
        row.step(1)
    with pytest.raises(InputError, match="1 to 12 tokens"):
        run_prompt(decoder.prompt, IDS[:13])


def test_what_has_no_static_graph_is_named(tmp_path):
    build("gpt2", FAMILIES["gpt2"].tiny, tmp_path / "model")
    model_map = inspect(str(tmp_path / "model"))
    assert why_not_static(model_map, StaticShape(tokens=40)) is None
    assert "40 positions" in why_not_static(model_map, StaticShape(tokens=1, past=40))
    build_tiny("MistralForCausalLM", FAMILIES["mistral"].tiny).save_pretrained(tmp_path / "window")
    reason = why_not_static(inspect(str(tmp_path / "window")), StaticShape(tokens=1, past=8))
    assert "8 tokens only" in reason
    build_tiny("OlmoeForCausalLM", FAMILIES["olmoe"].tiny).save_pretrained(tmp_path / "experts")
    reason = why_not_static(inspect(str(tmp_path / "experts")), StaticShape(tokens=1, past=8))
    assert "choose among experts" in reason


@given(
    low=st.floats(-100, 100, width=32),
    width=st.floats(2**-10, 100, width=32),
    bits=st.sampled_from([8, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_a_grid_reaches_its_ends_and_knows_zero(low, width, bits, seed):
    grid = ValueGrid.over(low, low + width, bits)
    values = np.random.default_rng(seed).uniform(low, low + width, 50).astype(np.float32)
    back = (grid.codes(values).astype(np.float64) - grid.zero) * grid.scale
    assert np.abs(back - values).max() <= grid.scale * 1.001  # half a step, and at the ends half of one more
    assert grid.codes(np.zeros(1, np.float32))[0] == grid.zero


@pytest.mark.parametrize("size", [0.0, 1e-3, 1e-14])
@pytest.mark.parametrize("scheme", ["int8_channel", None])
def test_a_bias_beside_weights_of_nearly_nothing_is_kept(scheme, size, tmp_path):
    """Its grid is that of its products' sums: stored weights get a coarser one where it has no code."""
    torch.manual_seed(0)
    model = build_tiny("GPT2LMHeadModel", FAMILIES["gpt2"].tiny)
    for block in model.transformer.h:
        block.mlp.c_fc.weight.data[:, 0] *= size
        block.mlp.c_fc.bias.data[0] = 3.0
    model.save_pretrained(tmp_path / "model")
    options = {"min_dim": 1, "scheme": scheme} if scheme else {}
    graphs = emit_both(tmp_path / "model", tmp_path / "out", prompt=PROMPT, past=PAST, **options)
    decoder = opened(round_both(graphs, WINDOWS, Bits()).save("integers"))
    made = run_prompt(decoder.prompt, WINDOWS[0])[0]
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(WINDOWS[:1])).logits[0].numpy()
    assert error(made, wanted).relative < 0.03


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "mistral", "gemma3", "phi3"])
@pytest.mark.parametrize("asked", [{}, {"prompt": 3}, {"prompt": 3, "cache": 5}], ids=str)
def test_sizes_that_nobody_typed_fit_the_model(name, asked, tmp_path):
    build_tiny(FAMILIES[name].tiny_class, FAMILIES[name].tiny).save_pretrained(tmp_path)
    model_map = inspect(str(tmp_path))
    recipe = override(Recipe(target="npu"), {f"static.{key}": size for key, size in asked.items()})
    made = settle_static(recipe, model_map, "decoder")
    assert made.scheme == "int8_static16"
    sizes = made.static.model_dump()
    assert {**sizes, **asked} == sizes
    assert 2 <= sizes["prompt"] <= sizes["cache"]
    assert why_not_static(model_map, StaticShape(tokens=sizes["prompt"])) is None
    assert why_not_static(model_map, StaticShape(tokens=1, past=sizes["cache"])) is None
    if not asked:  # and one more token would not fit
        assert why_not_static(model_map, StaticShape(tokens=1, past=sizes["cache"] + 1)) is not None
