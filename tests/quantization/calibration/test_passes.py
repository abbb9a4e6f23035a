"""The calibration pass on models that are hard on it, and runs that are cut short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from calibrating import ALL, check, everything, inputs_of
from exporting import build_tiny
from torch import nn

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.quantization.calibration import store
from quantkit.quantization.calibration.passes import collect

pytestmark = pytest.mark.once

TOKENS = np.random.default_rng(0).integers(1, 60, (5, 13))
GPT2_MATRICES = [
    f"transformer.h.{block}.{name}"
    for block in range(2)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
]
GPT2_BLOCKS = ["transformer.h.0", "transformer.h.1"]


def gpt2(dtype=torch.float64):
    return build_tiny("GPT2LMHeadModel", dict(FAMILIES["gpt2"].tiny), dtype=dtype)


def run(model, folder, *, wanted=None, blocks=GPT2_BLOCKS, tokens=TOKENS, **options):
    wanted = everything([*GPT2_MATRICES, "lm_head"]) if wanted is None else wanted
    return collect(model, tokens, requested=wanted, blocks=blocks, folder=folder, **options)


def check_all(model, statistics, names, tokens=TOKENS, **options):
    rows = inputs_of(model, tokens, {name: model.get_submodule(name) for name in names})
    for name in names:
        check(statistics.read(name), rows[name], **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_its_own_precision(tmp_path, dtype):
    model = gpt2(dtype)
    statistics = run(model, tmp_path, batch=1)
    assert statistics.way == "blocks"
    check_all(model, statistics, [*GPT2_MATRICES, "lm_head"])


def test_only_what_is_wanted_is_run_and_kept(tmp_path):
    model = gpt2()
    wanted = {GPT2_MATRICES[0]: frozenset({"peak"}), GPT2_MATRICES[2]: frozenset({"range"})}
    num_calls = [0, 0]
    for block in range(2):
        model.transformer.h[block].register_forward_hook(
            lambda *_, block=block: num_calls.__setitem__(block, num_calls[block] + 1)
        )
    statistics = run(model, tmp_path, wanted=wanted, batch=2)
    assert num_calls == [3 + 3, 3], "three recordings; only the first block has to run for all"
    seen = statistics.read(GPT2_MATRICES[0])
    assert seen.peak_I is not None
    assert seen.low is None
    assert statistics.read(GPT2_MATRICES[2]).peak_I is None
    with pytest.raises(KeyError):
        statistics.read(GPT2_MATRICES[1])
    assert not list(tmp_path.glob("hidden_*"))


def test_the_model_is_left_as_it_was(tmp_path):
    model = gpt2().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.config.use_cache = True
    run(model, tmp_path)
    assert model.training
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    assert not any("forward" in vars(child) for child in model.modules())
    assert not any(child._forward_pre_hooks or child._forward_hooks for child in model.modules())
    assert model(torch.from_numpy(TOKENS)).logits.shape == (5, 13, 61)


def test_shared_inputs_are_stored_once(tmp_path):
    model = build_tiny("LlamaForCausalLM", dict(FAMILIES["llama"].tiny), dtype=torch.float64)
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    matrices = [f"model.layers.{block}.{name}" for block in range(2) for name in names]
    wanted = {name: frozenset({"second_moment"}) for name in matrices} | {
        "model.layers.0.self_attn.k_proj": frozenset({"peak"})
    }
    statistics = run(model, tmp_path, wanted=wanted, blocks=["model.layers.0", "model.layers.1"])
    entries = {name: statistics.located[name][1] for name in matrices}
    assert len(set(entries.values())) == 2 * 4
    assert entries[matrices[0]] == entries[matrices[1]] == entries[matrices[2]] != entries[matrices[3]]
    assert entries[matrices[4]] == entries[matrices[5]] != entries[matrices[6]]
    assert statistics.read(matrices[1]).second_moment_II is None, "a sharer's wishes are its own"
    assert statistics.read(matrices[1]).peak_I is not None


def test_nan_is_named(tmp_path):
    model = gpt2()
    model.transformer.h[1].mlp.c_fc.bias.data[3] = torch.nan
    with pytest.raises(InputError, match=r"transformer\.h\.1\.mlp\.c_proj.*NaN"):
        run(model, tmp_path)
    model = gpt2()
    model.transformer.h[0].mlp.c_proj.bias.data[3] = torch.inf
    with pytest.raises(InputError, match=r"block 'transformer\.h\.0'.*infinite"):
        run(model, tmp_path)


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(InputError, match="0 to 60"):
        run(gpt2(), tmp_path, tokens=TOKENS + 30)


class Experts(nn.Module):
    """Rows go to one expert each; the second sees some windows only, the third nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 48) for _ in range(3))
        self.gate = nn.ModuleList(nn.Linear(width, 48) for _ in range(3))
        self.threshold = 0.0

    def forward(self, x):
        is_second = x[..., :1].mean((1, 2)) > self.threshold
        out = torch.zeros_like(x)
        for choice, up, gate in zip((~is_second, is_second), self.up, self.gate, strict=False):
            if choice.any():
                rows = x[choice]
                out[choice] = (up(rows) * gate(rows)).sum(-1, keepdim=True) / 48
        return out


