"""One ONNX file in onnxruntime: how it is opened, its metadata, and the file names of an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.files import expect, parse_json, reading, require_regular
from quantkit.runtime.cpu_session import open_on_cpu
from quantkit.runtime.huge_pages import huge_pages
from quantkit.runtime.machine.facts import read_cpu

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Kind = Literal["decoder", "encoder", "static", "traced", "encoder_decoder"]
MODEL_FILE = "model.onnx"
PROMPT_FILE, DECODE_FILE = "prompt.onnx", "decode.onnx"  # of a decoder whose shapes are fixed
ENCODER_FILE = "encoder_model.onnx"
FIRST_FILE, LATER_FILE = (
    "decoder_model.onnx",
    "decoder_with_past_model.onnx",
)  # of a decoder behind an encoder
PAST, PRESENT = "past_key_values", "present"
# From 1.32 on, onnxruntime would round inputs of 16 bits to 8 in products whose weights are integers.
INPUTS_AS_WRITTEN = ("session.qdq_matmulnbits_accuracy_level", "1")
TYPES: dict[str, Any] = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64,
    "tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_,
    "tensor(int8)": np.int8, "tensor(uint8)": np.uint8, "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
}  # fmt: skip


class NotTextError(InputError):
    """Sound files whose inputs or outputs are not text."""


def holds_static(folder: Path) -> bool:
    """Whether the folder holds a decoder of two graphs of fixed shapes."""
    return (folder / PROMPT_FILE).exists() and (folder / DECODE_FILE).exists()


def holds_model(folder: Path) -> bool:
    """Whether the folder is an artifact and not a checkpoint."""
    return any((folder / name).exists() for name in (MODEL_FILE, ENCODER_FILE)) or holds_static(folder)


def open_graph(path: Path, *, threads: int | None = None, spins: bool = True) -> onnxruntime.InferenceSession:
    """One graph on the CPU; a file that onnxruntime refuses is an input error.

    Worker threads spin between runs, unless another session needs the cores then.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = read_cpu().threads_for(threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry(*INPUTS_AS_WRITTEN)
    if not spins:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not path.exists() and (path.parent / PROMPT_FILE).exists():
        raise InputError(
            "graphs of fixed shapes do not run here",
            where=str(path.parent),
            allowed="generate, eval, bench, report, compare and package",
            next_step="quantize with --target cpu for anything else",
        )
    if not path.exists():
        raise InputError(
            "no such file",
            where=str(path),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        )
    fault = f"onnxruntime {onnxruntime.__version__} cannot load it"
    with reading(path, fault, next_step="copy the folder again with all of its files, or quantize again"):
        require_regular(path)
        with huge_pages():
            return open_on_cpu(str(path), options)


def open_model_file(path: Path, *, threads: int | None = None) -> onnxruntime.InferenceSession:
    """The graph of an artifact of one file; `path` is the folder or the file."""
    return open_graph(path / MODEL_FILE if path.is_dir() else path, threads=threads)


def metadata_of(session: onnxruntime.InferenceSession) -> dict[str, Any]:
    """Metadata that the export wrote into the graph."""
    with reading("the metadata of the graph", "not text"):
        entries = session.get_modelmeta().custom_metadata_map
    return checked_metadata(entries.get("quantkit", "{}"))


def checked_metadata(text: str) -> dict[str, Any]:
    """The metadata of a graph, with the types that its readers rely on."""
    where = "the metadata 'quantkit' of the graph"
    metadata = parse_json(text, where=where)
    for key in ("kind", "model", "scheme"):
        expect(metadata, key, str, where=where)
    positions = expect(metadata, "max_positions", int, where=where)
    if positions is not None and positions < 1:
        raise InputError(f"'max_positions' is {positions}", where=where, allowed="1 or more")
    return metadata


def threads_of(session: onnxruntime.InferenceSession) -> int:
    return int(session.get_session_options().intra_op_num_threads)
