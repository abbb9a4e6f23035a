"""A session on the CPU whose integer products are exact on every processor.

An x86 processor without VNNI multiplies bytes with VPMADDUBSW, which cuts sums of two products off at 16
bits: weights of 8 bits with one scale a channel then give wrong outputs. onnxruntime's `x64quantprecision`
makes these sums exact. With VNNI they are exact without it, and it would only make them slower. onnxruntime
cannot apply it to a graph in which two products share one weight. Inputs of 16 bits need two such products:
their weights become floats. Other graphs, as of ALBERT, are refused here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnxruntime

from quantkit.errors import InputError
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.manifest import target_of

EXACT_SUMS = "session.x64quantprecision"
FLOAT_WEIGHTS = "session.disable_quant_qdq"
SHARED_WEIGHT = "Attempt to replace the existing tensor"  # in onnxruntime's error
SILENT = 4
CPU = ["CPUExecutionProvider"]


def open_on_cpu(model: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    """The session; `options` gain what this machine's processor needs."""
    if not read_cpu().saturates or _has_small_weights(model):
        return onnxruntime.InferenceSession(model, options, providers=CPU)
    severity, options.log_severity_level = options.log_severity_level, SILENT
    try:
        for entry in (EXACT_SUMS, FLOAT_WEIGHTS):
            options.add_session_config_entry(entry, "1")
            with contextlib.suppress(_SharedWeightError):
                return _opened(model, options)
    finally:
        options.log_severity_level = severity
    raise InputError(
        "products share one weight, whose sums onnxruntime cannot make exact on this processor without VNNI",
        where=model if isinstance(model, str) else "the graph",
        next_step="quantize with --target cpu-avx2, or run it on a processor with VNNI",
    )


class _SharedWeightError(Exception):
    pass


def _opened(model: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    try:
        return onnxruntime.InferenceSession(model, options, providers=CPU)
    except Exception as error:  # onnxruntime's classes of errors share no public base
        if SHARED_WEIGHT in str(error):
            raise _SharedWeightError from error
        raise


def _has_small_weights(model: str | bytes) -> bool:
    """Whether the file is made for processors without VNNI: sums of 7-bit weights are never cut off."""
    return isinstance(model, str) and target_of(Path(model).parent) == "cpu-avx2"