@pytest.mark.parametrize("batch", [1, 2])
def test_experts_that_few_or_no_windows_reach(tmp_path, batch):
    model = gpt2()
    experts = Experts(32).double()
    model.transformer.h[0].mlp = experts
    model.unused = nn.Linear(32, 8).double()
    means = inputs_of(model, TOKENS, {"": experts})[""].reshape(5, 13, 32)[..., 0].mean(1)
    # Only a window after the first few goes to the second expert, so no recording sees it.
    late = 3 + int(means[3:].argmax())
    order = [*(each for each in np.argsort(means) if each != means.argmax()), means.argmax()]
    tokens = TOKENS[order]
    experts.threshold = float(np.sort(means)[-2:].mean())
    assert late >= 3
    names = [f"transformer.h.0.mlp.{kind}.{number}" for number in (0, 1) for kind in ("up", "gate")]
    never = ["transformer.h.0.mlp.up.2", "transformer.h.0.mlp.gate.2", "unused"]
    wanted = everything([*names, *never, "lm_head"])
    statistics = run(model, tmp_path, wanted=wanted, tokens=tokens, batch=batch)
    assert statistics.way == "blocks"
    assert set(statistics.unreached) == set(never)
    assert statistics.read("unused").num_rows == 0
    assert statistics.read("unused").second_moment_II is None
    check_all(model, statistics, [*names, "lm_head"], tokens=tokens)
    assert statistics.read(names[0]).num_rows == 4 * 13
    assert statistics.read(names[2]).num_rows == 13


def test_a_module_that_two_blocks_share_pools_its_calls(tmp_path):
    model = gpt2()
    model.transformer.h[1].mlp = model.transformer.h[0].mlp
    names = ["transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn", "lm_head"]
    both = [*names, "transformer.h.1.mlp.c_fc"]
    statistics = run(model, tmp_path, wanted=everything(both))
    assert statistics.way.startswith("whole: 'transformer.h.0.mlp.c_fc' is called")
    check_all(model, statistics, names)
    assert statistics.read(names[0]).num_rows == 2 * TOKENS.size
    assert statistics.located[both[3]] == statistics.located[both[0]]


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_calls = kind, 0
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.gate = nn.Linear(16, 24)

    def forward(self, hidden, *, extra=None, wrapped=None):
        self.num_calls += 1
        if self.kind == "counts":
            hidden = hidden + 0.1 * self.num_calls
        if extra is not None:
            hidden = hidden + extra
        gated = hidden + 1 if self.kind == "diverges" and self.num_calls > 4 else hidden
        hidden = hidden + self.down(torch.relu(self.up(hidden)) * self.gate(gated))
        return {"hidden": hidden} if self.kind == "dictionary" else hidden


