"""The report's contract, its page, and the alarms that a bad result must raise."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from quantkit.errors import InputError
from quantkit.evaluation.measurements import (
    Accuracy,
    Environment,
    Latency,
    Memory,
    PeakMemory,
    Perplexity,
    Similarity,
    Timing,
)
from quantkit.evaluation.verdict import judge
from quantkit.model.model_map import Role
from quantkit.plan.plan import Count, FormulaCheck, LayerPlan, Plan
from quantkit.report.document import Kept, Report, Size, kept_projections, report_json
from quantkit.report.figures import figures, megabytes
from quantkit.report.quantization import quantization_page
from quantkit.report.stored import read_document, read_report
from quantkit.report.tables import Page, print_page, to_markdown
from quantkit.runtime.providers.placement import Placement

pytestmark = pytest.mark.once
replace = dataclasses.replace


def timing(median_ms: float) -> Timing:
    return Timing(
        median_ms=median_ms,
        lowest_ms=median_ms * 0.9,
        lower_quartile_ms=median_ms * 0.95,
        upper_quartile_ms=median_ms * 1.05,
        highest_ms=median_ms * 1.25,
        num_runs=20,
    )


FORMULA = FormulaCheck(
    attention_per_block=4,
    ffn_per_block=2,
    num_blocks=12,
    num_outputs=1,
    predicted=73,
    walked=73,
    agrees=True,
    differences=(),
)
ACCURACY = Accuracy(
    reference=Perplexity(value=25.32, standard_error=0.21),
    quantized=Perplexity(value=25.57, standard_error=0.22),
    increase=25.57 / 25.32 - 1,
    increase_standard_error=0.0004,
    kl_divergence=0.0083,
    kl_standard_error=0.0001,
    kl_99th_percentile=0.052,
    top1_agreement=0.965,
    max_relative_logit_error=0.031,
    num_tokens=16_383,
    window=256,
    stride=128,
    text="evaluation.txt",
)
SIMILARITY = Similarity(
    mean_cosine=0.99,
    lowest_cosine=0.98,
    relative_rms_error=0.06,
    max_relative_error=0.1,
    num_windows=1,
    window=128,
    text="evaluation.txt",
)
LATENCY = Latency(
    provider="CPUExecutionProvider",
    threads=2,
    prompt_length=128,
    prefill=timing(76),
    prefill_reference=timing(174),
    decode=timing(5.4),
    decode_reference=timing(21),
    num_decoded=32,
    floor_ms_per_token=3.6,
    num_warm_ups=2,
    reference="float32 graph",
)
BARE = Report(
    model="gpt2",
    scheme="int8_block128",
    target="cpu",
    min_dim=768,
    projections=Count(total=73, quantized=73),
    matrices=Count(total=49, quantized=49),
    parameters=Count(total=124_439_808, quantized=123_532_032),
    formula=FORMULA,
    kept=(),
    size=Size(source_bytes=497_759_232, planned_bytes=130_000_000, artifact_bytes=130_400_000),
    environment=Environment(
        processor="Some CPU",
        num_cores=2,
        python="3.11.9",
        platform="Linux",
        versions={"onnxruntime": "1.31.0"},
    ),
)
FULL = replace(
    BARE,
    accuracy=ACCURACY,
    latency=(LATENCY,),
    memory=Memory(
        quantized=PeakMemory(load_peak_bytes=200_000_000, run_peak_bytes=260_000_000),
        reference=PeakMemory(load_peak_bytes=900_000_000, run_peak_bytes=1_000_000_000),
        empty_process_bytes=60_000_000,
    ),
    placement=(Placement(provider="CPUExecutionProvider", node_fraction=1.0, mac_fraction=1.0),),
    seconds={"quantizing": 3.21},
)


def page_of(report: Report) -> Page:
    return quantization_page(json.loads(json.dumps(report_json(report))))


def cells(page: Page) -> dict[str, tuple[str, ...]]:
    return {row[0].strip(): row[1:] for row in page.tables[0].rows}


def test_the_contract_of_report_json():
    document = json.loads(json.dumps(report_json(FULL), allow_nan=False))
    assert document["size"]["source_bytes"] == 497_759_232
    assert document["size"]["ratio"] == pytest.approx(130_400_000 / 497_759_232)
    accuracy = document["accuracy"]
    assert (accuracy["perplexity"]["reference"], accuracy["perplexity"]["quantized"]) == (25.32, 25.57)
    assert (accuracy["kl_divergence"], accuracy["top1_agreement"]) == (0.0083, 0.965)
    assert accuracy["protocol"] == {
        "text": "evaluation.txt",
        "num_tokens": 16383,
        "window": 256,
        "stride": 128,
    }
    (latency,) = document["latency"]
    assert (latency["provider"], latency["prefill_ms"], latency["decode_ms_per_token"]) == (
        "CPUExecutionProvider",
        76,
        5.4,
    )
    assert (latency["reference"]["prefill_ms"], latency["reference"]["decode_ms_per_token"]) == (174, 21)
    assert latency["decode"]["num_runs"] == latency["reference"]["prefill"]["num_runs"] == 20
    assert document["placement"][0] == {
        "provider": "CPUExecutionProvider",
        "node_fraction": 1,
        "mac_fraction": 1,
    }
    assert document["environment"]["versions"] == {"onnxruntime": "1.31.0"}
    assert document["alarms"] == []


def test_the_table_compares():
    rows = cells(page_of(FULL))
    assert rows["size, MB"] == ("497.8", "130.4", "0.262x")
    assert rows["perplexity"] == ("25.32 ± 0.21", "25.57 ± 0.22", "+0.99 ± 0.04%")
    assert rows["KL divergence, nats"][1] == "0.0083 ± 0.0001"
    assert rows["top-1 agreement"][1] == "96.50%"
    assert rows["prefill of 128 tokens, ms"] == ("174", "76.0", "0.437x")
    assert rows["decode, ms/token"] == ("21.0", "5.40", "0.257x")
    assert rows["memory floor, ms/token"] == ("-", "3.60", "-")
    assert rows["peak memory to run, MB"] == ("1,000.0", "260.0", "0.26x")


def test_the_page_says_what_was_done_and_how_it_was_measured():
    kept = (Kept(role="attention_out", reason="max(64, 64) = 64 < 768", count=12),)
    page = page_of(replace(FULL, kept=kept, notes=("no tokenizer came with it",)))
    text = "\n".join((*page.head, *page.foot))
    for fact in (
        "gpt2: int8_block128 for cpu",
        "73 of 73 projections (49 of 49 matrices), 99.3% of the parameters, at min_dim 768",
        "(4 attention + 2 FFN) x 12 layers + 1 output = 73, equal to the count",
        "not quantized: 12 attention_out (max(64, 64) = 64 < 768)",
        "16,383 tokens of evaluation.txt",
        "window 256, stride 128",
        "CPUExecutionProvider, 2 threads, batch 1, prompt 128, 32 decoded tokens; medians after 2 warm-ups",
        "decode takes 1.50x of it",
        "Some CPU, 2 cores",
        "Python 3.11.9, onnxruntime 1.31.0",
        "planned 130.0 MB",
        "note: no tokenizer came with it",
    ):
        assert fact in text
    spread = {(row[0], row[1]): row[2:] for row in page.tables[1].rows}
    assert spread["prefill, ms", "quantized"] == ("76.0", "68.4", "72.2 to 79.8", "95.0", "20")
    assert len(spread) == 4


def test_what_was_not_measured_is_absent():
    document = report_json(BARE)
    assert not {"accuracy", "memory", "recipe_sha256"} & set(document)
    assert "reference_bytes" not in document["size"]
    assert document["latency"] == []
    page = page_of(BARE)
    assert [row[0] for row in page.tables[0].rows] == ["size, MB"]
    assert len(page.tables) == 1
    text = to_markdown(page)
    assert not re.search(r"perplexity|latency|memory|accuracy|nan|None| 0\.00", text)


def test_a_figure_without_its_reference_has_a_dash_and_no_ratio():
    alone = replace(
        LATENCY, prefill_reference=None, decode_reference=None, floor_ms_per_token=None, reference=None
    )
    page = page_of(replace(BARE, latency=(alone,)))
    assert cells(page)["decode, ms/token"] == ("-", "5.40", "-")
    assert "memory floor, ms/token" not in cells(page)
    assert "reference" not in report_json(replace(BARE, latency=(alone,)))["latency"][0]
    encoder = replace(alone, decode=None, num_decoded=None)
    assert "decode, ms/token" not in cells(page_of(replace(BARE, latency=(encoder,))))


def test_several_providers_have_rows_of_their_own():
    other = replace(LATENCY, provider="QNNExecutionProvider", prefill=timing(30))
    rows = cells(page_of(replace(BARE, latency=(LATENCY, other))))
    assert rows["prefill of 128 tokens, ms, QNNExecutionProvider"][1] == "30.0"
    assert rows["prefill of 128 tokens, ms, CPUExecutionProvider"][1] == "76.0"


SMALL = PeakMemory(load_peak_bytes=1_000_000, run_peak_bytes=2_000_000)


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"latency": (replace(LATENCY, prefill=timing(175)),)}, "SLOWER than the reference: prefill 175 ms"),
        (
            {"latency": (replace(LATENCY, decode=timing(21.5)),)},
            "SLOWER than the reference: decode 21.5 ms/token",
        ),
        (
            {"size": replace(BARE.size, artifact_bytes=133_500_000)},
            "LARGER than planned: 133.5 MB against 130.0",
        ),
        (
            {"size": Size(source_bytes=130_000_000, planned_bytes=130_000_000, artifact_bytes=130_000_000)},
            "NOT SMALLER than its source",
        ),
        (
            {"judgement": judge(replace(ACCURACY, kl_divergence=0.178))},
            "DEGRADED: KL divergence in nats 0.178 ± 0.0001, limit 0.05",
        ),
        (
            {"judgement": judge(replace(SIMILARITY, relative_rms_error=0.83))},
            "BROKEN: relative RMS error of outputs 83.0%, limit 50.0%",
        ),
        ({"memory": replace(FULL.memory, reference=replace(SMALL))}, "MORE MEMORY than the reference"),
    ],
)
def test_what_is_worse_than_it_should_be_is_an_alarm(change, alarm, capsys):
    assert page_of(FULL).alarms == ()
    report = replace(FULL, **change)
    page = page_of(report)
    assert any(alarm in line for line in page.alarms), page.alarms
    assert tuple(report_json(report)["alarms"]) == page.alarms
    assert f"- **{page.alarms[0]}**" in to_markdown(page)
    print_page(page)
    assert alarm.split(":")[0] in capsys.readouterr().out


def test_a_slow_cpu_says_what_the_model_is_made_for():
    slow = replace(FULL, latency=(replace(LATENCY, prefill=timing(175)),))
    (alarm,) = page_of(replace(slow, target="npu")).alarms
    assert alarm.endswith("on CPUExecutionProvider; the target is 'npu': see 'quantkit bench --provider'")
    (alarm,) = page_of(replace(slow, target="cpu-avx2")).alarms
    assert alarm.endswith("on CPUExecutionProvider")


def test_alarms_are_red_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_page(Page(head=("fine",), alarms=("SLOWER",)))
    assert "\x1b[1;31mSLOWER\x1b[0m" in capsys.readouterr().out


def test_random_weights_make_accuracy_meaningless_and_no_alarm_of_it():
    report = replace(
        FULL,
        has_random_weights=True,
        accuracy=(meaningless := replace(ACCURACY, is_meaningful=False, increase=0.9, kl_divergence=2.0)),
        judgement=judge(meaningless),
    )
    page = page_of(report)
    assert page.alarms == ()
    labelled = [name for name in cells(page) if "meaningless: random weights" in name]
    assert len(labelled) == 5
    assert any("random" in line for line in page.head)
    assert "meaningless: random weights" in page.foot[0]


def test_an_older_or_damaged_report_is_refused_in_one_line(tmp_path):
    document, path = report_json(FULL), tmp_path / "report.json"
    path.write_text(json.dumps(document))
    assert read_document(tmp_path) == document
    assert read_report(tmp_path) == FULL
    damage = {
        "not JSON": "{",
        "size missing": {**document, "size": None},
        "TypeError": {**document, "latency": [{}]},
    }
    damage["size missing"].pop("size")
    for words, content in damage.items():
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(InputError, match=f"report.json: .*{words}.*; next"):
            read_report(tmp_path)


def test_what_is_kept_float_is_counted_by_role_and_reason():
    def layer(name, role, quantized, reason):
        return LayerPlan(
            name=name,
            role=role,
            in_features=8,
            out_features=8,
            matrix=name,
            quantized=quantized,
            reason=reason,
        )

    count = Count(total=4, quantized=1)
    plan = Plan(
        model="m",
        min_dim=9,
        include=(),
        exclude=(),
        layers=(
            layer("a", Role.FFN_UP, True, "big"),
            layer("b", Role.ATTENTION_OUT, False, "small"),
            layer("c", Role.ATTENTION_OUT, False, "small"),
            layer("d", Role.LM_HEAD, False, "excluded"),
        ),
        projections=count,
        matrices=count,
        parameters=count,
        formula=FORMULA,
        warnings=(),
    )
    assert kept_projections(plan) == (
        Kept(role="attention_out", reason="small", count=2),
        Kept(role="lm_head", reason="excluded", count=1),
    )


def test_figures_have_three_digits_and_no_exponent():
    shown = [figures(value) for value in (1740.0, 174.2, 17.42, 1.742, 0.1742, 0.0)]
    assert shown == ["1,740", "174", "17.4", "1.74", "0.174", "0"]
    assert [megabytes(count) for count in (1_234_500_000, 12_340_000, 3_456_000)] == [
        "1,234.5",
        "12.3",
        "3.46",
    ]
