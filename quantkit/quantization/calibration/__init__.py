"""Calibration: one streaming pass over a text collects what the chosen methods ask about every input.

`calibration_tokens` gives the text, `collect` runs the model over it block by block and leaves a folder of
statistics, `read_evidence` reads them back one matrix at a time.
"""

from quantkit.quantization.calibration.gradients import GradientsFile, collect_gradients
from quantkit.quantization.calibration.passes import collect
from quantkit.quantization.calibration.quick import quick_peaks
from quantkit.quantization.calibration.replay import NotPlainError
from quantkit.quantization.calibration.statistics import WANTS
from quantkit.quantization.calibration.store import StatisticsFile, open_statistics, read_evidence
from quantkit.quantization.calibration.tokens import calibration_tokens, context_length

__all__ = [
    "WANTS",
    "GradientsFile",
    "NotPlainError",
    "StatisticsFile",
    "calibration_tokens",
    "collect",
    "collect_gradients",
    "context_length",
    "open_statistics",
    "quick_peaks",
    "read_evidence",
]
