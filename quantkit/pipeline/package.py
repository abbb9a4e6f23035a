"""Package of an artifact: a self-contained folder or zip for a device with onnxruntime and tokenizers alone.

A package holds the files that run the model, a runner, a README and a manifest. Files are compared with the
artifact's manifest first, so that damage is found before they reach a device. The output is written beside
its place and renamed at the end.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import string
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quantkit
from quantkit.errors import InputError, not_one_of
from quantkit.export.check import Written, read_written
from quantkit.files import read_json
from quantkit.pipeline.folder import (
    COMPILED,
    file_inside,
    new_artifact,
    require_apart,
    require_replaceable,
)
from quantkit.plan.targets import TARGETS
from quantkit.runtime.chat import CONFIG_FILE, TEMPLATE_FILE, has_chat_template
from quantkit.runtime.encoder import PIXELS
from quantkit.runtime.graph import DECODE_FILE, MODEL_FILE, PROMPT_FILE
from quantkit.runtime.manifest import MANIFEST, read_manifest, require_whole, sha256_of
from quantkit.runtime.providers.compiled import model_hash

PACKAGE = Path(quantkit.__file__).parent
RUNNER, STATIC_RUNNER, DEVICE = (  # both runners import DEVICE
    PACKAGE / "runtime" / "on_device" / name for name in ("run_growing.py", "run_static.py", "device.py")
)
CHAT = DEVICE.with_name("chat.py")
PAGE, STATIC_PAGE = (PACKAGE / "assets" / "runner" / name for name in ("README.md", "README-npu.md"))
LICENSE = "license of the model"
FORMAT = 1  # of a package's manifest
COPY_BYTES = 1 << 22
TOKENIZER = "tokenizer.json"
PURPOSES: dict[str, str] = {
    TOKENIZER: "text to token ids and back",
    "config.json": "the model's facts, with the tokens that end a text",
    "generation_config.json": "the tokens that end a text, where these differ",
    "genai_config.json": "for running it with onnxruntime-genai instead",
}
CHAT_PURPOSES = {
    TEMPLATE_FILE: "turns of a chat as the model was trained on them",
    CONFIG_FILE: "special tokens of a chat",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of artifact that a runner can run."""

    name: str
    graphs: Mapping[str, str]  # file -> purpose
    command: str
    notes: str  # of the README, below inputs and outputs of the graphs
    runner: Path = RUNNER
    page: Path = PAGE


