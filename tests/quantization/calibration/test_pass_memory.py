"""What a calibration takes of memory: one block's statistics and one batch beside the model, not more."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.once

MEASURED = """
import resource, sys, numpy as np, torch, transformers
from pathlib import Path
from quantkit.quantization.calibration.passes import collect
from quantkit.model.inspect import map_module

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

depth, width, windows = map(int, sys.argv[2:])
bare = peak()
config = transformers.GPT2Config(n_layer=depth, n_embd=width, n_head=width // 64)
model = transformers.GPT2LMHeadModel(config).eval()
model_map = map_module(model, name="random")
collect(
    model,
    np.random.default_rng(0).integers(0, 50257, (windows, 512)),
    requested=dict.fromkeys(model_map.matrices, frozenset({"second_moment"})),
    blocks=[block.name for block in model_map.blocks],
    folder=Path(sys.argv[1]),
)
print(peak() - bare - 4 * sum(parameter.numel() for parameter in model.parameters()))
"""


def bytes_beside_the_model(folder, *sizes: int) -> int:
    command = [sys.executable, "-c", MEASURED, str(folder), *map(str, sizes)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_second_moments_of_a_gpt2_small_shape_take_less_than_a_gigabyte(tmp_path):
    """The number of windows does not matter, as the next test shows; 2 take less time than 32."""
    assert bytes_beside_the_model(tmp_path, 12, 768, 2) < 1e9


@pytest.mark.slow
def test_memory_grows_neither_with_the_text_nor_with_depth(tmp_path):
    few = bytes_beside_the_model(tmp_path / "few", 2, 512, 2)
    assert bytes_beside_the_model(tmp_path / "many", 2, 512, 12) < few + 30e6
    # Eight more blocks' second moments would be 8 * 22 MB.
    assert bytes_beside_the_model(tmp_path / "deep", 10, 512, 2) < few + 60e6
