"""Compiled graphs kept for the next start: compiling for an NPU is slow, opening a compiled graph is not.

onnxruntime writes a provider's compiled graph as one more ONNX file (EPContext), which opens like a model. It
lies in `compiled/` beside the graph, or in the cache folder where that cannot be written. A JSON record
beside it holds its origin: provider, versions, device, options, and a hash of the graph with its weights.
Where anything differs the graph is compiled again, and the reason is reported. The hash of the kept file is
checked before anything opens it, because vendors' libraries crash on damaged files.
https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import onnxruntime
import psutil

from quantkit.errors import InputError
from quantkit.files import read_json
from quantkit.runtime.machine.cache import cache_folder
from quantkit.runtime.manifest import sha256_of
from quantkit.runtime.providers.table import Provider, device_of, one_line, open_on, options_of, version_of

FOLDER = "compiled"
WEIGHT_FILES = (".safetensors", ".data", ".bin", ".weights")  # external data of a graph
# Reasons to compile again by field of the origin, the most telling first.
REASONS = {
    "model_sha256": "the model has changed",
    "provider_version": "it was compiled by version {kept}, and {now} is here",
    "onnxruntime": "it was compiled under onnxruntime {kept}, and {now} is here",
    "device": "it was compiled for another device",
    "options": "it was compiled with other options",
    "provider": "it was compiled for {kept}",
}
Options = Callable[[], onnxruntime.SessionOptions]  # fresh ones: a provider can be added only once


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Everything that a compiled graph depends on."""

    provider: str
    provider_version: str
    onnxruntime: str
    device: str
    options: str
    model_sha256: str  # of the graph and its external weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A compiled graph that is sound and fits, or the reason why there is none."""

    context: Path | None
    reason: str = ""  # empty too where nothing was kept yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    session: onnxruntime.InferenceSession
    is_reused: bool
    message: str  # one line; empty where the kept graph was used


def origin_of(provider: Provider, model: Path) -> Origin:
    return Origin(
        provider=provider.name,
        provider_version=version_of(provider),
        onnxruntime=onnxruntime.__version__,
        device=device_of(provider),
        options=json.dumps(options_of(provider), sort_keys=True),
        model_sha256=model_hash(model),
    )


def model_hash(model: Path) -> str:
    """SHA-256 of the graph and of every file of weights that it names."""
    graph = model.read_bytes()
    digest = hashlib.sha256(graph)
    for path in sorted(model.parent.iterdir()):
        # External data is stored under its file's name, as plain text.
        if path.suffix in WEIGHT_FILES and path.is_file() and path.name.encode() in graph:
            digest.update(path.name.encode())
            digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


def places_of(model: Path) -> tuple[Path, Path]:
    """Folders of a graph's compiled forms: beside it, and in the cache folder."""
    key = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]
    return model.parent / FOLDER, cache_folder() / FOLDER / key


def name_of(provider: Provider, model: Path) -> str:
    """Name of the compiled file; that of its record ends in `.json`."""
    return f"{model.stem}.{provider.name}.onnx"


def find(provider: Provider, model: Path, origin: Origin | None = None) -> Kept:
    """The compiled graph that fits the installed versions and the graph as it is now."""
    origin = origin or origin_of(provider, model)
    reasons = []
    for place in places_of(model):
        context = place / name_of(provider, model)
        if not context.exists() and not _record_of(context).exists():
            continue
        reason = _why_stale(context, origin)
        if not reason:
            return Kept(context=context)
        reasons.append(reason)
    return Kept(context=None, reason=next(iter(reasons), ""))