TEXT, TEXTS = (
    'python run.py "Once upon a time" --max-new-tokens 64',
    'python run.py "One text" "Another text"',
)
DECODER = Kind(
    name="decoder",
    graphs={MODEL_FILE: "the graph"},
    command=TEXT,
    notes="""A prompt goes in whole, then one token at a time. `attention_mask` covers all tokens so far,
ones throughout for a single text, and `position_ids` counts from 0. For speed, bind each `past_key_values.N`
and its `present.N` to one buffer of the length that prompt and answer take together: the graph writes new
keys and values into it. The token with the largest logit is the next one; `run.py` shows all of it.""",
)
ENCODER = Kind(
    name="encoder",
    graphs={MODEL_FILE: "the graph"},
    command=TEXTS,
    notes="One text at a time needs no padding: `attention_mask` is all ones, token types are zeros.",
)
STATIC_DECODER = Kind(
    name="decoder",
    graphs={PROMPT_FILE: "the graph that reads a prompt", DECODE_FILE: "the graph that adds a token"},
    command=TEXT,
    notes="""A prompt stands in the first places of its graph, with ones in `attention_mask` there and zeros
behind; `logit_position` is its last place. Each `present.N` goes to the same places of an array that is the
other graph's `past_key_values.N`: codes, to be copied and not to be read as numbers. Places that hold nothing
yet repeat the first one. The other graph's `attention_mask` has a one for each place filled, and its last one
is the new token's; `position_ids` is how many tokens came before. `run.py` shows all of it.""",
    runner=STATIC_RUNNER,
    page=STATIC_PAGE,
)
STATIC_ENCODER = Kind(
    name="encoder",
    graphs={MODEL_FILE: "the graph"},
    command=TEXTS,
    notes="""A text stands in the first places, with ones in `attention_mask` there and zeros behind; what the
graph gives for the places behind it means nothing. Token types are zeros for a single text.""",
    runner=STATIC_RUNNER,
    page=STATIC_PAGE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A file of a package."""

    content: Path | bytes
    purpose: str = ""

    @property
    def num_bytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @property
    def sha256(self) -> str:
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def open(self) -> io.BytesIO | io.BufferedReader:
        return io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content.open("rb")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A written package."""

    path: Path
    kind: str
    command: str  # of the runner
    files: tuple[str, ...]
    num_bytes: int
    is_for_npu: bool = False
    notes: tuple[str, ...] = ()  # files that were left out


def pack(
    folder: Path, output: Path | None = None, *, target: str | None = None, force: bool = False
) -> Packed:
    """Check an artifact and write its package; an artifact of another target than `target` is refused."""
    manifest = _artifact_manifest(folder)
    if target is not None:
        _require_target(folder, manifest.get("target"), target)
    output = output or Path(f"{folder.resolve().name}-package")
    require_apart(output, {"the artifact": folder})
    is_zip = output.suffix == ".zip"
    require_replaceable(output, force=force, kind="zip" if is_zip else "folder")
    _require_inside(folder, manifest["files"])
    require_whole(folder, "all")
    kind, graphs = _kind_of(folder, manifest["files"])
    page = _page_of(kind, manifest)
    members, notes = _members(folder, manifest, kind, graphs, page)
    with new_artifact(output, force=force, kind="zip" if is_zip else "folder") as partial:
        if is_zip:
            _write_zip(partial, members, output.stem)
        else:
            _write_folder(partial, members)
    return Packed(
        path=output,
        kind=kind.name,
        command=kind.command,
        files=tuple(members),
        num_bytes=sum(member.num_bytes for member in members.values()),
        is_for_npu=page == STATIC_PAGE,
        notes=notes,
    )


def _require_target(folder: Path, artifact_target: object, target: str) -> None:
    """Refuse an artifact of another target; two names of one target are equal."""
    if target not in TARGETS:
        raise not_one_of(target, TARGETS, where="--target", what=f"no target '{target}'")
    if TARGETS.get(str(artifact_target)) != TARGETS[target]:
        raise InputError(
            f"the artifact was made for target '{artifact_target}'",
            where=str(folder),
            allowed=f"an artifact of target '{target}'",
            next_step=f"quantkit quantize MODEL --target {target}, or leave --target out",
        )


def _artifact_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    if "package" in manifest:
        raise InputError(
            "the folder is a package already",
            where=str(folder),
            allowed="a folder that 'quantkit quantize' wrote",
            next_step="copy it as it is",
        )
    return manifest


def _require_inside(folder: Path, files: Mapping[str, str]) -> None:
    """Refuse names and links that lead out of the artifact: a package holds copies."""
    outside = [name for name in files if file_inside(folder, name) is None]
    if outside:
        raise InputError(f"the folder is damaged: {outside[0]} lies outside of the folder", where=str(folder))


def _kind_of(folder: Path, files: Mapping[str, str]) -> tuple[Kind, dict[str, Written]]:
    """(kind of an artifact, its graphs); an artifact that no runner can run is refused."""
    if all(name in files for name in STATIC_DECODER.graphs):
        return STATIC_DECODER, {name: read_written(folder / name) for name in STATIC_DECODER.graphs}
    if MODEL_FILE not in files:
        graphs = [name for name in files if name.endswith(".onnx")]
        raise InputError(
            f"no runner for these files: {', '.join(graphs) or 'no graph at all'}",
            where=str(folder),
            allowed="a decoder or an encoder in one model.onnx, or a decoder for an NPU in two graphs",
        )
    written = read_written(folder / MODEL_FILE)
    if any(value.name == PIXELS for value in written.inputs):
        raise InputError(
            "the model reads pictures, and the runner of a package reads texts alone",
            where=str(folder),
            allowed="a decoder or an encoder of texts",
            next_step="copy the folder, and read pictures there with 'quantkit encode' or 'quantkit score'",
        )
    is_static = all(isinstance(size, int) for value in written.inputs for size in value.shape)
    kinds = {"decoder": DECODER, "encoder": STATIC_ENCODER if is_static else ENCODER}
    kind = kinds.get("encoder" if written.kind == "traced" and not written.has_cache else written.kind)
    if kind is None:
        raise InputError(
            "no runner for this graph: its cache grows by copying, or quantkit did not write it",
            where=str(folder / MODEL_FILE),
            allowed="a decoder that is written as a fused graph, or an encoder",
        )
    return kind, {MODEL_FILE: written}


def _members(
    folder: Path, manifest: Mapping[str, Any], kind: Kind, graphs: Mapping[str, Written], page: Path
) -> tuple[dict[str, Member], tuple[str, ...]]:
    """(files of the package by name, notes on files that were left out); the manifest comes last."""
    files = manifest["files"]
    if TOKENIZER not in files:
        raise InputError(
            "the artifact has no tokenizer.json, and a device has no other tokenizer",
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
    purposes = {**kind.graphs, **dict.fromkeys(data_files, "weights, which the graphs point to"), **PURPOSES}
    purposes |= dict.fromkeys(licenses, LICENSE)
    members = {
        name: Member(content=folder / name, purpose=purpose)
        for name, purpose in purposes.items()
        if name in files
    }
    compiled, notes = _compiled(folder, list(graphs))
    members |= compiled
    runner = {
        "run.py": Member(content=kind.runner, purpose="runs it, in 60 lines to read and to copy from"),
        DEVICE.name: Member(
            content=DEVICE,
            purpose="what that stands on: onnxruntime, tokenizers and numpy are all it imports",
        ),
    }
    if kind.name == DECODER.name and has_chat_template(folder):
        members |= {
            name: Member(content=folder / name, purpose=text)
            for name, text in CHAT_PURPOSES.items()
            if name in files
        }
        runner[CHAT.name] = Member(
            content=CHAT, purpose="renders a turn for `run.py --chat`; needs jinja2 too"
        )
    readme = _readme(members, runner, kind, graphs, manifest, page)
    members |= {**runner, "README.md": Member(content=readme.encode())}
    document = {
        "package": FORMAT,
        "quantkit": quantkit.__version__,
        "model": next(iter(graphs.values())).model,
        "kind": kind.name,
        "scheme": manifest.get("scheme"),
        "target": manifest.get("target"),
        "opset": max(written.opset for written in graphs.values()),
        "ir_version": max(written.ir_version for written in graphs.values()),
        "onnxruntime": (manifest.get("versions") or {}).get("onnxruntime"),
        "artifact_sha256": sha256_of(folder / MANIFEST),
        "files": {name: member.sha256 for name, member in members.items()},
        "sums": {name: value for name, value in manifest.get("sums", {}).items() if name in members},
    }
    members[MANIFEST] = Member(content=(json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
    return members, notes


def _readme(
    artifact: Mapping[str, Member],
    runner: Mapping[str, Member],
    kind: Kind,
    graphs: Mapping[str, Written],
    manifest: Mapping[str, Any],
    page: Path,
) -> str:
    """README of a package with these files of the artifact and of the runner."""
    rows = [f"| `{name}` | {member.purpose} |" for name, member in {**artifact, **runner}.items()]
    rows += ["| `README.md` | this page |", f"| `{MANIFEST}` | what made it, and the SHA-256 of every file |"]
    values = [
        f"| {side if len(graphs) == 1 else f'{graph}, {side}'} | `{value.name}` "
        f"| {value.element_type.lower()} | {', '.join(map(str, value.shape))} |"
        for graph, written in graphs.items()
        for side, listed in (("in", written.inputs), ("out", written.outputs))
        for value in listed
    ]
    data_files = [name for written in graphs.values() for name in written.data_files]
    licenses = [name for name, member in artifact.items() if member.purpose == LICENSE]
    records = [path for path in artifact if path.startswith(f"{COMPILED}/") and path.endswith(".json")]
    target = TARGETS.get(str(manifest.get("target")))
    return string.Template(page.read_text(encoding="utf-8")).substitute(
        model=next(iter(graphs.values())).model,
        kind=kind.name,
        quantkit=manifest.get("quantkit"),
        scheme=manifest.get("scheme"),
        target=manifest.get("target"),
        description=target.description if target else "unknown to this version",
        megabytes=f"{sum(member.num_bytes for member in artifact.values()) / 1e6:.1f}",
        files="\n".join(rows),
        run=kind.command,
        onnxruntime=(manifest.get("versions") or {}).get("onnxruntime", "of an unknown version"),
        copied=", ".join(f"`{name}`" for name in dict.fromkeys((*graphs, *data_files, TOKENIZER))),
        values="\n".join(values),
        notes=kind.notes,
        compiled=_about_compiled(artifact[records[0]] if records else None),
        licenses=f": see {', '.join(licenses)}" if licenses else ", which quantkit does not know",
    )


def _compiled(folder: Path, graphs: Sequence[str]) -> tuple[dict[str, Member], tuple[str, ...]]:
    """(compiled forms of these graphs with their records, notes on those of other graphs)."""
    members: dict[str, Member] = {}
    notes = []
    purpose = "compiled for an NPU, and what it was compiled from"
    for graph in graphs:
        for context in sorted((folder / COMPILED).glob(f"{Path(graph).stem}.*.onnx")):
            record = context.with_suffix(".json")
            is_inside = all(file_inside(folder, f"{COMPILED}/{path.name}") for path in (context, record))
            try:
                hashes = read_json(record)
                fits = is_inside and hashes["model_sha256"] == model_hash(folder / graph)
                fits = fits and hashes["file_sha256"] == sha256_of(context)
            except (InputError, KeyError):
                fits = False
            if fits:
                for path in (context, record):
                    members[f"{COMPILED}/{path.name}"] = Member(content=path, purpose=purpose)
            else:
                notes.append(f"{COMPILED}/{context.name} was left out: it was not compiled from this {graph}")
    return members, tuple(notes)


def _page_of(kind: Kind, manifest: Mapping[str, Any]) -> Path:
    """README of the kind; a graph whose activations the runtime quantizes is not for an NPU."""
    target = TARGETS.get(str(manifest.get("target")))
    return PAGE if target and not target.rounds_values else kind.page


def _about_compiled(record: Member | None) -> str:
    """Paragraph of the README about compiled forms."""
    if record is None:
        return "Nothing compiled is here, so a provider compiles the graphs\nwhenever a session starts."
    assert isinstance(record.content, Path)
    origin = read_json(record.content)
    return (
        f"`{COMPILED}/` holds what the provider {origin['provider']} {origin['provider_version']} made of the"
        f" graphs\nunder onnxruntime {origin['onnxruntime']}, for the device `{origin['device']}`. `run.py`\n"
        "starts from it where versions and device are the same; elsewhere a provider compiles the graphs "
        "whenever\na session starts."
    )


def _write_folder(folder: Path, members: Mapping[str, Member]) -> None:
    for name, member in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with member.open() as source, (folder / name).open("wb") as file:
            shutil.copyfileobj(source, file, COPY_BYTES)


def _write_zip(path: Path, members: Mapping[str, Member], root: str) -> None:
    """Write the files into one folder of a zip; equal members give equal bytes."""
    with zipfile.ZipFile(path, "x", compression=zipfile.ZIP_DEFLATED) as archive:
        for name, member in members.items():
            entry = zipfile.ZipInfo(f"{root}/{name}")  # dated 1980, for equal bytes
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            with member.open() as source, archive.open(entry, "w", force_zip64=True) as file:
                shutil.copyfileobj(source, file, COPY_BYTES)
