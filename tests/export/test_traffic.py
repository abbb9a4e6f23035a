"""What a token reads, as the plan foretells it, beside what the written graph holds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import onnx
import pytest
from exporting import build_tiny, decoder_cases, export

from quantkit.evaluation.latency import bytes_per_token
from quantkit.export.traffic import Traffic, from_metadata, to_metadata
from quantkit.model.families import FAMILIES
from quantkit.runtime.decoder import open_decoder
from quantkit.runtime.static_decoder import StaticDecoder

ROW_READERS = ("Gather", "GroupQueryAttention", "RotaryEmbedding")  # of tables, and of angles


WIDTHS = {  # bytes in memory: scales in float16 are widened when a session is made
    onnx.TensorProto.FLOAT: 4,
    onnx.TensorProto.FLOAT16: 4,
    onnx.TensorProto.UINT8: 1,
    onnx.TensorProto.INT8: 1,
}


def bytes_in_graph(path, places, active=1.0):
    """Initializers but those that are only gathered from, and the caches as far as each attention sees.

    Of the experts, those of one token count: a share `active` of their bytes.
    """
    graph = onnx.load(path).graph
    readers = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    read = sum(
        math.prod(each.dims) * WIDTHS[each.data_type] * (active if ".experts." in each.name else 1)
        for each in graph.initializer
        if each.data_type in WIDTHS
        and (math.prod(each.dims) > 8 or each.name.endswith((".weight", ".bias")))
        and any(node.op_type not in ROW_READERS for node in readers[each.name])
    )
    for value in graph.input:
        if value.name.startswith("past_key_values"):
            _, heads, _, size = (each.dim_value for each in value.type.tensor_type.shape.dim)
            (attention,) = readers[value.name]
            window = next((each.i for each in attention.attribute if each.name == "local_window_size"), -1)
            read += heads * size * 4 * (places if window < 0 else min(places, window))
    return read


@pytest.mark.parametrize(("name", "sizes"), decoder_cases())
def test_it_is_what_the_graph_holds(name, sizes, tmp_path):
    build_tiny(FAMILIES[name].tiny_class, sizes).save_pretrained(tmp_path / "in")
    made = export(tmp_path / "in", tmp_path / "out")
    experts = sizes.get("num_local_experts") or sizes.get("num_experts")
    active = sizes["num_experts_per_tok"] / experts if experts else 1.0
    for places in (5, 13):  # the tiny windows are 8 tokens long
        wanted = bytes_in_graph(tmp_path / "out" / "model.onnx", places, active)
        assert made.traffic.bytes_at(places, 4) == pytest.approx(wanted, rel=1e-3)
        assert made.traffic.bytes_at(places, 4) > made.traffic.weight_bytes
    decoder = open_decoder(tmp_path / "out")
    assert from_metadata(decoder.metadata) == made.traffic
    # Two tokens after four: the first sees five places, the second six.
    assert bytes_per_token(decoder, made.traffic, (4, 2)) == made.traffic.bytes_at(5.5, 4)
    in_bytes = dataclasses.replace(decoder, cache_type=np.int8)
    assert bytes_per_token(in_bytes, made.traffic, (4, 2)) == made.traffic.bytes_at(5.5, 1)


def test_windows_end_what_is_read():
    traffic = Traffic(weight_bytes=1000, caches=((10, None), (20, 8)))
    assert [traffic.bytes_at(places, 4) for places in (0, 8, 100)] == [1000, 1960, 1000 + 4000 + 640]
    assert from_metadata(to_metadata(traffic)) == traffic
    assert from_metadata({}) is None
    assert from_metadata({"bytes_per_token": 7}) == Traffic(weight_bytes=7), (
        "an artifact that says nothing of caches"
    )


def test_a_cache_of_fixed_size_is_read_whole():
    decoder = StaticDecoder(prompt=None, decode=None, fixed_length=8, num_past=31, cache_type=np.uint16)
    traffic = Traffic(weight_bytes=0, caches=((10, None),))
    assert bytes_per_token(decoder, traffic, (8, 4)) == 32 * 10 * 2