def start(provider: Provider, model: Path, options: Options) -> Started:
    """A session from the compiled graph where one fits; else compiled now, and kept for the next start."""
    origin = origin_of(provider, model)
    kept = find(provider, model, origin)
    reason = kept.reason
    if kept.context is not None:
        try:
            return Started(
                session=open_on(provider, str(kept.context), options()), is_reused=True, message=""
            )
        except Exception as error:  # onnxruntime's and the vendor's share no base class
            reason = f"it does not open ({one_line(error)})"
    session, why_not_kept = compile_kept(provider, model, options, origin)
    again = f"{model.name} was compiled again for {provider.name}: {reason}" if reason else ""
    message = "; ".join(filter(None, (again, why_not_kept)))
    return Started(session=session, is_reused=False, message=message)


def compile_kept(
    provider: Provider, model: Path, options: Options, origin: Origin | None = None
) -> tuple[onnxruntime.InferenceSession, str]:
    """(a session compiled from the graph, the reason why the compiled graph could not be kept)."""
    origin = origin or origin_of(provider, model)
    place, why_not = _writable(places_of(model))
    if place is None:
        return open_on(provider, str(model), options()), f"what was compiled cannot be kept ({why_not})"
    context = place / name_of(provider, model)
    partial = context.with_name(f".{os.getpid()}.{context.name}")
    _remove_leftovers(context)
    settings = options()
    settings.add_session_config_entry("ep.context_enable", "1")
    settings.add_session_config_entry("ep.context_embed_mode", "1")  # one file: a rename moves it whole
    settings.add_session_config_entry("ep.context_file_path", str(partial))
    try:
        began = time.perf_counter()
        try:
            session = open_on(provider, str(model), settings)
        except Exception as error:
            # The provider refuses the graph, and this raises again, or it cannot export its compiled graph.
            session = open_on(provider, str(model), options())
            return session, f"{provider.name} does not give away what it compiled ({one_line(error)})"
        compile_ms = (time.perf_counter() - began) * 1e3
        if not partial.exists():
            return session, f"{provider.name} gave no compiled form"
        try:
            _publish(partial, context, origin, compile_ms)
        except OSError as error:
            return session, f"what was compiled cannot be kept ({error.strerror})"
        return session, ""
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
            partial.with_suffix(".json").unlink(missing_ok=True)


def _publish(partial: Path, context: Path, origin: Origin, compile_ms: float) -> None:
    """The old record goes first and the new one comes last, so that a killed run leaves none."""
    record = _record_of(context)
    content = {
        **asdict(origin),
        "file": context.name,
        "file_sha256": sha256_of(partial),
        "compile_ms": round(compile_ms, 3),
    }
    written = partial.with_suffix(".json")
    written.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    record.unlink(missing_ok=True)
    partial.replace(context)
    written.replace(record)


def _remove_leftovers(context: Path) -> None:
    """Remove files of killed runs; the number in a name is the process id."""
    for path in context.parent.glob(f".*.{context.stem}.*"):
        number = path.name.split(".")[1]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            with contextlib.suppress(OSError):
                path.unlink()


def _record_of(context: Path) -> Path:
    return context.with_suffix(".json")


def _why_stale(context: Path, origin: Origin) -> str:
    """Why a compiled graph must not be used, or an empty string."""
    try:
        record = read_json(_record_of(context))
        kept = {field.name: str(record[field.name]) for field in fields(Origin)}
        file_sha256 = str(record["file_sha256"])
    except (InputError, KeyError):
        return "no record says what it was compiled from"
    now = asdict(origin)
    for key, words in REASONS.items():
        if kept[key] != now[key]:
            return words.format(kept=kept[key], now=now[key])
    try:
        is_sound = sha256_of(context) == file_sha256
    except OSError:
        return "its file is gone"
    return "" if is_sound else "its file is damaged"


def _writable(places: Sequence[Path]) -> tuple[Path | None, str]:
    """The first folder that can be written, or the reason why none can."""
    why_not = ""
    for place in places:
        trial = place / f".{os.getpid()}.trial"
        try:
            place.mkdir(parents=True, exist_ok=True)
            trial.touch()
            trial.unlink()
        except OSError as error:
            why_not = f"{place}: {error.strerror}"
        else:
            return place, ""
    return None, why_not
