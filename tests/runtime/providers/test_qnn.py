"""Whole decoders on Qualcomm's HTP backend, emulated on this machine, with no node left to the CPU."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from exporting import build_tiny, error
from static_graphs import emit_both, round_both

import quantkit
from quantkit.errors import InputError
from quantkit.export.static.qdq import Bits
from quantkit.model.families import FAMILIES
from quantkit.runtime.providers.table import PROVIDERS, plugin_devices
from quantkit.runtime.static_decoder import StaticRow, join, open_static_session, run_prompt
from quantkit.runtime.tokenizer import open_text

HAS_QNN = bool(plugin_devices(PROVIDERS["qnn"]))
pytestmark = [
    pytest.mark.qnn,
    pytest.mark.skipif(not HAS_QNN, reason=f"no QNN plugin: {PROVIDERS['qnn'].install}"),
]
DEMO = Path(quantkit.__file__).parent / "assets" / "demo"
PROMPT, PAST = 32, 48


def logits_of(decoder, ids, given):
    row = StaticRow(decoder=decoder, prompt=ids[:given])
    logits = row.read()
    return np.concatenate([logits, *(row.step(int(token)) for token in ids[given:])])


@pytest.mark.parametrize("bits", [Bits(), Bits(products=8)], ids=["16", "16-8"])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "qwen2", "qwen3"])
def test_every_family_compiles_whole_and_agrees_with_the_cpu(name, bits, tmp_path):
    build_tiny(FAMILIES[name].tiny_class, FAMILIES[name].tiny).save_pretrained(tmp_path / "model")
    windows = np.random.default_rng(1).integers(1, 60, (12, 12))
    graphs = emit_both(tmp_path / "model", tmp_path / "out", prompt=12, past=20, gives_all_logits=False)
    paths = round_both(graphs, windows, bits).save("integers")
    npu, cpu = (
        join(*(open_static_session(paths[kind], provider=each) for kind in ("prompt", "decode")))
        for each in ("qnn", "cpu")
    )
    made, wanted = (logits_of(each, windows[0], 6) for each in (npu, cpu))
    # of an unsigned second factor this backend would make 8 bits: 70 steps of error instead of 2
    assert error(made, wanted).relative < (0.002 if bits.products == 16 else 0.1)


def test_the_bundled_model(tmp_path):
    text = open_text(DEMO)
    calibration = text.encode((DEMO / "calibration.txt").read_text(encoding="utf-8"))
    windows = np.array(calibration[: 24 * PROMPT]).reshape(24, PROMPT)
    graphs = emit_both(DEMO, tmp_path / "out", prompt=PROMPT, past=PAST)
    floats = join(*(open_static_session(path) for path in graphs.save("float").values()))
    paths = round_both(graphs, windows, Bits()).save("integers")
    open_static_session(paths["decode"], provider="qnn")  # loads the library, which no later start does
    started = time.perf_counter()
    open_static_session(paths["prompt"], provider="qnn")
    compiled = time.perf_counter()
    prompt = open_static_session(paths["prompt"], provider="qnn")
    opened = time.perf_counter()
    assert compiled - started > 5 * (opened - compiled)  # what was compiled is kept
    npu = join(prompt, open_static_session(paths["decode"], provider="qnn"))
    ids = np.array(text.encode((DEMO / "evaluation.txt").read_text(encoding="utf-8"))[:PROMPT])
    made, wanted = (run_prompt(each.prompt, ids)[0] for each in (npu, floats))
    assert error(made, wanted).relative < 0.05
    losses = [loss_of(each, ids) for each in (made, wanted)]
    assert abs(losses[0] - losses[1]) < 0.01 * abs(losses[1])
    made, wanted = (logits_of(each, ids[:16], 12) for each in (npu, floats))
    assert error(made, wanted).relative < 0.05
    assert (made.argmax(-1) == wanted.argmax(-1)).mean() >= 0.8


def loss_of(logits, ids):
    """Mean negative log likelihood of each next token, in float64."""
    scores = logits[:-1].astype(np.float64)
    sums = np.log(np.exp(scores - scores.max(-1, keepdims=True)).sum(-1)) + scores.max(-1)
    return float((sums - scores[np.arange(len(ids) - 1), ids[1:]]).mean())


def test_a_graph_that_does_not_run_whole_is_refused(tmp_path):
    """Dynamic sizes, which this provider leaves to the CPU: strict mode says no instead."""
    from exporting import NOTHING, export

    build_tiny("GPT2LMHeadModel", FAMILIES["gpt2"].tiny).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    with pytest.raises(InputError, match="cannot run all of it"):
        open_static_session(tmp_path / "out" / "model.onnx", provider="qnn")
