"""A written report.json, read back as JSON or as a record."""

from __future__ import annotations

import dataclasses
import types
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from quantkit.errors import InputError
from quantkit.files import read_json, reading
from quantkit.report.document import Report
from quantkit.report.tables import Json

REPORT_FILE = "report.json"
AGAIN = "quantize again to write a new report"


REQUIRED = ("model", "scheme", "target", "projections", "matrices", "parameters", "size", "environment")


def read_document(folder: Path) -> dict[str, Any]:
    """The content of an artifact's report.json."""
    path = folder / REPORT_FILE
    document = read_json(path, allowed="a folder that 'quantkit quantize' wrote", next_step=AGAIN)
    missing = [key for key in REQUIRED if key not in document]
    if missing:
        raise InputError(f"not a report: {', '.join(missing)} missing", where=str(path), next_step=AGAIN)
    unnamed = [key for key in REQUIRED[:3] if not isinstance(document[key], str)]
    if unnamed:
        raise InputError(f"not a report: {', '.join(unnamed)} no text", where=str(path), next_step=AGAIN)
    return document


def read_report(folder: Path) -> Report:
    """The report of an artifact folder."""
    document = read_document(folder)
    with showing(folder):
        report: Report = record_of(Report, _as_fields(document))
    return report


def showing(folder: Path) -> AbstractContextManager[None]:
    """A fault within is one of the folder's report.json, whose parts are not those of a report."""
    return reading(folder / REPORT_FILE, "not a report", next_step=AGAIN)


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
