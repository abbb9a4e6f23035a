"""Reports side by side: ratios where figures were taken alike, and words where they were not."""

from __future__ import annotations

import copy

import pytest

from quantkit.report.comparison import METRICS, compare_reports, comparison_page
from quantkit.report.tables import to_markdown

pytestmark = pytest.mark.once
REPORT = {
    "model": "gpt2",
    "scheme": "int8_block128",
    "target": "cpu",
    "size": {"artifact_bytes": 130_000_000},
    "accuracy": {
        "perplexity": {"reference": 25.0, "quantized": 25.5},
        "kl_divergence": 0.008,
        "top1_agreement": 0.96,
        "is_meaningful": True,
        "protocol": {"text": "a.txt", "num_tokens": 999, "window": 512, "stride": 256},
    },
    "latency": [
        {
            "provider": "CPUExecutionProvider",
            "threads": 2,
            "batch": 1,
            "prompt_length": 128,
            "num_decoded": 32,
            "prefill_ms": 80.0,
            "decode_ms_per_token": 5.0,
            "reference": {"prefill_ms": 160.0, "decode_ms_per_token": 20.0},
        }
    ],
    "memory": {"quantized": {"run_peak_bytes": 300_000_000}},
    "environment": {
        "processor": "a CPU",
        "num_cores": 2,
        "platform": "Linux",
        "versions": {"onnxruntime": "1.31"},
    },
}
FIRST = {**REPORT, "folder": "runs/first", "tokenizer": "t"}


def beside(*, tokenizer="t", **changes):
    """The comparison with a second report, changed at dotted paths; None takes a key out."""
    report = copy.deepcopy(REPORT)
    for path, value in changes.items():
        *parents, key = path.split("__")
        place = report
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        if value is None:
            del place[key]
        else:
            place[key] = value
    return compare_reports([FIRST, {**report, "folder": "runs/second", "tokenizer": tokenizer}])


def test_ratios_are_to_the_first():
    comparison = beside(size__artifact_bytes=65_000_000, latency__0__decode_ms_per_token=2.5)
    first, second = comparison.artifacts
    assert set(first.ratios.values()) == {1.0}
    assert second.ratios["size_bytes"] == 0.5
    assert second.ratios["decode_ms_per_token"] == 0.5
    assert second.ratios["perplexity"] == 1.0
    assert second.not_compared == {}
    assert comparison.notes == ()
    page = to_markdown(comparison_page(comparison))
    assert "| second | 65.0 | 25.50 | 0.008 | 96.00% | 80.0 | 2.50 | 300.0 |" in page
    assert "| second | 0.5x | 1x | 1x | 1x | 1x | 0.5x | 1x |" in page


TEXT = {"perplexity", "kl_divergence", "top1_agreement"}
TIMES = {"prefill_ms", "decode_ms_per_token", "run_peak_bytes"}


@pytest.mark.parametrize(
    ("change", "refused", "words"),
    [
        ({"accuracy__protocol__window": 1024}, TEXT, "window 1024 against 512"),
        ({"accuracy__protocol__text": "b.txt"}, TEXT, "text b.txt against a.txt"),
        ({"accuracy__protocol__num_tokens": 5}, TEXT, "num tokens 5 against 999"),
        ({"accuracy__is_meaningful": False}, TEXT, "weights random against trained"),
        ({"tokenizer": "u"}, TEXT, "another tokenizer"),
        ({"model": "gpt2-xl"}, TEXT - {"perplexity"}, "model gpt2-xl against gpt2"),
        ({"latency__0__threads": 1}, TIMES, "threads 1 against 2"),
        ({"latency__0__prompt_length": 64}, TIMES, "prompt length 64 against 128"),
        ({"latency__0__num_decoded": 8}, TIMES - {"prefill_ms"}, "num decoded 8 against 32"),
        ({"environment__processor": "another"}, TIMES, "processor another against a CPU"),
        ({"environment__platform": "Windows"}, {"run_peak_bytes"}, "platform Windows against Linux"),
    ],
)
def test_what_was_measured_otherwise_gets_no_ratio(change, refused, words):
    comparison = beside(**change)
    second = comparison.artifacts[1]
    assert set(second.not_compared) == refused
    assert all(words in reason for reason in second.not_compared.values())
    assert set(second.ratios) == set(second.values) - refused
    page = to_markdown(comparison_page(comparison))
    for key in refused:
        assert f"({METRICS[key].show(second.values[key])})" in page
        assert f"second, {METRICS[key].title}: no ratio, " in page


def test_what_is_missing_is_absent_and_never_zero():
    comparison = beside(accuracy=None, memory=None, latency__0__decode_ms_per_token=None)
    second = comparison.artifacts[1]
    assert set(second.values) == set(second.ratios) == {"size_bytes", "prefill_ms"}
    page = to_markdown(comparison_page(comparison))
    assert "| second | 130.0 | - | - | - | 80.0 | - | - |" in page
    assert "cosine" not in page, "no artifact has one"
    empty = compare_reports([{**FIRST, "accuracy": {}}, FIRST]).artifacts[1]
    assert "perplexity" in empty.values, "the first lacks it, so there is no ratio to it"
    assert "perplexity" not in empty.ratios


def test_a_zero_is_a_figure_but_nothing_is_a_ratio_to_it():
    report = copy.deepcopy(FIRST)
    report["accuracy"]["kl_divergence"] = 0.0
    first, second = compare_reports([report, FIRST]).artifacts
    assert first.values["kl_divergence"] == 0.0
    assert "kl_divergence" not in first.ratios
    assert "kl_divergence" not in second.ratios


def test_a_machine_that_was_slower_the_second_time_is_told_by_its_reference():
    slower = {"prefill_ms": 160.0, "decode_ms_per_token": 30.0}
    (note,) = beside(latency__0__reference=slower).notes
    assert "decode of the float reference took 1.50x as long beside runs/second" in note
    assert beside(latency__0__reference=slower, environment__num_cores=4).notes == ()
    (note,) = beside(environment__versions={"onnxruntime": "1.30"}).notes
    assert "runs/second was measured with onnxruntime 1.30, runs/first with 1.31" in note


def test_folders_of_one_name_keep_their_paths():
    reports = [{**FIRST, "folder": f"{run}/out"} for run in ("a", "b")]
    page = to_markdown(comparison_page(compare_reports(reports)))
    assert "| a/out |" in page
    assert "| b/out |" in page
