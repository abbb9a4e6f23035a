"""A dry run refuses what a run refuses, counts the bytes that a run writes, and writes nothing."""

from __future__ import annotations

import json
import re

import pytest
from exporting import build_tiny, export
from typer.testing import CliRunner

import quantkit
from quantkit.cli import app
from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.pipeline.rates import Rates
from quantkit.plan.formats import SCHEMES, with_little_padding

pytestmark = pytest.mark.once
OFF = {
    "accuracy": False,
    "latency": False,
    "memory": False,
    "calibration_windows": 4,
    "calibration_length": 32,
}
TRACED = ("bloom", "t5", "quantkit_one_wide")


@pytest.fixture(autouse=True)
def given_rates(monkeypatch):
    rates = Rates(macs=1e10, passes=5e8, file_bytes=1e9, process_seconds=0.5)
    monkeypatch.setattr("quantkit.pipeline.dry_run.measure_rates", lambda *_: rates)


def write_tiny(family, folder, **sizes):
    row = FAMILIES[family]
    build_tiny(row.tiny_class, {**row.tiny, **sizes}).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("demo", {}),
        ("demo", {"scheme": "int4_block32", "fit": "rtn", "layers": {"ffn_down": "float"}}),
        ("demo", {"target": "gpu"}),
        ("demo", {"target": "npu", "prompt_length": 12, "cache_length": 32}),
        ("bert", {"min_dim": 1}),
        ("llama", {"min_dim": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())) or "default",
)
def test_the_size_is_what_a_run_writes(model, options, tmp_path):
    given = model if model == "demo" else write_tiny(model, tmp_path / "model")
    forecast = quantkit.dry_run(given, output=tmp_path / "out", **OFF, **options)
    assert not (tmp_path / "out").exists()
    artifact = quantkit.quantize(given, output=tmp_path / "out", **OFF, **options)
    document = json.loads((artifact.folder / "report.json").read_text())
    assert forecast.model_bytes == pytest.approx(document["size"]["artifact_bytes"], rel=0.02)
    assert document["size"]["planned_bytes"] == pytest.approx(document["size"]["artifact_bytes"], rel=0.01)
    assert forecast.projections == artifact.report.projections
    written = {"report.md", "report.json", "report.html", "README.md", "manifest.json", "recipe.yaml"}
    beside = sum(
        path.stat().st_size
        for path in artifact.folder.iterdir()
        if path.name not in written and path.suffix not in (".onnx", ".data", ".safetensors")
    )
    assert forecast.companion_bytes == beside


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in TRACED])
@pytest.mark.parametrize("inside", [64 << 20, 0], ids=["one file", "two files"])
def test_planned_bytes_are_the_files_of_every_family(family, inside, tmp_path):
    model = write_tiny(family, tmp_path / "model")
    exported = export(model, tmp_path / "out", single_file_bytes=inside, keeps_checkpoint=False)
    assert exported.planned_bytes == pytest.approx(exported.num_bytes, rel=0.01)


@pytest.mark.parametrize("columns", [576, 768, 896, 1600, 2048, 4160, 5120])
def test_heads_are_padded_by_two_percent_at_most(columns):
    """And the next larger blocks would pad more."""
    grid = with_little_padding(SCHEMES["int8_block64"].head.grid, columns)
    assert -columns % grid.block <= 0.02 * columns
    assert grid.block == 128 or -columns % (2 * grid.block) > 0.02 * columns


def test_a_head_as_wide_as_smollm2s_has_no_padding(tmp_path):
    model = write_tiny(
        "llama", tmp_path / "model", hidden_size=576, num_attention_heads=9, num_key_value_heads=3
    )
    head = export(model, tmp_path / "out", scheme="int8_block64").contents.packs[-1]
    (codes, *_) = head.tensors()
    assert codes.num_bytes == head.out_features * 576


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"scheme": "int9"}, "int9"),
        ({"exclude": ["no_such_role"]}, "no_such_role"),
        ({"min_dim": 100_000}, "no projection"),
        ({"target": "npu", "cache": "int8"}, "cache"),
        ({"target_size": "4MB", "prefer": "speed"}, "contradict"),
        ({"target_size": "4MB", "target": "npu"}, "nothing to search"),
        ({"target": "npu", "layers": {"ffn_down": "int8_static8"}}, "one scheme"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(options, fault, tmp_path):
    with pytest.raises(InputError) as refused:
        quantkit.dry_run("demo", output=tmp_path / "out", **options)
    assert fault in str(refused.value)
    with pytest.raises(InputError) as refused_too:
        quantkit.quantize("demo", output=tmp_path / "out", **options)
    assert str(refused.value) == str(refused_too.value)
    assert not list(tmp_path.iterdir())


def test_a_target_size_below_the_smallest_formats_is_refused_with_what_is_possible(tmp_path):
    """The size that the refusal names is possible, and one step less is not."""
    with pytest.raises(InputError) as refused:
        quantkit.dry_run("demo", output=tmp_path / "out", target_size="100KB")
    possible = re.search(r"allowed: ([\d.]+)MB or more", str(refused.value))[1]
    least = float(possible)
    quantkit.dry_run("demo", output=tmp_path / "out", target_size=f"{least:.2f}MB")
    with pytest.raises(InputError):
        quantkit.dry_run("demo", output=tmp_path / "out", target_size=f"{least - 0.02:.2f}MB")


def test_an_output_in_the_way_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    with pytest.raises(InputError):
        quantkit.dry_run("demo", output=tmp_path / "out")


def test_the_flag_prints_the_decisions_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["quantize", "demo", "--dry-run", "--exclude", "lm_head"])
    assert ran.exit_code == 0, ran.output
    assert "quantized: 36 of 37 projections" in ran.output and "float: 1 lm_head" in ran.output
    assert "format: 36 x int8_block32" in ran.output
    ran = CliRunner().invoke(app, ["quantize", "demo", "--dry-run", "--json"])
    assert json.loads(ran.stdout)["model_bytes"] > 1e6
    assert not list(tmp_path.iterdir())
