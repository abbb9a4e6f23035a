"""The key of a protected model: 32 random bytes in a file that only its owner reads, bound to one model.

A key shows itself nowhere: not when printed, not in an error, not in a report. Whoever wants an order asks
the key for it. The file names the model by a fingerprint, because a key of another model would make no noise:
the two sides would still agree with each other, and a key in use for two models is lost twice.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.errors import InputError
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.tensors import TensorSource
from quantkit.private.order import keyed_order
from quantkit.private.secret_files import LARGEST_FILE, read_secret, write_secret
from quantkit.quantization.layout import weight_name
from quantkit.quantization.transforms.basis import Order

FORMAT, VERSION = "quantkit-feature-key", 1
KEY_BYTES = 32
SAMPLED_ROWS = 32  # of the beginning and of the end of every tensor, for the fingerprint
# What a config says about its file and not about its model.
NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "use_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """The secret, and the model it is for."""

    secret: bytes = field(repr=False)
    model: str  # fingerprint

    def order(self, space: str, width: int) -> Order:
        """The order of a space."""
        return keyed_order(self.secret, model=bytes.fromhex(self.model), space=space, width=width)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A key is written by `create_key` alone, and never along with something else."""
        raise TypeError("a key is not pickled")


def fingerprint(config: Mapping[str, Any], model_map: ModelMap, source: TensorSource) -> str:
    """A model by its config and its weights: of each tensor the shape and rows from both of its ends.

    Training changes every row, so these tell two models apart without reading gigabytes twice.
    """
    found = hashlib.sha256()
    known = {key: value for key, value in config.items() if key not in NOT_THE_MODEL}
    found.update(json.dumps(known, sort_keys=True, default=str).encode())
    for name in _tensors(model_map, source):
        shape = source.shape(name)
        found.update(f"{name}{shape}".encode())
        rows = shape[0] if shape else 1
        starts = (0,) if len(shape) < 2 or rows <= 2 * SAMPLED_ROWS else (0, rows - SAMPLED_ROWS)
        for start in starts:
            count = None if len(starts) == 1 else SAMPLED_ROWS
            found.update(np.ascontiguousarray(source.read(name, start, count), np.float32).tobytes())
    return found.hexdigest()


def _tensors(model_map: ModelMap, source: TensorSource) -> list[str]:
    names = {weight_name(layer) for layer in model_map.layers}
    names |= {f"{layer.matrix}.bias" for layer in model_map.layers if layer.has_bias}
    names |= {f"{table.tied_to or table.name}.weight" for table in model_map.embeddings}
    names |= {f"{norm.name}.{part}" for norm in model_map.norms for part in ("weight", "bias")}
    return sorted(name for name in names if source.has(name))


def create_key(path: Path, model: str) -> Key:
    """A new key in a new file; one that is there is never written over."""
    key = Key(secret=secrets.token_bytes(KEY_BYTES), model=model)
    document = {"format": FORMAT, "version": VERSION, "model": model, "key": key.secret.hex()}
    write_secret(path, json.dumps(document, indent=2) + "\n")
    return key


def open_key(path: Path, model: str) -> Key:
    """The key of a file, if it is for this model and nobody else may read it."""
    text = read_secret(path, what="key", remedy="make a new key and protect again")
    document = _document(text, path)
    if not hmac.compare_digest(document["model"], model):
        raise InputError(
            "the key is for another model",
            where=str(path),
            allowed=f"a key for the model with the fingerprint {model[:16]}; this one is for "
            f"{document['model'][:16]}",
            next_step="give that model, or another --key FILE, which is made if it does not exist",
        )
    return Key(secret=bytes.fromhex(document["key"]), model=document["model"])


def _document(text: bytes, path: Path) -> dict[str, str]:
    """The fields of a key file; what is wrong is told without what it says."""
    faults = ""
    try:
        document = json.loads(text) if len(text) <= LARGEST_FILE else None
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        faults = "not a key file"
    elif document.get("version") != VERSION:
        faults = "a key file of a version that this quantkit does not read"
    elif not _is_hex(document.get("key"), KEY_BYTES) or not _is_hex(document.get("model"), 32):
        faults = "its key or its model's fingerprint is damaged"
    if faults or not isinstance(document, dict):
        raise InputError(
            faults,
            where=str(path),
            allowed="a file that 'quantkit protect' made",
            next_step="restore it from a copy, or protect again with a new key",
        )
    return document


def _is_hex(value: object, num_bytes: int) -> bool:
    try:
        return isinstance(value, str) and len(bytes.fromhex(value)) == num_bytes
    except ValueError:
        return False
