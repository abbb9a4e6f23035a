"""`quantkit bench --provider` on every kind of artifact, and on those that were made for someone else."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
import transformers
from commands import quantkit
from exporting import build_tiny

from quantkit.export.traced.trace import why_not_trace
from quantkit.model.families import FAMILIES
from quantkit.runtime.providers.table import PROVIDERS, plugin_devices

pytestmark = pytest.mark.once

DEMO = Path(str(resources.files("quantkit") / "assets" / "demo"))
QUICK = ("--prompt", "8", "--decode", "2", "--threads", "1")
RECIPE = """
select: {min_dim: 1}
transforms: []
calibration: {windows: 4, length: 16}
measure: {seconds: 0.5, max_tokens: 300, threads: 1}
"""
STATIC = "static: {prompt: 12, cache: 24}\n"


def made(folder: Path, family: str, *flags: str, recipe: str = RECIPE, head: str = "") -> Path:
    """A tiny artifact of a family, with the bundled tokenizer."""
    row = FAMILIES[family]
    model = build_tiny(head or row.tiny_class, {**row.tiny, "vocab_size": 4096})
    model.save_pretrained(folder / "model")
    shutil.copyfile(DEMO / "tokenizer.json", folder / "model" / "tokenizer.json")
    (folder / "recipe.yaml").write_text(recipe)
    out = folder / "out"
    ran = quantkit(
        "quantize", str(folder / "model"), "--recipe", str(folder / "recipe.yaml"), "--no-eval", *flags,
        "-o", str(out),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return out


def bench(folder: Path, *flags: str, exit_code: int = 0) -> list[dict]:
    ran = quantkit("bench", str(folder), *flags, "--json")
    assert ran.returncode == exit_code, ran.stderr
    return json.loads(ran.stdout)["providers"]


def test_an_encoder_is_judged_by_its_states(tmp_path):
    folder = made(tmp_path, "bert", head="BertModel")
    (row,) = bench(folder, "--provider", "cpu", "--strict", *QUICK)
    assert row["outcome"] == "ran" and row["placement"]["mac_fraction"] == 1
    accuracy = row["accuracy"]
    assert accuracy["lowest_cosine"] > 0.99 and accuracy["num_tokens"] >= 100
    assert 0 < accuracy["max_relative_logit_error"] < 0.1
    assert "kl_divergence" not in accuracy and "decode" not in row


@pytest.mark.skipif(
    bool(why_not_trace()), reason=f"no tracing beside transformers {transformers.__version__}"
)
def test_a_traced_decoder_is_judged_by_what_it_predicts(tmp_path):
    folder = made(tmp_path, "bloom")
    (row,) = bench(folder, "--provider", "cpu", "--strict", *QUICK)
    assert row["outcome"] == "ran" and row["placement"]["node_fraction"] == 1
    assert row["accuracy"]["kl_divergence"] < 0.01 and 0.9 < row["accuracy"]["perplexity_ratio"] < 1.1
    assert row["decode"]["median_ms"] > 0


@pytest.fixture(scope="module")
def for_openvino(tmp_path_factory):
    return made(tmp_path_factory.mktemp("openvino"), "gpt2", "--target", "openvino", recipe=RECIPE + STATIC)


def test_a_static_artifact_runs_on_the_cpu_within_its_sizes(for_openvino):
    (row,) = bench(for_openvino, "--provider", "cpu", "--strict", "--threads", "1")
    assert row["outcome"] == "ran" and row["prompt_length"] == 12
    assert row["accuracy"]["kl_divergence"] < 1e-3
    assert row["accuracy"]["num_tokens"] < 256  # the prompt's graph gives the logits of one token in a run


def test_a_provider_that_is_missing_names_what_brings_it_whatever_the_target(for_openvino):
    missing, cpu = bench(
        for_openvino, "--provider", "nv-tensorrt-rtx,cpu", "--strict", "--threads", "1", exit_code=1
    )
    assert missing["why_not"] == "not installed" and cpu["outcome"] == "ran"


needs_qnn = [
    pytest.mark.qnn,
    pytest.mark.skipif(
        not plugin_devices(PROVIDERS["qnn"]), reason=f"no QNN plugin: {PROVIDERS['qnn'].install}"
    ),
]


@pytest.fixture(scope="module")
def for_npu(tmp_path_factory):
    return made(tmp_path_factory.mktemp("npu"), "gpt2", "--target", "npu", recipe=RECIPE + STATIC)


class TestQualcomm:
    """Strict runs in emulation, and what is said where strictness fails."""

    pytestmark = needs_qnn

    def test_all_of_it_runs_and_the_second_start_is_faster(self, for_npu):
        qnn, cpu = bench(for_npu, "--provider", "qnn,cpu", "--strict", "--threads", "1")
        for row in (qnn, cpu):
            assert row["outcome"] == "ran", row
            assert (row["placement"]["node_fraction"], row["placement"]["mac_fraction"]) == (1, 1)
        assert "emulation" in qnn["device"] and qnn["version"]
        assert qnn["start_ms"] > 2 * qnn["start_again_ms"] > 0  # one sample; tests/npu has the bar, of three
        assert qnn["compile_ms"] == pytest.approx(qnn["start_ms"] - qnn["start_again_ms"])
        for row in (qnn, cpu):
            assert row["accuracy"]["max_relative_logit_error"] < 0.05

    @pytest.mark.slow
    def test_the_bundled_model_runs_whole(self, tmp_path, monkeypatch):
        """Seconds a token in emulation, so few tokens are compared."""
        monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
        out = tmp_path / "out"
        ran = quantkit("quantize", "demo", "--target", "npu", "--no-eval", "-o", str(out))
        assert ran.returncode == 0, ran.stderr
        flags = ("--provider", "qnn", "--strict", "--threads", "2", "--decode", "2", "--time-limit", "600")
        (row,) = bench(out, *flags)
        assert row["outcome"] == "ran", row
        assert (row["placement"]["node_fraction"], row["placement"]["mac_fraction"]) == (1, 1)
        assert row["start_ms"] > 5 * row["start_again_ms"]
        assert row["accuracy"]["kl_divergence"] < 0.01 and row["accuracy"]["max_relative_logit_error"] < 0.05

    def test_what_another_version_compiled_is_compiled_again_and_said(self, for_npu):
        bench(for_npu, "--provider", "qnn", "--threads", "1")
        for record in (for_npu / "compiled").glob("*.json"):
            record.write_text(record.read_text().replace('"provider_version": "', '"provider_version": "0.'))
        (row,) = bench(for_npu, "--provider", "qnn", "--strict", "--threads", "1")
        assert row["outcome"] == "ran"
        (said, _) = (line for line in row["notes"] if "compiled again" in line)
        assert "it was compiled by version 0." in said

    def test_another_targets_artifact_fails_with_its_operators_and_the_cure(self, tmp_path):
        folder = made(tmp_path, "gpt2")
        ran = quantkit("bench", str(folder), "--provider", "qnn", "--strict", *QUICK)
        assert ran.returncode == 1
        assert "MatMulNBits" in ran.stdout  # an operator that is left to the CPU, or is why nothing started
        assert "--target npu" in ran.stdout and "--target cpu" in ran.stdout
