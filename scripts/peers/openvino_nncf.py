"""OpenVINO with NNCF's INT8 weights, exported by optimum-intel and run by OpenVINO itself with its defaults.

The head computes the last position only: OpenVINO's own text generation cuts the graph the same way, and
leaving that out would make its prompts look slower than its users see them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import timing


def make(variant: str, source: Path, output: Path) -> None:
    """Export and compress the weights, with the state (the cache) inside the model."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    config = OVWeightQuantizationConfig(bits=8)
    model = OVModelForCausalLM.from_pretrained(source, export=True, quantization_config=config, compile=False)
    model.save_pretrained(output)


def compiled(folder: Path) -> Any:
    """Compile for latency on the threads that everybody has."""
    core = openvino.Core()
    model = core.read_model(folder / "openvino_model.xml")
    head = model.output("logits").get_node().input_value(0).get_node()
    assert head.get_type_name() == "MatMul", f"the head is a {head.get_type_name()}"
    hidden = head.input_value(0)
    operators = openvino.opset13
    bounds = [operators.constant(np.array([value], np.int64)) for value in (-1, np.iinfo(np.int64).max, 1, 1)]
    last = operators.slice(hidden, *bounds)
    head.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": timing.NUM_THREADS}
    return core.compile_model(model, "CPU", settings)


def open_decoder(variant: str, folder: Path) -> tuple[Callable[[], None], timing.Feed]:
    """The cache lives in the request and is cleared between prompts."""
    request = compiled(folder).create_infer_request()
    names = {name for each in request.model_inputs for name in each.get_names()}
    length = [0]

    def clear() -> None:
        request.reset_state()
        length[0] = 0

    def feed(ids: list[int]) -> object:
        begin, end = length[0], length[0] + len(ids)
        feeds = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begin, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request.infer({name: value for name, value in feeds.items() if name in names})
        length[0] = end
        logits: object = request.get_tensor("logits").data
        return logits

    return clear, feed


if __name__ == "__main__":
    timing.main(make=make, open_decoder=open_decoder)
