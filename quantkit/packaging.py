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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantkit
from quantkit.artifact import MANIFEST, new_artifact
from quantkit.errors import InputError
from quantkit.export.targets import TARGETS
from quantkit.export.written import Written, read_written

PACKAGE = Path(__file__).parent
RUNNER, README = PACKAGE / "runtime" / "on_device.py", PACKAGE / "assets" / "runner" / "README.md"
MODEL, TOKENIZER = "model.onnx", "tokenizer.json"
FORMAT = 1  # of a package's manifest
KINDS = {"decoder": "decoder", "encoder": "encoder", "traced": "encoder"}  # a traced decoder is none of them
PURPOSES: dict[str, str] = {
    MODEL: "the graph",
    TOKENIZER: "text to token ids and back",
    "config.json": "the model's facts, with the tokens that end a text",
    "generation_config.json": "the tokens that end a text, where these differ",
    "genai_config.json": "for running it with onnxruntime-genai instead",
    "run.py": "runs it: onnxruntime, tokenizers and numpy are all it imports",
    "README.md": "this page",
}
RUNS = {
    "decoder": 'python run.py "Once upon a time" --max-new-tokens 64',
    "encoder": 'python run.py "One text" "Another text"',
}
NOTES = {
    "decoder": """A prompt goes in whole, then one token at a time. `attention_mask` covers all tokens so far,
ones throughout for a single text, and `position_ids` counts from 0. For speed, bind each `past_key_values.N`
and its `present.N` to one buffer of the length that prompt and answer take together: the graph writes new
keys and values into it. The token with the largest logit is the next one; `run.py` shows all of it.""",
    "encoder": "One text at a time needs no padding: `attention_mask` is all ones, token types are zeros.",
}
Member = Path | bytes  # a file of the artifact, or content made here


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A written package."""

    path: Path
    kind: str
    files: tuple[str, ...]
    num_bytes: int


def pack(folder: Path, output: Path | None = None, *, force: bool = False) -> Packed:
    """Check the artifact, and write what a device needs of it."""
    manifest = read_manifest(folder)
    output = output or Path(f"{folder.resolve().name}-package")
    if output.resolve().is_relative_to(folder.resolve()) or folder.resolve().is_relative_to(output.resolve()):
        raise InputError(
            "the package would lie in the artifact, or replace it",
            where=str(output),
            next_step="choose another place with -o",
        )
    require_whole(folder, manifest["files"])
    members, kind = members_of(folder, manifest)
    if output.suffix == ".zip":
        _write_zip(output, members, force=force)
    else:
        with new_artifact(output, force=force) as partial:
            for name, content in members.items():
                if isinstance(content, bytes):
                    (partial / name).write_bytes(content)
                else:
                    shutil.copyfile(content, partial / name)
    sizes = [len(each) if isinstance(each, bytes) else each.stat().st_size for each in members.values()]
    return Packed(path=output, kind=kind, files=tuple(members), num_bytes=sum(sizes))


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
        else:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                    faults.append(f"{name} is not what the manifest says")
    if faults:
        raise InputError(
            f"the artifact is damaged: {'; '.join(faults[:4])}",
            where=str(folder),
            next_step="copy it again, or quantize again",
        )


def members_of(folder: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Member], str]:
    """(what goes into the package by name, the kind of model), the manifest last."""
    files = manifest["files"]
    if MODEL not in files:
        graphs = [name for name in files if name.endswith(".onnx")]
        raise InputError(
            f"the runner has no way to run its files ({', '.join(graphs) or 'no graph at all'})",
            where=str(folder),
            allowed="a decoder or an encoder in one model.onnx",
        )
    written = read_written(folder / MODEL)
    kind = KINDS.get(written.kind)
    if kind is None or (written.kind == "traced" and written.has_cache):
        raise InputError(
            "the runner has no way to run it: its cache grows by copying, or quantkit did not write it",
            where=str(folder / MODEL),
            allowed="a decoder that is written as a fused graph, or an encoder",
        )
    if TOKENIZER not in files:
        raise InputError(
            "it has no tokenizer.json, and a device has no other tokenizer",
            where=str(folder),
            next_step="quantize from a folder that has the model's tokenizer",
        )
    unlisted = [name for name in written.data_files if name not in files]
    if unlisted:
        raise InputError(
            f"the graph reads {', '.join(unlisted)}, which the manifest does not list",
            where=str(folder),
            next_step="quantize again",
        )
    licenses = sorted(name for name in files if name.upper().startswith(("LICENSE", "LICENCE", "NOTICE")))
    wanted = [MODEL, *written.data_files, TOKENIZER, "config.json", "generation_config.json"]
    wanted += ["genai_config.json", *licenses]
    members: dict[str, Member] = {name: folder / name for name in wanted if name in files}
    members["run.py"] = RUNNER.read_bytes()
    members["README.md"] = _readme(members, written, kind, manifest, licenses)
    hashes = {
        name: hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else files[name]
        for name, content in members.items()
    }
    described = {
        "package": FORMAT,
        "quantkit": quantkit.__version__,
        "model": written.model,
        "kind": kind,
        "scheme": manifest.get("scheme"),
        "target": manifest.get("target"),
        "opset": written.opset,
        "ir_version": written.ir_version,
        "onnxruntime": manifest.get("versions", {}).get("onnxruntime"),
        "artifact_sha256": hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest(),
        "files": hashes,
    }
    members[MANIFEST] = (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()
    return members, kind


def _readme(
    members: Mapping[str, Member],
    written: Written,
    kind: str,
    manifest: Mapping[str, Any],
    licenses: list[str],
) -> bytes:
    target = TARGETS.get(str(manifest.get("target")))
    others = dict.fromkeys(written.data_files, "weights, which the graph points to")
    others |= dict.fromkeys(licenses, "license of the model")
    rows = [f"| `{name}` | {(PURPOSES | others)[name]} |" for name in (*members, "README.md")]
    rows.append(f"| `{MANIFEST}` | what made it, and the SHA-256 of every file |")
    values = [
        f"| {side} | `{value.name}` | {value.element_type.lower()} | {', '.join(map(str, value.shape))} |"
        for side, listed in (("in", written.inputs), ("out", written.outputs))
        for value in listed
    ]
    copied = ", ".join(f"`{name}`" for name in (MODEL, *written.data_files, TOKENIZER))
    num_bytes = sum(each.stat().st_size for each in members.values() if isinstance(each, Path))
    text = string.Template(README.read_text(encoding="utf-8")).substitute(
        model=written.model,
        kind=kind,
        quantkit=manifest.get("quantkit"),
        scheme=manifest.get("scheme"),
        target=manifest.get("target"),
        description=target.description if target else "unknown to this version",
        megabytes=f"{num_bytes / 1e6:.1f}",
        files="\n".join(rows),
        run=RUNS[kind],
        onnxruntime=manifest.get("versions", {}).get("onnxruntime", "of an unknown version"),
        copied=copied,
        values="\n".join(values),
        notes=NOTES[kind],
        licenses=f": see {', '.join(licenses)}" if licenses else ", which quantkit does not know",
    )
    return text.encode()


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
