"""Rounding on workers: the bytes of one process, whatever their number, and with one of them killed."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import psutil
import pytest
from exporting import build_tiny

from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.weights.open import open_weights
from quantkit.model.weights.torch_model import torch_model
from quantkit.plan.formats import in_blocks
from quantkit.plan.select import choose
from quantkit.quantization.calibration.passes import collect
from quantkit.quantization.calibration.store import MatrixStatistics
from quantkit.quantization.checkpoint import write_checkpoint
from quantkit.quantization.layout import contents_of
from quantkit.quantization.rounding import FITS
from quantkit.quantization.rounding.apply import quantized_parts
from quantkit.quantization.rounding.on_workers import parts_on_workers
from quantkit.workers.open import open_workers
from quantkit.workers.record import WorkerSettings

pytestmark = pytest.mark.once
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """(contents, weights, statistics) of a tiny model in a folder."""
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny("LlamaForCausalLM", SIZES).save_pretrained(folder / "model")
    source = open_source(folder / "model")
    model_map = inspect_source(source)
    weights = open_weights(source, model_map, random_weights=False)
    file = collect(
        torch_model(source, model_map, weights),
        np.random.default_rng(0).integers(0, 61, (6, 32)),
        requested=dict.fromkeys(model_map.matrices, frozenset({"second_moment", "held_out"})),
        blocks=[block.name for block in model_map.blocks],
        folder=folder / "statistics",
    )
    contents = contents_of(model_map, choose(model_map, min_dim=1), in_blocks(32, bits=4))
    return contents, weights, MatrixStatistics(file=file)


def written(path, calibrated, fit, number, progress=lambda _: None):
    """(bytes of the checkpoint, rounding errors by pack)."""
    contents, weights, statistics = calibrated
    losses = {}
    options = {"gain_offset": 0.0, "fit": fit, "statistics": statistics, "losses": losses}
    with ExitStack() as stack:
        if number:
            workers = stack.enter_context(open_workers(WorkerSettings(number=number)))
            parts = parts_on_workers(workers, contents, weights, progress=progress, **options)
        else:
            parts = quantized_parts(contents, weights, progress=progress, **options)
        write_checkpoint(path, contents.tensors(), parts, {})
    return path.read_bytes(), [*losses.items()]


@pytest.mark.parametrize("fit", FITS)
def test_bytes_and_errors_do_not_depend_on_the_number_of_workers(tmp_path, calibrated, fit):
    alone = written(tmp_path / "alone", calibrated, fit, 0)
    for number in (1, 2, 4) if fit == "gptq" else (2,):
        progress = []
        assert written(tmp_path / f"{number}", calibrated, fit, number, progress.append) == alone
        contents = calibrated[0]
        assert sum(progress) == sum(pack.out_features * pack.in_features for pack in contents.packs)


def test_a_killed_worker_costs_no_byte(tmp_path, calibrated, capfd):
    killed = []

    def kill_the_first_worker(_):
        if not killed:
            killed.append(psutil.Process().children()[0])
            killed[0].kill()
            time.sleep(0.1)

    cut = written(tmp_path / "cut", calibrated, "gptq", 1, kill_the_first_worker)
    assert cut == written(tmp_path / "alone", calibrated, "gptq", 0)
    assert f"worker {killed[0].pid} ended (SIGKILL)" in capfd.readouterr().err
