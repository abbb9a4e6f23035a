"""optimum's ONNX export, as it is, quantized by optimum (avx512_vnni), and by onnxruntime's quantize_dynamic.

It runs in onnxruntime directly: results stay in onnxruntime's own buffers and are handed to the next step as
they are, which is no slower than optimum's own classes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import timing


def export(source: Path, output: Path) -> None:
    """Export without optimum's own comparison with PyTorch, which would only add to its time."""
    from optimum.exporters.onnx import main_export
    from transformers import AutoConfig

    is_decoder = AutoConfig.from_pretrained(source).model_type == "gpt2"
    task = "text-generation-with-past" if is_decoder else "feature-extraction"
    main_export(str(source), output, task=task, do_validation=False)


def make(variant: str, source: Path, output: Path) -> None:
    """`avx512_vnni` exports and quantizes in one process; the others start from its export."""
    if variant == "avx512_vnni":
        from optimum.onnxruntime import ORTQuantizer
        from optimum.onnxruntime.configuration import AutoQuantizationConfig

        export(source, output / "float")
        config = AutoQuantizationConfig.avx512_vnni(is_static=False)  # per channel, its default
        quantizer = ORTQuantizer.from_pretrained(output / "float", file_name="model.onnx")
        quantizer.quantize(save_dir=output, quantization_config=config, file_suffix="")
    elif variant == "quantize_dynamic":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(source / "float" / "model.onnx", output / "model.onnx", weight_type=QuantType.QInt8)
    else:
        for path in (source / "float").glob("model.onnx*"):
            shutil.copy(path, output / path.name)


def open_session(folder: Path) -> onnxruntime.InferenceSession:
    """The same settings for each."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = timing.NUM_THREADS
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )


def open_decoder(variant: str, folder: Path) -> tuple[Callable[[], None], timing.Feed]:
    """Keys and values go from one step's outputs to the next one's inputs without a copy."""
    session = open_session(folder)
    inputs = {each.name: each for each in session.get_inputs()}
    outputs = [each.name for each in session.get_outputs()]
    state: dict[str, Any] = {}

    def clear() -> None:
        state["length"] = 0
        for name, each in inputs.items():
            if name.startswith("past_key_values"):
                empty = np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32)
                state[name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty)

    def feed(ids: list[int]) -> object:
        begin, end = state["length"], state["length"] + len(ids)
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", np.array([ids], np.int64))
        binding.bind_cpu_input("attention_mask", np.ones((1, end), np.int64))
        if "position_ids" in inputs:
            binding.bind_cpu_input("position_ids", np.arange(begin, end, dtype=np.int64)[None])
        for name in inputs:
            if name.startswith("past_key_values"):
                binding.bind_ortvalue_input(name, state[name])
        for name in outputs:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        values = dict(zip(outputs, binding.get_outputs(), strict=True))
        for name in outputs:
            if name.startswith("present"):
                state[name.replace("present", "past_key_values")] = values[name]
        state["length"] = end
        return values["logits"].numpy()

    return clear, feed


def open_encoder(variant: str, folder: Path) -> timing.Feed:
    """One sentence without padding."""
    session = open_session(folder)
    names = {each.name for each in session.get_inputs()}

    def feed(ids: list[int]) -> object:
        array = np.array([ids], np.int64)
        feeds = {
            "input_ids": array,
            "attention_mask": np.ones_like(array),
            "token_type_ids": np.zeros_like(array),
        }
        return session.run(None, {name: value for name, value in feeds.items() if name in names})

    return feed


if __name__ == "__main__":
    timing.main(make=make, open_decoder=open_decoder, open_encoder=open_encoder)