class Chain(nn.Module):
    """A model without a config, in the ways in which models are no chains of plain blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table, self.other = nn.Embedding(60, 16), nn.Embedding(60, 16)
        self.layers = nn.ModuleList(Block(kind) for _ in range(3))
        self.between, self.head = nn.Linear(16, 16), nn.Linear(16, 60)

    def forward(self, input_ids):
        hidden = self.table(input_ids)
        more = {"extra": self.other(input_ids)} if self.kind == "text" else {}
        more |= {"wrapped": object()} if self.kind == "object" else {}
        for layer in self.layers:
            if self.kind == "state" and layer is not self.layers[0]:
                more = {"extra": hidden.abs()}
            hidden = layer(hidden, **more)
            hidden = hidden["hidden"] if self.kind == "dictionary" else hidden
            if self.kind == "norm":
                hidden = hidden / hidden.norm(dim=-1, keepdim=True)
            if self.kind == "between" and layer is self.layers[1]:
                hidden.add_(0 * self.between(hidden))
        if self.kind == "twice":
            hidden = self.layers[0](hidden)
        return self.head(hidden)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("plain", None),
        ("text", "depends on the text"),
        ("state", "depends on the text"),
        ("norm", "does not read the output"),
        ("between", "'between' is called between blocks"),
        ("twice", "does not read the output|more than once"),
        ("dictionary", "does not read the output"),
        ("object", "is given a object"),
        ("counts", "something else by itself"),
        ("diverges", "does not always read"),
    ],
)
def test_what_is_no_chain_of_blocks_is_run_whole(tmp_path, kind, reason):
    model = Chain(kind).double()
    names = [f"layers.{block}.{name}" for block in range(3) for name in ("up", "gate", "down")] + ["head"]
    wanted = everything([*names, *(["between"] if kind == "between" else [])])
    statistics = run(model, tmp_path, wanted=wanted, blocks=[f"layers.{block}" for block in range(3)])
    if reason is None:
        assert statistics.way == "blocks"
    else:
        assert statistics.way.startswith("whole: ")
        assert any(part in statistics.way for part in reason.split("|")), statistics.way
    if kind not in ("counts", "diverges"):  # those give other values each time
        check_all(model, statistics, names)


def test_a_second_text_is_compared_without_running_the_blocks(tmp_path):
    model = Chain("plain").double()
    run(model, tmp_path, wanted=everything(["head"]), blocks=[f"layers.{block}" for block in range(3)])
    assert [layer.num_calls for layer in model.layers] == [1 + len(TOKENS)] * 3  # recorded once


def test_without_blocks_in_as_many_passes_as_memory_asks_for(tmp_path):
    model = Chain("plain").double()
    names = [f"layers.{block}.{name}" for block in range(3) for name in ("up", "gate", "down")] + ["head"]
    statistics = run(model, tmp_path, wanted=everything(names), blocks=(), memory_bytes=1)
    assert len(list(tmp_path.glob("part_*.safetensors"))) == len(names) - 3
    check_all(model, statistics, names)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class StopError(Exception):
    pass


def stop_after(num_tokens: int):
    left = [num_tokens]

    def progress(count: int) -> None:
        left[0] -= count
        if left[0] <= 0:
            raise StopError

    return progress


@pytest.mark.parametrize("blocks", [GPT2_BLOCKS, ()], ids=["blocks", "whole"])
@pytest.mark.parametrize("stop", [1, 20, 33, 45, 64])
def test_an_interrupted_run_goes_on_to_the_same_result(tmp_path, blocks, stop):
    model = gpt2(torch.float32)
    reported = []
    run(model, tmp_path / "whole", blocks=blocks, progress=reported.append, memory_bytes=50_000)
    assert sum(reported) == TOKENS.size
    with pytest.raises(StopError):
        run(model, tmp_path / "cut", blocks=blocks, progress=stop_after(stop), memory_bytes=50_000)
    unfinished = store.read_index(tmp_path / "cut")
    done = unfinished.done if unfinished else 0
    assert not (unfinished and unfinished.is_finished)
    reported = []
    run(model, tmp_path / "cut", blocks=blocks, progress=reported.append, memory_bytes=50_000)
    assert sum(reported) == TOKENS.size
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    if stop > 33:
        assert done > 0
        assert reported[0] >= TOKENS.size // 3, "what was done is not done again"


def test_finished_statistics_are_taken_and_others_are_not(tmp_path):
    model = gpt2(torch.float32)
    run(model, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "notes.txt").write_text("the user's own")
    calls = []
    model.transformer.h[0].register_forward_hook(lambda *_: calls.append(1))
    reported = []
    first = run(model, tmp_path, progress=reported.append)
    assert not calls
    assert sum(reported) == TOKENS.size
    assert {path: path.stat().st_mtime_ns for path in before} == before
    keys = {first.key}
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] += 1e-3
    keys.add(run(model, tmp_path).key)
    keys.add(run(model, tmp_path, tokens=TOKENS[::-1].copy()).key)
    keys.add(run(model, tmp_path, seed=1).key)
    keys.add(run(model, tmp_path, wanted={"lm_head": ALL}).key)
    assert len(keys) == 5
    assert calls
    assert store.read_index(tmp_path).requested == {"lm_head": ALL}
    assert (tmp_path / "notes.txt").exists()


def test_an_index_that_lags_behind_or_is_broken_costs_time_and_nothing_else(tmp_path):
    model = gpt2(torch.float32)
    run(model, tmp_path / "whole")
    with pytest.raises(StopError):
        run(model, tmp_path / "cut", progress=stop_after(45))
    index = json.loads((tmp_path / "cut" / store.INDEX).read_text())
    assert index["done"] == 2
    (tmp_path / "cut" / store.INDEX).write_text(json.dumps(index | {"done": 1}))
    run(model, tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    for broken in ("", "{", "[]", '{"format_version": 0}'):
        (tmp_path / "cut" / store.INDEX).write_text(broken)
        run(model, tmp_path / "cut")
        assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


KILLED = """
import os, signal, sys, numpy as np, torch
from pathlib import Path
from test_passes import run, gpt2
left = [int(sys.argv[2])]
def progress(count):
    left[0] -= count
    if left[0] <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
run(gpt2(torch.float32), Path(sys.argv[1]), progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", [33, 58])
def test_a_killed_run_leaves_nothing_that_lies(tmp_path, stop):
    tests = Path(__file__).parents[2]
    paths = [str(Path(__file__).parent), str(tests), str(tests.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), *paths])}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "cut"), str(stop)], env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL
    unfinished = store.read_index(tmp_path / "cut")
    assert not (unfinished and unfinished.is_finished)
    model = gpt2(torch.float32)
    run(model, tmp_path / "cut")
    run(model, tmp_path / "whole")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_full_disk_is_refused_beforehand(tmp_path, monkeypatch):
    full = namedtuple("Disk", "total used free")(10**12, 10**12, 1000)
    monkeypatch.setattr("quantkit.runtime.machine.disk.shutil.disk_usage", lambda _: full)
    with pytest.raises(InputError, match=r"calibration needs .* MB there, and 0 MB are free"):
        run(gpt2(torch.float32), tmp_path)
