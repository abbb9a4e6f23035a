"""quantkit: post-training quantization and verified ONNX export for Hugging Face transformers.

    import quantkit
    artifact = quantkit.quantize("gpt2", min_dim=768)
    artifact.generate("The king", max_new_tokens=32)

Nothing heavy is imported until a function is first used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.errors import InputError
    from quantkit.pipeline.artifact import Artifact, load
    from quantkit.pipeline.compare import compare
    from quantkit.pipeline.dry_run import DryRun, dry_run
    from quantkit.pipeline.inspect import inspect
    from quantkit.pipeline.quantize import quantize
    from quantkit.sweeps.run import sweep

# Telemetry is off unless a user switches it on. onnxruntime and huggingface_hub read these when they are
# imported, and child processes inherit them.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
__all__ = ["Artifact", "DryRun", "InputError", "compare", "dry_run", "inspect", "load", "quantize", "sweep"]
_HOMES = {
    "Artifact": "quantkit.pipeline.artifact",
    "DryRun": "quantkit.pipeline.dry_run",
    "InputError": "quantkit.errors",
    "compare": "quantkit.pipeline.compare",
    "dry_run": "quantkit.pipeline.dry_run",
    "inspect": "quantkit.pipeline.inspect",
    "load": "quantkit.pipeline.artifact",
    "quantize": "quantkit.pipeline.quantize",
    "sweep": "quantkit.sweeps.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
