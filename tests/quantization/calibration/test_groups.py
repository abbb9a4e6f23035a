"""Groups of windows: merged sums against numpy, passes on workers that are killed or share a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from calibrating import ALL, check, everything, inputs_of
from exporting import build_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.model.inspect import inspect_source
from quantkit.model.load import open_source
from quantkit.model.names import modules_by_name
from quantkit.model.weights.open import open_weights
from quantkit.model.weights.torch_model import torch_model
from quantkit.quantization.calibration import groups, running, store
from quantkit.quantization.calibration.claims import LEASE_SECONDS, claim, give_up, new_owner
from quantkit.quantization.calibration.inputs import MOST_GROUPS, open_run
from quantkit.quantization.calibration.passes import collect
from quantkit.quantization.calibration.statistics import InputStatistics
from quantkit.workers.open import open_workers
from quantkit.workers.record import WorkerSettings

pytestmark = pytest.mark.once
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS = np.random.default_rng(0).integers(1, 60, (11, 13))  # 6 groups of 2 windows, the last of one


def sums_of(x_TI, names, number, count):
    sums = running.start(x_TI.shape[1], frozenset(names), 3, group=number, num_groups=count)
    running.add(sums, torch.from_numpy(x_TI))
    running.close(sums)
    return sums


def merged_in_memory(parts, names=ALL):
    total = None
    for number, part in enumerate(parts):
        total = running.merged(total, sums_of(part, names, number, len(parts)))
    return running.finish(total)


def merged_from_disk(folder, parts, names=ALL):
    for number, part in reversed([*enumerate(parts)]):  # the order in which they are made does not matter
        groups.write_group(folder, 0, number, {"x": sums_of(part, names, number, len(parts))})
    totals = {}
    for number in range(len(parts)):
        groups.merge_into(totals, groups.read_group(folder, 0, number))
    return running.finish(totals["x"])


def bits_of(finished):
    arrays, values = finished
    return {name: array.tobytes() for name, array in arrays.items()}, values


@settings(max_examples=15)
@given(
    num_rows=st.integers(1, 1500),
    width=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 1500), max_size=5),
    seed=st.integers(0, 2**31),
)
def test_merged_groups_are_the_definition_and_have_the_bits_of_files(
    tmp_path_factory, num_rows, width, cuts, seed
):
    chances = np.random.default_rng(seed)
    x_TI = (chances.normal(size=(num_rows, width)) * np.exp(chances.normal(size=width))).astype(np.float32)
    parts = np.split(x_TI, sorted(min(cut, num_rows) for cut in cuts))  # some of them empty
    arrays, values = merged_in_memory(parts)
    check(InputStatistics(**arrays, **values), x_TI.astype(np.float64), tolerance=2e-6)
    again = merged_from_disk(tmp_path_factory.mktemp("groups"), parts)
    assert bits_of(again) == bits_of((arrays, values))


def test_small_changes_beside_a_large_mean_that_moves_survive():
    chances = np.random.default_rng(0)
    parts = [
        np.stack([1000 + 7 * number + chances.normal(size=900), 1e-3 * chances.normal(size=900)], 1)
        for number in range(8)
    ]
    parts = [part.astype(np.float32) for part in parts]
    arrays, _ = merged_in_memory(parts, {"second_moment", "mean"})
    exact = np.concatenate(parts).astype(np.float64)
    wanted = exact.T @ exact / len(exact)
    root = np.sqrt(np.diag(wanted))
    assert (np.abs(arrays["second_moment_II"] - wanted) / np.outer(root, root)).max() < 1e-6


def test_rows_held_out_are_a_fair_share_of_every_group():
    parts = np.split(np.arange(40_000, dtype=np.float32)[:, None], 8)
    arrays, _ = merged_in_memory(parts, {"second_moment", "held_out", "sample"})
    for name, most in (("held_out_TI", running.HELD_OUT_ROWS), ("sample_TI", running.SAMPLE_ROWS)):
        rows = arrays[name][:, 0]
        assert len(np.unique(rows)) == most
        in_groups = np.histogram(rows, bins=8, range=(0, 40_000))[0]
        assert np.abs(in_groups - most / 8).max() < 5 * np.sqrt(most / 8)


@pytest.mark.parametrize("num_windows", [1, 3, 4, 5, 64, 65, 1000])
def test_groups_are_whole_batches_that_the_text_decides(num_windows):
    model = build_tiny("LlamaForCausalLM", SIZES)
    tokens = np.ones((num_windows, 2), np.int64)
    run = open_run(model, tokens, everything(["lm_head"]), (), batch=4, seed=0)
    assert [window for group in run.groups for window in group] == [*range(num_windows)]
    assert len(run.groups) <= MOST_GROUPS
    assert all(len(group) % 4 == 0 for group in run.groups[:-1])
    batches = [windows.shape[0] for group in run.groups for _, windows in run.batches(group)]
    assert batches == [windows.shape[0] for _, windows in run.batches()]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny("LlamaForCausalLM", SIZES).save_pretrained(folder)
    return folder


class Counting:
    """A source of tensors that counts the rows that are read of each."""

    def __init__(self, source):
        self.source, self.num_read = source, Counter()

    def __getattr__(self, name):
        return getattr(self.source, name)

    def read(self, name, start=0, count=None):
        rows = self.source.read(name, start, count)
        self.num_read[name] += len(rows) / self.source.shape(name)[0]
        return rows


def calibrate(
    model_folder,
    folder,
    workers=None,
    *,
    has_blocks=True,
    tokens=TOKENS,
    streams=False,
    weights=None,
    **options,
):
    source = open_source(model_folder)
    model_map = inspect_source(source)
    weights = weights or open_weights(source, model_map, random_weights=False)
    build = partial(torch_model, source, model_map, weights)
    streamed = partial(build, streams=True, keeps_block=True)
    return collect(
        streamed() if workers or streams else build(),
        tokens,
        requested=everything(model_map.matrices),
        blocks=[block.name for block in model_map.blocks] if has_blocks else (),
        folder=folder,
        batch=2,
        memory_bytes=200_000,
        workers=workers,
        rebuild=streamed if workers else None,
        **options,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("number", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_workers_leaves_the_bytes_of_one_process(tmp_path, model_folder, number):
    alone = calibrate(model_folder, tmp_path / "alone")
    reported = []
    with open_workers(WorkerSettings(number=number)) as workers:
        calibrate(model_folder, tmp_path / "spread", workers, progress=reported.append)
    assert contents(tmp_path / "spread") == contents(tmp_path / "alone")
    assert sum(reported) == TOKENS.size
    module = torch_model_of(model_folder)
    rows = inputs_of(module, TOKENS, {name: modules_by_name(module)[name] for name in alone.requested})
    for name in alone.requested:
        check(alone.read(name), rows[name], tolerance=2e-6)


@pytest.mark.parametrize("has_blocks", [True, False])
def test_streamed_blocks_leave_the_same_bytes(tmp_path, model_folder, has_blocks):
    options = {"has_blocks": has_blocks, "tokens": TOKENS[:10]}  # batches of one size, so one recorded pass
    calibrate(model_folder, tmp_path / "held", **options)
    source = open_source(model_folder)
    weights = Counting(open_weights(source, inspect_source(source), random_weights=False))
    calibrate(model_folder, tmp_path / "streamed", streams=True, weights=weights, **options)
    assert contents(tmp_path / "streamed") == contents(tmp_path / "held")
    if has_blocks:  # for the key, for the recorded pass, and for all windows
        in_blocks = {name: times for name, times in weights.num_read.items() if ".layers." in name}
        assert in_blocks
        assert set(in_blocks.values()) == {3}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_model_that_is_run_whole_too(tmp_path, model_folder):
    alone = calibrate(model_folder, tmp_path / "alone", has_blocks=False)
    assert alone.way == "whole: no blocks are known"
    with open_workers(WorkerSettings(number=2)) as workers:
        calibrate(model_folder, tmp_path / "spread", workers, has_blocks=False)
    assert contents(tmp_path / "spread") == contents(tmp_path / "alone")


def torch_model_of(model_folder):
    source = open_source(model_folder)
    model_map = inspect_source(source)
    return torch_model(source, model_map, open_weights(source, model_map, random_weights=False))


class StopError(Exception):
    pass


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_run_goes_on_with_groups_that_stand_undamaged(tmp_path, model_folder):
    calibrate(model_folder, tmp_path / "alone")

    def stop_after(num_tokens):
        left = [num_tokens]

        def progress(count):
            left[0] -= count
            if left[0] <= 0:
                raise StopError

        return progress

    for name, number in (("on workers", 1), ("in one process", None)):
        folder = tmp_path / name
        with open_workers(WorkerSettings(number=1)) as workers, pytest.raises(StopError):
            calibrate(model_folder, folder, workers, progress=stop_after(TOKENS.size // 2))
        standing = sorted(folder.glob("group_*.json"))
        assert standing
        damaged = folder / standing[-1].name.replace("group", "sums").replace("json", "bin")
        content = bytearray(damaged.read_bytes())
        content[-3] ^= 1
        damaged.write_bytes(content)
        with open_workers(WorkerSettings(number=number)) as workers:
            calibrate(model_folder, folder, workers)
        assert contents(folder) == contents(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_killed_worker_costs_time_and_no_byte(tmp_path, model_folder, capfd):
    calibrate(model_folder, tmp_path / "alone")
    killed = []

    def kill_once(_):
        if not killed:
            killed.append(psutil.Process().children()[0].pid)
            psutil.Process(killed[0]).kill()

    with open_workers(WorkerSettings(number=2)) as workers:
        calibrate(model_folder, tmp_path / "cut", workers, progress=kill_once)
    assert f"worker {killed[0]} ended (SIGKILL)" in capfd.readouterr().err
    assert contents(tmp_path / "cut") == contents(tmp_path / "alone")


FILLS = """
import sys, torch
from pathlib import Path
from test_groups import calibrate, open_workers, WorkerSettings
torch.set_num_threads(1)
with open_workers(WorkerSettings(number=1)) as workers:
    print(calibrate(Path(sys.argv[1]), Path(sys.argv[2]), workers).is_finished)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_processes_fill_one_folder(tmp_path, model_folder):
    tests = Path(__file__).parents[2]
    paths = [str(Path(__file__).parent), str(tests), str(tests.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", FILLS, str(model_folder), str(tmp_path / "shared")]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate()[0] for process in processes] == ["True\n", "True\n"]
    calibrate(model_folder, tmp_path / "alone")
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_group_that_another_host_has_claimed_is_left_to_it(tmp_path, model_folder):
    """The other host is played here: it does its group by hand, while the run waits."""
    calibrate(model_folder, tmp_path / "alone")
    folder, theirs = tmp_path / "shared", {"host": "another", "process": 1, "name": "theirs"}
    folder.mkdir()
    late = []

    def give_up_late():
        while not groups.has_group(folder, 1, 0):  # the others go on
            time.sleep(0.1)
        time.sleep(1)
        late.append(groups.has_group(folder, 0, 1) or store.has_part(folder, 1))
        give_up(folder / "claim_0000_0001.json")

    with open_workers(WorkerSettings(number=1)) as workers:
        thread = threading.Thread(target=give_up_late)
        original = store.clear

        def cleared(place):
            original(place)
            claim(folder / "claim_0000_0001.json", theirs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "clear", cleared)
            thread.start()
            calibrate(model_folder, folder, workers)
        thread.join()
    assert late == [False], "the group waited for its owner, and no part was merged without it"
    assert contents(folder) == contents(tmp_path / "alone")


def test_claims_lapse_with_their_time_or_process(tmp_path):
    path, ours = tmp_path / "claim", new_owner()
    theirs = {"host": "another", "process": 1, "name": "theirs"}
    assert claim(path, theirs)
    assert not claim(path, ours)
    assert claim(path, theirs), "the worker of the same process may try again"
    old = time.time() - LEASE_SECONDS - 1
    os.utime(path, (old, old))
    assert claim(path, ours)
    assert not claim(path, theirs)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    give_up(path)
    assert claim(path, ours | {"process": ended.pid, "name": "ended"})
    assert claim(path, ours)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_error_in_a_worker_is_that_of_one_process(tmp_path, model_folder):
    with (
        open_workers(WorkerSettings(number=1)) as workers,
        pytest.raises(InputError, match=r"token ids from 90 to 90"),
    ):
        calibrate(model_folder, tmp_path, workers, tokens=np.full((2, 4), 90))
