"""Outlier columns: chosen by peaks, multiplied in float, and zeros in the integer product."""

from __future__ import annotations

import copy
import json

import numpy as np
import onnxruntime
import pytest
import torch
from exporting import build_tiny, error, export, observe
from fake_quantize import fake_quantize
from stored import open_checkpoint

import quantkit
from quantkit.model.families import FAMILIES
from quantkit.model.model_map import Role
from quantkit.plan.formats import SCHEMES, Format, Grid
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.quantization.grid import decode_all
from quantkit.quantization.rounding.apply import prepared_fit
from quantkit.quantization.rounding.outliers import Outliers, outlier_columns
from quantkit.quantization.simulate import beside_outliers, round_tokens
from quantkit.runtime.cpu_session import open_on_cpu
from quantkit.runtime.decoder import open_decoder

SIZES = {
    "vocab_size": 61,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = np.random.default_rng(0).integers(0, 61, (2, 24))
LOUD = (5, 40, 77)  # channels of the residual stream that stand out
NAMES = [name for name in SCHEMES if name.endswith("_outliers")]


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def loud(request, tmp_path_factory):
    """(folder, logits in float64, model) of a Llama with three loud channels behind each norm."""
    model = build_tiny("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": request.param})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter[list(LOUD)] *= 25.0
    folder = tmp_path_factory.mktemp("loud")
    model.save_pretrained(folder)
    with torch.inference_mode():
        exact = model.double()(input_ids=torch.from_numpy(IDS)).logits.numpy()
    return folder, exact, model.float()


def rms(made: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(((made - exact) ** 2).mean()) / np.sqrt((exact**2).mean()))


@pytest.mark.parametrize("name", NAMES)
def test_loud_columns_no_longer_cost_accuracy(name, loud, tmp_path):
    folder, exact, model = loud
    errors = {}
    for scheme in (name, name.removesuffix("_outliers")):
        export(folder, tmp_path / scheme, scheme=scheme, statistics=observe(model, IDS))
        errors[scheme] = rms(open_decoder(tmp_path / scheme, threads=1).logits(IDS), exact)
    assert errors[name] < 0.6 * errors[name.removesuffix("_outliers")]
    assert errors[name] < 0.12


def test_a_tied_table_keeps_whole_codes_and_other_weights_lose_their_outliers(loud, tmp_path):
    folder, _, model = loud
    result = export(folder, tmp_path, scheme="int8_block64_outliers", statistics=observe(model, IDS))
    checkpoint = open_checkpoint(tmp_path / "weights.safetensors")
    for pack in result.contents.packs:
        columns_I = checkpoint.read(f"{pack.name}.outlier_columns")
        assert len(columns_I) == pack.in_features // 32
        if pack.layers[0].role in (Role.ATTENTION_QUERY, Role.FFN_UP, Role.LM_HEAD):
            assert set(LOUD) <= set(columns_I.tolist())
        codes = checkpoint.read(f"{pack.name}.codes").reshape(pack.out_features, -1)[:, columns_I]
        is_tied = pack.layers[0].tied_to is not None
        assert (codes != 128).any() is np.bool_(is_tied)
        if pack.layers[0].role is Role.ATTENTION_OUT:
            weight_OI = dict(model.named_parameters())[f"{pack.name}.weight"].detach().numpy()
            stored_IO = checkpoint.read(f"{pack.name}.outlier_weight_IO")
            np.testing.assert_array_equal(stored_IO, weight_OI[:, columns_I].T.astype(np.float16))


@pytest.mark.once
def test_ties_and_order_of_columns():
    assert outlier_columns(np.array([1.0, 7.0, 7.0, 0.0, 9.0], np.float32), 3).tolist() == [1, 2, 4]
    assert outlier_columns(np.zeros(4, np.float32), 2).tolist() == [0, 1], "never called: any will do"


@pytest.mark.once
def test_rounding_beside_outliers_is_the_rounding_of_the_rest():
    x = torch.tensor([[0.5, 100.0, -1.0, 0.25]])
    rounded = beside_outliers(round_tokens, np.array([1]), x)
    assert rounded[0, 1] == 100.0
    assert torch.allclose(rounded[0, [0, 2, 3]], x[0, [0, 2, 3]], atol=1 / 254)
    assert (round_tokens(x)[0, [0, 3]] - x[0, [0, 3]]).abs().max() > 0.1, "without, a step is 0.8"


