"""Estimated minutes and memory follow the work: more work costs more, and stages that do not run nothing."""

from __future__ import annotations

import json
from dataclasses import asdict

import psutil
import pytest
from exporting import build_tiny
from typer.testing import CliRunner

import quantkit
from quantkit.cli import app
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect
from quantkit.pipeline import dry_run
from quantkit.pipeline.estimate import Work
from quantkit.pipeline.rates import Rates, measure_rates

pytestmark = pytest.mark.once
RATES = Rates(macs=1e10, passes=5e8, file_bytes=1e9, process_seconds=0.5)
MEASURING = (
    "accuracy",
    "accuracy by category",
    "answers",
    "latency",
    "memory",
    "inputs for histograms",
    "roofline",
)
SLACK = 32e6  # by which the process may shrink while the test runs
OFF = {"accuracy": False, "latency": False, "memory": False}
SMALL = {"calibration_windows": 4, "calibration_length": 32, "max_tokens": 256, "prompt": 8, "decode": 2}


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch):
    monkeypatch.setattr(dry_run, "measure_rates", lambda *_: RATES)


def forecast(model="demo", **options):
    return quantkit.dry_run(model, **options)


def seconds_of(planned):
    return {stage.name: stage.seconds for stage in planned.stages}


def names(planned):
    return [stage.name for stage in planned.stages]


def test_a_second_of_each_rate_is_a_second():
    for name in ("macs", "passes", "file_bytes"):
        assert Work(**{name: getattr(RATES, name)}).seconds(RATES) == pytest.approx(1)
    assert Work(processes=2, waiting_seconds=1).seconds(RATES) == pytest.approx(2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**OFF, "cache": "int8", "transforms": ["awq"]},
        {**OFF, "target": "npu", "prompt_length": 12, "cache_length": 32},
    ],
    ids=lambda options: "-".join(map(str, options)) or "default",
)
def test_the_stages_are_those_of_a_run(options, tmp_path):
    options = {**SMALL, **options}
    planned = forecast(**options)
    artifact = quantkit.quantize("demo", output=tmp_path / "out", **options)
    timed = json.loads((artifact.folder / "report.json").read_text())["seconds"]
    assert list(seconds_of(planned)) == list(timed)


@pytest.mark.parametrize(
    ("stage", "fewer", "more"),
    [
        ("accuracy", {"max_tokens": 1000}, {"max_tokens": 4000}),
        ("accuracy", {"window": 64, "stride": 64}, {"window": 64, "stride": 16}),
        (
            "calibration",
            {"fit": "gptq", "calibration_windows": 16},
            {"fit": "gptq", "calibration_windows": 32},
        ),
        ("quantize and export", {"fit": "rtn"}, {"fit": "mse"}),
        ("latency", {"decode": 4}, {"decode": 32}),
    ],
)
def test_more_work_takes_longer(stage, fewer, more):
    assert seconds_of(forecast(**more))[stage] > seconds_of(forecast(**fewer))[stage]


def test_measurements_that_are_off_cost_nothing():
    measured, unmeasured = forecast(), forecast(**OFF)
    assert set(MEASURING) <= set(names(measured))
    assert set(MEASURING).isdisjoint(names(unmeasured))
    spent = sum(seconds_of(measured)[name] for name in MEASURING)
    assert unmeasured.minutes == pytest.approx(measured.minutes - spent / 60)
    assert unmeasured.peak_bytes < measured.peak_bytes
    assert "calibration" not in names(unmeasured)


def test_a_wider_model_costs_more_of_both(tmp_path):
    row = FAMILIES["llama"]
    planned = []
    for name, factor in (("narrow", 1), ("wide", 8)):
        sizes = {**row.tiny, "intermediate_size": row.tiny["intermediate_size"] * factor}
        build_tiny(row.tiny_class, sizes).save_pretrained(tmp_path / name)
        planned.append(forecast(str(tmp_path / name), min_dim=1, **OFF))
    assert planned[1].minutes > planned[0].minutes
    assert planned[1].peak_bytes > planned[0].peak_bytes


def test_the_peak_is_accuracy_which_holds_both_float_models():
    """The float graph and transformers' original in float32, beside artifact and source."""
    floats = 4 * inspect("demo").num_parameters
    before = psutil.Process().memory_info().rss
    planned = forecast()
    peaks = {stage.name: stage.peak_bytes for stage in planned.stages}
    assert planned.peak_bytes == peaks["accuracy"]
    files = planned.model_bytes + planned.source_bytes
    before = min(before, psutil.Process().memory_info().rss)  # memory may be given back meanwhile
    assert peaks["float check"] >= before + floats - SLACK
    assert peaks["accuracy"] >= before + 2 * floats + files - SLACK


def test_a_search_has_no_figure_and_says_so():
    planned = forecast(max_kl=0.01)
    assert planned.minutes is None and planned.peak_bytes is None and not planned.stages
    assert any("up to 20 models" in note for note in planned.notes)


def test_rates_are_positive_whatever_the_shape():
    for shape in ((1, 1), (64, 100_000)):
        assert min(asdict(measure_rates(*shape)).values()) > 0


def test_the_command_counts_its_start_and_names_the_longest_stages(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = ["quantize", "demo", "--dry-run"]
    ran = CliRunner().invoke(app, [*command, "--json"])
    document = json.loads(ran.stdout)
    assert document["stages"][0]["name"] == "start"
    assert document["minutes"] == pytest.approx(sum(stage["seconds"] for stage in document["stages"]) / 60)
    page = CliRunner().invoke(app, command).stdout
    assert "peak memory: about" in page and "time: about" in page
    searched = CliRunner().invoke(app, [*command, "--max-kl", "0.01"]).stdout
    assert "time: about" not in searched and "up to 20 models" in searched
