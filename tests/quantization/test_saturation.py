"""Why x86 without VNNI needs 7-bit weights for a scale a row, and that it needs nothing for blocks.

VPMADDUBSW multiplies unsigned with signed bytes and adds two neighbours in 16 bits, cutting off what does not
fit. The oracle is that instruction written in numpy; where valgrind is installed, whose processor has AVX2
and no VNNI, onnxruntime's own kernels run on it too.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys

import numpy as np
import pytest
from exporting import build_tiny, error, export
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from stored import open_checkpoint

from quantkit.plan.formats import SCHEMES, Format, Grid
from quantkit.plan.targets import TARGETS, format_on
from quantkit.quantization.grid import encode, range_of
from quantkit.runtime.decoder import open_decoder

INT16 = np.iinfo(np.int16)
GRIDS = {
    name: format_on(target, Format(grid=Grid(), activations="tensor")).grid
    for name, target in TARGETS.items()
}
SEVEN_BITS = GRIDS["cpu-avx2"]
SIZES = {"vocab_size": 61, "n_embd": 96, "n_layer": 2, "n_head": 4, "n_positions": 40}
IDS = np.random.default_rng(0).integers(0, 61, (2, 24))
pytestmark = pytest.mark.once


def multiply_add(unsigned_TI, signed_IO):
    """x W as VPMADDUBSW and then VPMADDWD compute it: pairs cut off at 16 bits, their sum exact in 32."""
    products = unsigned_TI[:, :, None].astype(np.int64) * signed_IO[None].astype(np.int64)
    pairs = products[:, 0::2] + products[:, 1::2]
    return np.clip(pairs, INT16.min, INT16.max).sum(axis=1)


def exact(unsigned_TI, signed_IO):
    return unsigned_TI.astype(np.int64) @ signed_IO.astype(np.int64)


def on_grid(weight_OI, grid):
    return encode(weight_OI, range_of(weight_OI, grid)[0], grid)[:, 0].T


def test_large_weights_and_inputs_are_cut_off_at_8_bits_and_not_at_7():
    random = np.random.default_rng(0)
    weight_OI = random.uniform(0.8, 1, (16, 64)).astype(np.float32) * random.choice([-1, 1], (16, 1))
    x_TI = random.integers(200, 256, (4, 64)).astype(np.uint8)
    eight, seven = (on_grid(weight_OI.astype(np.float32), grid) for grid in (Grid(), SEVEN_BITS))
    lost = np.abs(multiply_add(x_TI, eight) - exact(x_TI, eight)) / np.abs(exact(x_TI, eight))
    assert lost.min() > 0.2, "every product is wrong"
    assert np.array_equal(multiply_add(x_TI, seven), exact(x_TI, seven))
    # What the coarser grid costs instead is within half a step of each weight.
    scales = range_of(weight_OI.astype(np.float32), SEVEN_BITS)[0]
    assert np.abs(seven.T * scales - weight_OI).max() <= scales.max() / 2 * (1 + 1e-6)


def test_no_pair_of_7_bit_weights_can_leave_16_bits():
    """By interval arithmetic, over every code of the grid and every input, in whatever pairs."""
    codes, inputs = (SEVEN_BITS.lowest, SEVEN_BITS.largest), (0, 255)
    ends = [code * x for code, x in itertools.product(codes, inputs)]
    low, high = 2 * min(ends), 2 * max(ends)
    assert (low, high) == (-32640, 32130)
    assert INT16.min <= low <= high <= INT16.max
    assert 2 * 255 * Grid().largest > INT16.max, "and of 8 bits some can"
    assert 2 * 255 * (SEVEN_BITS.largest + 2) > INT16.max, "no wider symmetric grid is safe for all pairs"


@given(
    arrays.arrays(np.uint8, (3, 8)),
    arrays.arrays(np.int8, (8, 5), elements=st.integers(SEVEN_BITS.lowest, SEVEN_BITS.largest)),
    st.permutations(range(8)),
)
def test_whatever_the_order_of_pairs(x_TI, codes_IO, order):
    assert np.array_equal(multiply_add(x_TI[:, order], codes_IO[order]), exact(x_TI, codes_IO))


@pytest.mark.parametrize("target", [name for name, row in TARGETS.items() if not row.is_static])
def test_only_a_scale_a_row_is_made_coarser(target):
    for scheme in SCHEMES.values():
        for wanted in (scheme.body, scheme.head):
            made = format_on(TARGETS[target], wanted)
            is_coarse = TARGETS[target].channel_bits < 8 and wanted.grid.block is None
            assert made.grid.bits == (7 if is_coarse else wanted.grid.bits)
            assert (made.activations, made.grid.block) == (wanted.activations, wanted.grid.block)
            assert (made == wanted) is not is_coarse


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model whose channel products all have large neighbours of one sign, for two targets and as blocks."""
    folder = tmp_path_factory.mktemp("original")
    model = build_tiny("GPT2LMHeadModel", SIZES)
    for name, parameter in model.named_parameters():
        if "mlp" in name and name.endswith("weight"):
            parameter.data = 0.2 + 0.02 * parameter.data
    model.save_pretrained(folder)
    made = {}
    for target, scheme in (("cpu", "int8_channel"), ("cpu-avx2", "int8_channel"), ("cpu", "int8_block32")):
        made[target, scheme] = tmp_path_factory.mktemp(f"{target}-{scheme}")
        export(folder, made[target, scheme], scheme=scheme, target=target)
    made["float"] = tmp_path_factory.mktemp("float")
    export(folder, made["float"], min_dim=1 << 40)
    return made