@pytest.mark.once
def test_statistics_without_columns():
    moment_II = np.arange(9, dtype=np.float32).reshape(3, 3)
    statistics = InputStatistics(num_rows=4, second_moment_II=moment_II, peak_I=np.ones(3, np.float32))
    others = statistics.without(np.array([1]))
    np.testing.assert_array_equal(others.second_moment_II, [[0, 0, 2], [0, 0, 0], [6, 0, 8]])
    np.testing.assert_array_equal(others.peak_I, [1, 1, 1])
    assert moment_II[1, 1] == 4, "a copy"


@pytest.mark.once
def test_narrow_inputs_have_fewer_outliers():
    chosen = Format(grid=Grid(), activations="token", outliers=32)
    assert [chosen.num_outliers(width) for width in (8, 96, 512, 4096)] == [0, 3, 16, 32]


@pytest.mark.once
@pytest.mark.parametrize("fit", ["rtn", "gptq"])
def test_the_command_chooses_columns_and_makes_the_same_bytes_again(fit, tmp_path):
    unmeasured = {"accuracy": False, "latency": False, "memory": False}
    options = {"scheme": "int8_token_outliers", "fit": fit, **unmeasured}
    options |= {"calibration_windows": 4, "calibration_length": 64}
    first = quantkit.quantize("demo", output=tmp_path / "a", **options)
    again = quantkit.quantize("demo", output=tmp_path / "b", **options)
    assert (first.folder / "model.onnx").read_bytes() == (again.folder / "model.onnx").read_bytes()
    layers = json.loads((first.folder / "manifest.json").read_text())["plan"]["layers"]
    assert all(layer["quantized"] for layer in layers)
    assert error(first.logits(IDS % 40), first.logits(IDS % 40)).relative == 0


@pytest.mark.parametrize("fit", ["gptq", "output"])
def test_a_fit_of_a_tied_table_spends_no_accuracy_of_its_loud_columns(fit):
    """Codes of a shared table are whole, and its loud columns are multiplied by what they decode to."""
    random = np.random.default_rng(0)
    x_TI = random.standard_normal((400, 96)).astype(np.float32)
    x_TI[:, LOUD] *= 30
    weight_OI = random.standard_normal((40, 96)).astype(np.float32)
    weight_OI[:, LOUD] *= 8
    statistics = InputStatistics(num_rows=400, second_moment_II=x_TI.T @ x_TI / 400)
    grid = Grid(block=32)
    tied = Outliers(columns_I=np.array(LOUD), is_tied=True)
    losses = {}
    for name in (fit, "rtn"):
        encoded = prepared_fit(name, grid, tied.seen_by_fit(statistics)).encode(weight_OI)
        lost_OI = weight_OI - decode_all(encoded, 96)
        losses[name] = np.linalg.norm(x_TI @ lost_OI.T) / np.linalg.norm(x_TI @ weight_OI.T)
    assert losses[fit] <= 1.01 * losses["rtn"]
    own = Outliers(columns_I=np.array(LOUD), is_tied=False).seen_by_fit(statistics)
    assert not own.second_moment_II[LOUD, :].any()


@pytest.mark.once
def test_other_projections_keep_their_columns_where_one_is_calibrated(tmp_path):
    """A static scheme of one projection calibrates that one; the others have peaks all the same."""
    unmeasured = {"accuracy": False, "latency": False, "memory": False}
    few = {"calibration_windows": 2, "calibration_length": 64}
    made = quantkit.quantize(
        "demo",
        output=tmp_path / "mixed",
        scheme="int8_token_outliers",
        fit="rtn",
        layers={"ffn_down": "int8_static8", "attention_query": "int8_block32"},
        **unmeasured,
        **few,
    )
    assert np.isfinite(made.logits(IDS % 40)).all()


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_queries_of_distances_have_their_outlier_columns(name, tmp_path):
    """DeBERTa's products of weights alone, which a runtime computes as it opens the file."""
    model = build_tiny("DebertaV2Model", {**FAMILIES["deberta_v2"].tiny, "hidden_size": 64}, spread=0.5)
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "made", scheme=name, statistics=observe(model, IDS))
    session = open_on_cpu(str(tmp_path / "made" / "model.onnx"), onnxruntime.SessionOptions())
    feeds = {
        "input_ids": IDS[:1],
        "attention_mask": np.ones((1, 24), np.int64),
        "token_type_ids": 0 * IDS[:1],
    }
    made = session.run(
        ["last_hidden_state"], {value.name: feeds[value.name] for value in session.get_inputs()}
    )
    stored = fake_quantize(copy.deepcopy(model), open_checkpoint(tmp_path / "made" / "weights.safetensors"))
    with torch.inference_mode():
        wanted = stored(input_ids=torch.from_numpy(IDS[:1])).last_hidden_state.numpy()
    assert error(made[0], wanted).relative < 1e-3
