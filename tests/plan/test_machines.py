"""The machine table: figures against the arithmetic they are derived from, and the JSON of a measured row."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import InputError
from quantkit.model.model_map import to_json
from quantkit.plan.machines import DTYPES, KINDS, MACHINES, Machine, from_json, machine


def test_the_table_holds_the_required_rows():
    assert set(MACHINES) >= {
        "server-2core-vnni",
        "laptop-cpu",
        "phone-npu",
        "laptop-npu",
        "h100",
        "gpu-900gbs",
    }


@pytest.mark.parametrize("row", MACHINES.values(), ids=list(MACHINES))
def test_every_row_is_complete_and_says_where_it_comes_from(row):
    assert MACHINES[row.name] is row and row.kind in KINDS
    assert row.peak_tera_ops and set(row.peak_tera_ops) <= set(DTYPES)
    assert min(row.bandwidth_gb_per_s, row.memory_gb, row.dispatch_us, *row.peak_tera_ops.values()) > 0
    assert row.description and "dispatch" in row.source
    # The ridge point of every real processor lies between 1 and 1000: a slipped unit does not.
    ridge = max(row.peak_tera_ops.values()) * 1e12 / (row.bandwidth_gb_per_s * 1e9)
    assert 1 < ridge < 1000


@pytest.mark.parametrize(
    ("name", "dtype", "tera_ops"),
    [
        # cores x GHz x operations a cycle: two 256-bit units, FP32 FMA or VNNI
        ("server-2core-vnni", "fp32", 2 * 3.5e9 * (2 * 256 / 32 * 2) / 1e12),
        ("server-2core-vnni", "int8", 2 * 3.5e9 * (2 * 256 / 8 * 2) / 1e12),
        ("laptop-cpu", "fp32", 8 * 3.3e9 * (2 * 256 / 32 * 2) / 1e12),
        ("laptop-cpu", "int8", 8 * 3.3e9 * (2 * 256 / 8 * 2) / 1e12),
        # 6 engines x MACs a cycle x 2 at the 1.95 GHz that 48 TOPS imply
        ("laptop-npu", "int8", 6 * 2048 * 2 * 1.95e9 / 1e12),
        ("laptop-npu", "fp16", 6 * 1024 * 2 * 1.95e9 / 1e12),
        # V100: 5120 CUDA cores at 1.53 GHz; 640 tensor cores of 64 FMA; dp4a is 4 MACs where FP32 is 1
        ("gpu-900gbs", "fp32", 5120 * 1.53e9 * 2 / 1e12),
        ("gpu-900gbs", "fp16", 640 * 64 * 1.53e9 * 2 / 1e12),
        ("gpu-900gbs", "int8", 5120 * 1.53e9 * 8 / 1e12),
        # H100 SXM5: 16896 CUDA cores at 1.98 GHz; 528 tensor cores of 512 FP16 FMA at 1.83 GHz
        ("h100", "fp32", 16896 * 1.98e9 * 2 / 1e12),
        ("h100", "fp16", 528 * 512 * 1.83e9 * 2 / 1e12),
        ("h100", "int8", 528 * 1024 * 1.83e9 * 2 / 1e12),
    ],
)
def test_peaks_follow_from_units_and_clocks(name, dtype, tera_ops):
    assert machine(name).peak_tera_ops[dtype] == pytest.approx(tera_ops, rel=0.01)


@pytest.mark.parametrize(
    ("name", "mega_transfers", "bits"),
    [("laptop-cpu", 5600, 128), ("phone-npu", 9600, 64), ("laptop-npu", 8533, 128)],
)
def test_bandwidths_follow_from_the_memory(name, mega_transfers, bits):
    assert machine(name).bandwidth_gb_per_s == pytest.approx(mega_transfers * bits / 8 / 1000, rel=1e-3)


def test_measured_bandwidth_and_missing_dtypes():
    server = machine("server-2core-vnni")
    assert server.bandwidth_gb_per_s == 36
    assert "fp16" not in server.peak_tera_ops  # Zen 4 has no FP16 arithmetic


@pytest.mark.parametrize("name", ["this", "H100", ""])
def test_an_unknown_name_lists_every_name_in_one_line(name):
    with pytest.raises(InputError) as caught:
        machine(name)
    message = str(caught.value)
    assert "\n" not in message and all(row in message for row in (*MACHINES, "this"))


positive = st.floats(min_value=1e-3, max_value=1e6)
line = st.text().filter(str.isprintable)


@given(
    row=st.builds(
        Machine,
        name=line,
        kind=st.sampled_from(KINDS),
        description=line,
        bandwidth_gb_per_s=positive,
        peak_tera_ops=st.dictionaries(st.sampled_from(DTYPES), positive, min_size=1),
        memory_gb=positive,
        dispatch_us=positive,
        source=line,
    )
)
def test_json_round_trip(row):
    assert from_json(json.loads(json.dumps(to_json(row)))) == row


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "tpu"},
        {"name": 7},
        {"name": "a\x1b[2Jb"},
        {"bandwidth_gb_per_s": 0},
        {"bandwidth_gb_per_s": float("nan")},
        {"memory_gb": "16"},
        {"dispatch_us": True},
        {"peak_tera_ops": {}},
        {"peak_tera_ops": {"fp64": 1.0}},
        {"peak_tera_ops": {"fp32": -1.0}},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_damaged_record_is_refused(damage):
    with pytest.raises(InputError, match=r"^cache\.json: "):
        from_json(to_json(machine("h100")) | damage, where="cache.json")


@pytest.mark.parametrize("values", [[], None, {}, {"name": "x"}])
def test_something_else_is_refused(values):
    with pytest.raises(InputError, match="not a machine record"):
        from_json(values)
