"""Measurements of this machine as JSON files in the cache folder, for the same processor and versions."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import quantkit
from quantkit.errors import InputError
from quantkit.files import read_json
from quantkit.runtime.machine.checks import onnxruntime_wheels
from quantkit.runtime.machine.facts import read_cpu

Key = Mapping[str, Any]


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """$QUANTKIT_CACHE, else $XDG_CACHE_HOME/quantkit, else ~/.cache/quantkit."""
    variables = os.environ if environment is None else environment
    if variables.get("QUANTKIT_CACHE"):
        return Path(variables["QUANTKIT_CACHE"]).expanduser()
    xdg = Path(variables.get("XDG_CACHE_HOME", ""))  # its specification ignores a relative one
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "quantkit"


def machine_key() -> dict[str, str | int]:
    """Everything that a measurement depends on."""
    cpu = read_cpu()
    wheels = onnxruntime_wheels(importlib.metadata.distributions())
    return {
        "cpu": cpu.model,
        "logical_cores": cpu.logical_cores,
        "num_threads": cpu.num_threads,
        "onnxruntime": ", ".join(f"{name} {version}" for name, version in sorted(wheels.items())),
        "quantkit": quantkit.__version__,
    }


def cache_path(kind: str, key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:16]}.json"


def read_measured(kind: str, key: Key) -> Any:
    """The JSON value that `write_measured` kept for this key; None where the file is missing or damaged."""
    try:
        content = read_json(cache_path(kind, key))
        return content["measured"] if content["key"] == dict(key) else None
    except (InputError, KeyError):
        return None


def write_measured(kind: str, key: Key, measured: Any) -> bool:
    """Replace the file of this key in one step; False where the folder cannot be written."""
    path = cache_path(kind, key)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"key": dict(key), "measured": measured}, indent=1) + "\n"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True
