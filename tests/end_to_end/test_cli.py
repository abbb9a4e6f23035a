"""The command as a user runs it, in a process of its own: output, exit codes, one-line errors."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from commands import SETTINGS, quantkit, quantkit_alone, refused

pytestmark = pytest.mark.once


def test_the_bare_command_shows_its_help(monkeypatch):
    monkeypatch.setitem(SETTINGS, "COLUMNS", "80")
    shown = quantkit()
    assert (shown.returncode, shown.stderr) == (0, "")
    verbs = shown.stdout.partition("Commands:\n")[2].splitlines()
    assert len(verbs) == 17
    assert not [line for line in verbs if line.endswith("...")], "every verb in one line of 80 columns"


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["quantize", "demo", "--scheme", "int8_blok32"], "int8_block32"),
        (["quantize", "demo", "--target", "nppu"], "npu"),
        (["quantize", "demo", "--fit", "gptqq"], "gptq"),
        (["quantize", "demo", "--transform", "smothquant"], "smoothquant"),
        (["bench", "demo", "--provider", "cpuu"], "cpu"),
        (["compare", "a", "b", "--format", "tabel"], "table"),
        (["verify", "demo", "--check", "alll"], "all"),
        (["generate", "demo", "text", "--features", "float15"], "float16"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistyped_name_is_answered_with_the_nearest(arguments, nearest):
    line = refused(*arguments)
    assert f"'{arguments[-1]}'; allowed: " in line
    assert line.endswith(f"; next: did you mean '{nearest}'?")


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["inspect", "gtp2"], "gpt2"),
        (["inspect", "demo", "--include", "attention_qury"], "attention_query"),
        (["inspect", "demo", "--spec", "--device", "laptop-cpuu"], "laptop-cpu"),
        (["protect", "demo", "--key", "k", "-o", "x", "--permute", "residul"], "residual"),
    ],
)
def test_names_of_lists_that_hold_more_are_answered_too(arguments, nearest):
    assert refused(*arguments).endswith(f"; next: did you mean '{nearest}'?")


@pytest.mark.parametrize("flag", [("--features", "float16"), ("--token-file", "host.token")])
def test_flags_of_a_host_need_one(flag):
    assert refused("generate", "demo", "text", *flag).endswith("; next: add --host")


def test_inspect_json_holds_the_contract():
    result = quantkit("inspect", "gpt2", "--min-dim", "768", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["num_parameters"] == 124_439_808
    assert document["min_dim"] == 768
    assert document["projections"] == {"total": 73, "quantized": 73}
    assert document["matrices"] == {"total": 49, "quantized": 49}
    first = document["layers"][0]
    assert first["name"] == "transformer.h.0.attn.c_attn[query]"
    assert (first["role"], first["in_features"], first["out_features"]) == ("attention_query", 768, 768)
    assert first["quantized"] is True
    assert first["reason"] == "max(768, 768) = 768 >= 768"
    assert len(document["layers"]) == 73


def test_inspect_for_a_person():
    result = quantkit("inspect", "demo", "--min-dim", "512")
    assert result.returncode == 0, result.stderr
    for words in ("5,918,720 parameters", "13 of 37 projections (13 of 25 matrices)", "equal to the count"):
        assert words in result.stdout
    assert result.stderr == ""


@pytest.mark.once
def test_nothing_chosen_is_a_clear_warning_and_no_failure():
    result = quantkit("inspect", "gpt2", "--min-dim", "50258")
    assert result.returncode == 0
    assert "warning: nothing is quantized" in result.stdout


@pytest.mark.once
def test_a_machine_of_ones_own(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "specification.md").read_text(encoding="utf-8")
    example = page.split("```json\n")[1].split("```")[0]
    mine = tmp_path / "my-npu.json"
    mine.write_text(example)
    asked = ("inspect", "gpt2", "--min-dim", "768", "--spec", "--json", "--device", "h100", "--device")
    document = json.loads(quantkit(*asked, str(mine)).stdout)
    assert document["devices"] == ["h100", "my-npu"]
    head = next(row for row in document["rows"] if row["name"] == "lm_head")
    fit = next(each for each in head["fits"] if each["device"] == "my-npu")
    assert fit["dtype"] == "int8"
    assert fit["time_us"] >= 2 * head["macs"] / 13e12 * 1e6
    mine.write_text(example.replace('"memory_gb"', '"memory"'))
    assert "missing: memory_gb" in refused(*asked, str(mine))
    mine.write_text("{")
    assert "docs/specification.md shows one" in refused(*asked, str(mine))
    assert "No such file" in refused(*asked, str(tmp_path / "none.json"))


@pytest.mark.once
def test_the_specification_in_every_form():
    document = json.loads(quantkit("inspect", "gpt2", "--spec", "--seq", "1024", "--json").stdout)
    assert document["totals"]["parameters"] == 124_439_808
    assert document["totals"]["matrix_macs"] == 145_824_153_600
    assert document["kv_cache_bytes"]["fp32"] == 75_497_472
    sheet = list(csv.DictReader(io.StringIO(quantkit("inspect", "gpt2", "--spec", "--format", "csv").stdout)))
    assert sum(int(row["parameters"]) for row in sheet) == 124_439_808
    assert len(sheet) == len(document["rows"])
    markdown = quantkit("inspect", "gpt2", "--spec", "--format", "markdown").stdout
    assert "| token embedding |" in markdown
    assert "[1, 1024, 768]" in markdown


@pytest.mark.once
def test_a_recipe_and_flags_that_override_it(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("select: {min_dim: 1024, include: [ffn]}\n")
    counts = []
    for extra in ([], ["--min-dim", "1"], ["--include", "lm_head"]):
        result = quantkit("inspect", "gpt2", "--recipe", str(recipe), *extra, "--json")
        counts.append(json.loads(result.stdout)["projections"]["quantized"])
    assert counts == [24, 24, 1]
    recipe.write_text("select: {min_dims: 1024}\n")
    assert "did you mean 'min_dim'?" in refused("inspect", "gpt2", "--recipe", str(recipe))


def test_doctor_for_a_program():
    result = quantkit_alone("doctor", "--json")
    assert result.returncode in (0, 1)
    document = json.loads(result.stdout)
    assert {provider["name"] for provider in document["providers"]} >= {"cpu", "cuda", "qnn", "openvino"}
    assert next(p for p in document["providers"] if p["name"] == "cpu")["usable"]
    assert document["cpu"]["features"]


@pytest.mark.parametrize("value", ["0", "-3", "big", "1.5"])
def test_wrong_min_dim(value):
    assert "whole number from 1 up" in refused("inspect", "gpt2", f"--min-dim={value}")


@pytest.mark.once
def test_wrong_words(tmp_path):
    assert "No such command" in refused("inspekt", "gpt2")
    assert "Missing argument" in refused("inspect")
    assert "No such option" in refused("inspect", "gpt2", "--minimum", "4")
    assert "allowed: table, markdown, json" in refused("inspect", "gpt2", "--format", "xml")
    assert "add --spec" in refused("inspect", "gpt2", "--seq", "12")
    assert "no config.json" in refused("inspect", str(tmp_path))
    assert "server-2core-vnni" in refused("inspect", "demo", "--spec", "--device", "abacus")
    assert "(1) give a local folder" in refused("inspect", "no-such-model-anywhere")


@pytest.mark.once
def test_this_machine_is_measured_and_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    result = quantkit("inspect", "demo", "--spec", "--device", "this", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["devices"] == ["this"]
    assert all(each["time_ms"] > 0 for each in document["estimates"])


def test_version_and_help():
    assert quantkit_alone("--version").stdout.startswith("quantkit 0.")
    assert "inspect" in quantkit("--help").stdout