def logits_of(folder):
    return open_decoder(folder, threads=1).logits(IDS)


def test_the_files_codes_keep_to_the_grid(exported):
    for target, limit in (("cpu", 127), ("cpu-avx2", 63)):
        checkpoint = open_checkpoint(exported[target, "int8_channel"] / "weights.safetensors")
        names = [name for name in checkpoint.slots if name.endswith(".codes_IO")]
        peaks = {int(np.abs(checkpoint.read(name).astype(int)).max()) for name in names}
        assert len(names) == 8
        assert peaks == {limit}
        assert {checkpoint.read(name).dtype for name in names} == {np.dtype(np.int8)}


def test_the_coarser_grid_costs_about_one_bit(exported):
    wanted = logits_of(exported["float"])
    errors = [error(logits_of(exported[target, "int8_channel"]), wanted) for target in ("cpu", "cpu-avx2")]
    assert errors[0].relative < errors[1].relative < 0.05
    assert errors[1].absolute < 0.05 * np.abs(wanted).max()


WITHOUT_VNNI = """
import sys, numpy, onnxruntime
for path, made in zip(sys.argv[2::2], sys.argv[3::2]):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if "exact" in made:
        options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    numpy.save(made, session.run(["logits"], dict(numpy.load(sys.argv[1])))[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("valgrind") is None, reason="valgrind, a processor without VNNI, is not here"
)
def test_onnxruntime_on_a_processor_without_vnni(exported, tmp_path):
    """Its own kernels: wrong by much with 8 bits, right with 7, with blocks, or asked for exact sums."""
    feeds = {
        "input_ids": IDS,
        "attention_mask": np.full_like(IDS, IDS.shape[1]),
        "position_ids": np.tile(np.arange(IDS.shape[1]), (2, 1)),
    }
    for layer, kind in itertools.product(range(SIZES["n_layer"]), ("key", "value")):
        feeds[f"past_key_values.{layer}.{kind}"] = np.zeros((2, 4, 0, 24), np.float32)
    np.savez(tmp_path / "feeds.npz", **feeds)
    runs = {
        "cut off": exported["cpu", "int8_channel"],
        "7 bits": exported["cpu-avx2", "int8_channel"],
        "blocks": exported["cpu", "int8_block32"],
        "exact": exported["cpu", "int8_channel"],
    }
    arguments = [str(each) for name in runs for each in (runs[name] / "model.onnx", tmp_path / f"{name}.npy")]
    command = ["valgrind", "--tool=none", "-q", sys.executable, "-c", WITHOUT_VNNI]
    ran = subprocess.run(
        [*command, str(tmp_path / "feeds.npz"), *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lost = {name: error(np.load(tmp_path / f"{name}.npy"), logits_of(runs[name])) for name in runs}
    assert lost["cut off"].relative > 0.05
    assert lost["7 bits"].relative < 1e-4
    assert lost["exact"].relative < 1e-4
    assert lost["blocks"].relative < 0.02, "a float sum may fall otherwise, and with it a code of an input"
