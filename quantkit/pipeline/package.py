"""One self-contained folder or zip of an artifact, for a device that has no more than onnxruntime.

Only what running needs is taken along, and each file is compared with the artifact's manifest first, so that
damage is found here and not on a device. Everything is written beside the output and renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import string
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantkit
from quantkit.errors import InputError
from quantkit.export.check import Written
from quantkit.pipeline.folder import MANIFEST, new_artifact
from quantkit.pipeline.package_kinds import DEVICE, PAGE, STATIC_PAGE, Kind, kind_of
from quantkit.plan.targets import TARGETS
from quantkit.runtime.providers.compiled import file_hash, model_hash

TOKENIZER, COMPILED = "tokenizer.json", "compiled"
FORMAT = 1  # of a package's manifest
PURPOSES: dict[str, str] = {
    TOKENIZER: "text to token ids and back",
    "config.json": "the model's facts, with the tokens that end a text",
    "generation_config.json": "the tokens that end a text, where these differ",
    "genai_config.json": "for running it with onnxruntime-genai instead",
    "run.py": "runs it, in 60 lines to read and to copy from",
    "device.py": "what that stands on: onnxruntime, tokenizers and numpy are all it imports",
    "README.md": "this page",
}
Member = Path | bytes  # a file of the artifact, or content made here


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A written package."""

    path: Path
    kind: str
    command: str  # that runs it
    files: tuple[str, ...]
    num_bytes: int
    is_for_npu: bool = False
    notes: tuple[str, ...] = ()  # what was left out


def pack(
    folder: Path, output: Path | None = None, *, target: str | None = None, force: bool = False
) -> Packed:
    """Check the artifact, and write what a device needs of it; `target` is what it must be made for."""
    manifest = read_manifest(folder)
    if target is not None:
        require_target(folder, manifest.get("target"), target)
    output = output or Path(f"{folder.resolve().name}-package")
    if output.resolve().is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(output.resolve()):
        raise InputError(
            "the package would lie in the artifact, or replace it",
            where=str(output),
            next_step="choose another place with -o",
        )
    require_whole(folder, manifest["files"])
    members, kind, notes = members_of(folder, manifest)
    if output.suffix == ".zip":
        _write_zip(output, members, force=force)
    else:
        with new_artifact(output, force=force) as partial:
            for name, content in members.items():
                (partial / name).parent.mkdir(exist_ok=True)
                if isinstance(content, bytes):
                    (partial / name).write_bytes(content)
                else:
                    shutil.copyfile(content, partial / name)
    sizes = [len(each) if isinstance(each, bytes) else each.stat().st_size for each in members.values()]
    return Packed(
        path=output,
        kind=kind.name,
        command=kind.command,
        files=tuple(members),
        num_bytes=sum(sizes),
        is_for_npu=page_of(kind, manifest) == STATIC_PAGE,
        notes=notes,
    )


