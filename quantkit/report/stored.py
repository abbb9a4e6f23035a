"""A written report.json, read back as JSON or as a record."""

from __future__ import annotations

import dataclasses
import json
import types
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from quantkit.errors import InputError
from quantkit.report.document import Report
from quantkit.report.tables import Json

REPORT_FILE = "report.json"
AGAIN = "quantize again to write a new report"


REQUIRED = ("model", "scheme", "target", "projections", "matrices", "parameters", "size", "environment")


def read_document(folder: Path) -> dict[str, Any]:
    """The content of an artifact's report.json."""
    path = folder / REPORT_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})",
            where=str(path),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="check the path, or quantize a model first",
        ) from error
    except ValueError as error:
        raise InputError(f"not JSON ({error})", where=str(path), next_step=AGAIN) from error
    missing = [key for key in REQUIRED if key not in document] if isinstance(document, dict) else REQUIRED
    if missing:
        raise InputError(f"not a report: {', '.join(missing)} missing", where=str(path), next_step=AGAIN)
    return dict(document)


def read_report(folder: Path) -> Report:
    """The report of an artifact folder."""
    document = read_document(folder)
    try:
        report: Report = record_of(Report, _as_fields(document))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(folder, error) from error
    return report


def damaged(folder: Path, error: Exception) -> InputError:
    """The error of a report.json that does not fit the record."""
    return InputError(
        f"not a report ({type(error).__name__}: {error})",
        where=str(folder / REPORT_FILE),
        next_step=AGAIN,
    )


def record_of(kind: Any, value: Any) -> Any:
    """A value of a type from its JSON form; the inverse of `to_json` for frozen records."""
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return record_of(next(part for part in arguments if part is not types.NoneType), value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _types_of(kind)
        return kind(**{name: record_of(hints[name], part) for name, part in value.items() if name in hints})
    if origin is tuple:
        parts = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(record_of(part, entry) for part, entry in zip(parts, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    return value


def _types_of(record: type) -> dict[str, Any]:
    """Field types of a record; `Report` names one that would import torch with its module."""
    from quantkit.quantization.transforms.alpha import Smoothing

    return get_type_hints(record, localns={"Smoothing": Smoothing})


def _as_fields(document: Json) -> dict[str, Any]:
    """The document with accuracy and latency under the names of their records' fields."""
    fields = dict(document)
    if "accuracy" in fields:
        accuracy = dict(fields["accuracy"])
        perplexity, protocol = accuracy.pop("perplexity"), accuracy.pop("protocol")
        for model in ("reference", "quantized"):
            accuracy[model] = {
                "value": perplexity[model],
                "standard_error": perplexity[f"{model}_standard_error"],
            }
        fields["accuracy"] = {**perplexity, **protocol, **accuracy}
    fields["latency"] = [_latency_fields(entry) for entry in fields.get("latency", ())]
    return fields


def _latency_fields(entry: Json) -> dict[str, Any]:
    reference = entry.get("reference", {})
    return {
        **entry,
        "reference": reference.get("name"),
        "prefill_reference": reference.get("prefill"),
        "decode_reference": reference.get("decode"),
    }