def require_target(folder: Path, made_for: object, wanted: str) -> None:
    """Refuse an artifact of another target; two names of one target are alike."""
    if wanted not in TARGETS:
        raise InputError(f"no target '{wanted}'", where="--target", allowed=", ".join(TARGETS))
    if TARGETS.get(str(made_for)) != TARGETS[wanted]:
        raise InputError(
            f"it was made for target '{made_for}'",
            where=str(folder),
            allowed=f"an artifact of target '{wanted}'",
            next_step=f"quantkit quantize MODEL --target {wanted}, or leave --target out",
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an artifact; anything else is refused."""
    expected: dict[str, Any] = {"where": str(folder), "allowed": "a folder that 'quantkit quantize' wrote"}
    path = folder / MANIFEST
    if not path.is_file():
        what = "there is no manifest.json in it" if folder.is_dir() else "no such folder"
        raise InputError(f"no artifact: {what}", **expected)
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        files = manifest["files"]
        is_sound = all(isinstance(name, str) and isinstance(value, str) for name, value in files.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        is_sound = False
    if not is_sound:
        raise InputError("no artifact: its manifest.json lists no files", **expected)
    if "package" in manifest:
        raise InputError("it is a package already", next_step="copy it as it is", **expected)
    return manifest


def require_whole(folder: Path, files: Mapping[str, str]) -> None:
    """Name every file that is not as the run left it."""
    faults = []
    for name, wanted in sorted(files.items()):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            faults.append(f"{name} lies outside of it")
        elif not path.is_file():
            faults.append(f"{name} is missing")
        elif file_hash(path) != wanted:
            faults.append(f"{name} is not what the manifest says")
    if faults:
        raise InputError(
            f"the artifact is damaged: {'; '.join(faults[:4])}",
            where=str(folder),
            next_step="copy it again, or quantize again",
        )


def members_of(folder: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Member], Kind, tuple[str, ...]]:
    """(what goes into the package by name, its kind, what was left out), the manifest last."""
    files = manifest["files"]
    kind, graphs = kind_of(folder, files)
    if TOKENIZER not in files:
        raise InputError(
            "it has no tokenizer.json, and a device has no other tokenizer",
            where=str(folder),
            next_step="quantize from a folder that has the model's tokenizer",
        )
    data_files = list(dict.fromkeys(name for written in graphs.values() for name in written.data_files))
    unlisted = [name for name in data_files if name not in files]
    if unlisted:
        raise InputError(
            f"the graph reads {', '.join(unlisted)}, which the manifest does not list",
            where=str(folder),
            next_step="quantize again",
        )
    licenses = sorted(name for name in files if name.upper().startswith(("LICENSE", "LICENCE", "NOTICE")))
    wanted = [*graphs, *data_files, TOKENIZER, "config.json", "generation_config.json"]
    wanted += ["genai_config.json", *licenses]
    members: dict[str, Member] = {name: folder / name for name in wanted if name in files}
    compiled, notes = compiled_forms(folder, list(graphs))
    members |= compiled
    members["run.py"], members[DEVICE.name] = kind.runner.read_bytes(), DEVICE.read_bytes()
    purposes = {**PURPOSES, **kind.graphs} | dict.fromkeys(data_files, "weights, which the graphs point to")
    purposes |= dict.fromkeys(licenses, "license of the model")
    purposes |= dict.fromkeys(compiled, "compiled for an NPU, and what it was compiled from")
    members["README.md"] = _page(members, graphs, kind, manifest, purposes)
    first = next(iter(graphs.values()))
    described = {
        "package": FORMAT,
        "quantkit": quantkit.__version__,
        "model": first.model,
        "kind": kind.name,
        "scheme": manifest.get("scheme"),
        "target": manifest.get("target"),
        "opset": max(written.opset for written in graphs.values()),
        "ir_version": max(written.ir_version for written in graphs.values()),
        "onnxruntime": manifest.get("versions", {}).get("onnxruntime"),
        "artifact_sha256": file_hash(folder / MANIFEST),
        "files": {
            name: hashlib.sha256(each).hexdigest() if isinstance(each, bytes) else file_hash(each)
            for name, each in members.items()
        },
    }
    members[MANIFEST] = (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()
    return members, kind, notes


def compiled_forms(folder: Path, graphs: Sequence[str]) -> tuple[dict[str, Path], tuple[str, ...]]:
    """(what providers compiled from these graphs, with a record beside each; what does not fit them)."""
    found: dict[str, Path] = {}
    notes = []
    for graph in graphs:
        for context in sorted((folder / COMPILED).glob(f"{Path(graph).stem}.*.onnx")):
            record = context.with_suffix(".json")
            try:
                told = json.loads(record.read_text(encoding="utf-8"))
                fits = told["model_sha256"] == model_hash(folder / graph)
                fits = fits and told["file_sha256"] == file_hash(context)
            except (OSError, ValueError, KeyError, TypeError):
                fits = False
            if fits:
                found |= {f"{COMPILED}/{path.name}": path for path in (context, record)}
            else:
                notes.append(f"{COMPILED}/{context.name} was left out: it was not compiled from this {graph}")
    return found, tuple(notes)


def _page(
    members: Mapping[str, Member],
    graphs: Mapping[str, Written],
    kind: Kind,
    manifest: Mapping[str, Any],
    purposes: Mapping[str, str],
) -> bytes:
    target = TARGETS.get(str(manifest.get("target")))
    rows = [f"| `{name}` | {purposes[name]} |" for name in (*members, "README.md")]
    rows.append(f"| `{MANIFEST}` | what made it, and the SHA-256 of every file |")
    values = [
        f"| {side if len(graphs) == 1 else f'{graph}, {side}'} | `{value.name}` "
        f"| {value.element_type.lower()} | {', '.join(map(str, value.shape))} |"
        for graph, written in graphs.items()
        for side, listed in (("in", written.inputs), ("out", written.outputs))
        for value in listed
    ]
    licenses = [name for name, purpose in purposes.items() if purpose == "license of the model"]
    data_files = [name for written in graphs.values() for name in written.data_files]
    copied = ", ".join(f"`{name}`" for name in dict.fromkeys((*graphs, *data_files, TOKENIZER)))
    num_bytes = sum(each.stat().st_size for each in members.values() if isinstance(each, Path))
    text = string.Template(page_of(kind, manifest).read_text(encoding="utf-8")).substitute(
        model=next(iter(graphs.values())).model,
        kind=kind.name,
        quantkit=manifest.get("quantkit"),
        scheme=manifest.get("scheme"),
        target=manifest.get("target"),
        description=target.description if target else "unknown to this version",
        megabytes=f"{num_bytes / 1e6:.1f}",
        files="\n".join(rows),
        run=kind.command,
        onnxruntime=manifest.get("versions", {}).get("onnxruntime", "of an unknown version"),
        copied=copied,
        values="\n".join(values),
        notes=kind.notes,
        compiled=_about_compiled([each for each in members.values() if isinstance(each, Path)]),
        licenses=f": see {', '.join(licenses)}" if licenses else ", which quantkit does not know",
    )
    return text.encode()


def page_of(kind: Kind, manifest: Mapping[str, Any]) -> Path:
    """The page of its kind; a file that leaves activations to the runtime is for no NPU."""
    target = TARGETS.get(str(manifest.get("target")))
    return PAGE if target and not target.rounds_values else kind.page


def _about_compiled(paths: Sequence[Path]) -> str:
    """Where what was compiled serves, from its records."""
    records = [path for path in paths if path.parent.name == COMPILED and path.suffix == ".json"]
    if not records:
        return "Nothing compiled is here, so a provider compiles the graphs\nwhenever a session starts."
    told = json.loads(records[0].read_text(encoding="utf-8"))
    made_by = f"{told['provider']} {told['provider_version']}"
    return (
        f"`{COMPILED}/` holds what the provider {made_by} made of the graphs\n"
        f"under onnxruntime {told['onnxruntime']}, for the device `{told['device']}`. `run.py`\n"
        "starts from it where versions and device are the same; elsewhere a provider compiles the graphs "
        "whenever\na session starts."
    )


def _write_zip(output: Path, members: Mapping[str, Member], *, force: bool) -> None:
    """The same files in one folder of a zip; two runs write the same bytes."""
    if output.exists():
        _require_replaceable(output, force=force)
    partial = output.absolute().parent / f".{output.name}.{os.getpid()}.partial"
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w", compression=zipfile.ZIP_DEFLATED) as archive:
            for member, content in members.items():
                entry = zipfile.ZipInfo(f"{output.stem}/{member}")  # dated 1980, whenever it is written
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                with archive.open(entry, "w", force_zip64=True) as writing:
                    if isinstance(content, bytes):
                        writing.write(content)
                        continue
                    with content.open("rb") as reading:
                        shutil.copyfileobj(reading, writing, 1 << 22)
        partial.replace(output)
    except OSError as error:
        raise InputError(
            f"cannot be written ({error.strerror})",
            where=str(output),
            next_step="choose another place with -o; nothing was kept",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # its folder may not be there either
            partial.unlink(missing_ok=True)


def _require_replaceable(output: Path, *, force: bool) -> None:
    if not output.is_file():
        raise InputError("a folder is in the way", where=str(output), next_step="choose another name with -o")
    if not force:
        raise InputError(
            "the file exists",
            where=str(output),
            next_step="pass --force to replace it, or choose another with -o",
        )
    try:
        with zipfile.ZipFile(output) as archive:
            is_ours = any(name.endswith(f"/{MANIFEST}") for name in archive.namelist())
    except zipfile.BadZipFile:
        is_ours = False
    if not is_ours:
        raise InputError(
            "--force only replaces a zip that quantkit wrote, and this one has no manifest.json",
            where=str(output),
            next_step="choose another name with -o, or remove this one yourself",
        )
