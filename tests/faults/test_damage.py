"""Damage to every file of an artifact is named when the folder is verified or opened, whatever the kind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from parsers import CORPUS, PARSERS, prepare

import quantkit
from quantkit.errors import InputError
from quantkit.pipeline.package import pack
from quantkit.pipeline.verify import verify
from quantkit.private.host.model import open_host
from quantkit.runtime import manifest
from quantkit.runtime.decoder import open_decoder
from quantkit.runtime.manifest import require_whole

pytestmark = pytest.mark.once
ARTIFACT = CORPUS / "artifact"
LISTED = tuple(json.loads((ARTIFACT / "manifest.json").read_text())["files"])
FILES = (*LISTED, "manifest.json")


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def zeroed(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flipped,
    "zeros": zeroed,
    "random": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8),
    "missing": lambda path: path.unlink(),
}


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(ARTIFACT, tmp_path / "artifact")


def change_manifest(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    change(document["files"])
    (folder / "manifest.json").write_text(json.dumps(document))


def test_an_artifact_as_it_was_written_is_whole(folder):
    assert verify(folder).num_files == len(LISTED)
    (folder / "README.md").write_text("notes of a user")
    assert quantkit.load(folder).folder == folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", LISTED)
def test_damage_is_named(file, damage, folder, record_property):
    record_property("cases", 1)
    DAMAGES[damage](folder / file)
    for open_folder in (verify, quantkit.load):
        if open_folder is quantkit.load and (file, damage) == ("model.onnx", "missing"):
            continue  # no artifact any more, which is said before
        with pytest.raises(InputError, match=file):
            open_folder(folder)


@pytest.mark.parametrize(
    ("parser", "key", "value"),
    [
        ("report", "model", ["a"]),
        ("report", "scheme", None),
        ("weights index", "weight_map", {"lm_head.weight": "x" * 300}),
    ],
)
def test_values_that_once_ended_in_a_traceback(parser, key, value, tmp_path):
    folder = prepare(PARSERS[parser], tmp_path)
    file = folder / PARSERS[parser].file
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(InputError, match=re.escape(str(file))):
        PARSERS[parser].entry(folder, file)


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "longer"])
def test_a_damaged_manifest_is_named(damage, folder):
    if damage == "a flipped bit":
        change_manifest(folder, lambda files: files.update({"config.json": files["config.json"][::-1]}))
    else:
        DAMAGES[damage](folder / "manifest.json")
    with pytest.raises(InputError, match=r"manifest"):
        quantkit.load(folder)


def test_hashes_that_are_zero_or_absent_and_files_that_are_not_listed(folder):
    change_manifest(folder, lambda files: files.update(dict.fromkeys(files, "0" * 64)))
    with pytest.raises(InputError, match=r"config\.json differs from the manifest.* more"):
        verify(folder)
    shutil.copy(ARTIFACT / "manifest.json", folder)
    change_manifest(folder, lambda files: files.pop("model.onnx"))
    with pytest.raises(InputError, match=r"model\.onnx is not in the manifest"):
        verify(folder)
    shutil.copy(ARTIFACT / "manifest.json", folder)
    (folder / "added.json").write_text("{}")
    with pytest.raises(InputError, match=r"added\.json is not in the manifest"):
        verify(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../../etc/passwd", "lies outside of the folder"),
        ("/etc/passwd", "lies outside of the folder"),
        ("", "lies outside of the folder"),
        (".", "lies outside of the folder"),
        ("./config.json", "lies outside of the folder"),
        ("..\\..\\x", "lies outside of the folder"),
        ("\0", "lies outside of the folder"),
        ("x" * 300, "is missing"),
        ("a/" * 3000 + "b", "is missing"),
        ("config.json/x", "is missing"),
        ("Config.json", "is missing"),
    ],
)
def test_names_of_a_manifest(name, words, folder, tmp_path):
    pack(folder, tmp_path / "package")
    change_manifest(folder, lambda files: files.update({name: "0" * 64}))
    for open_folder in (verify, quantkit.load):
        with pytest.raises(InputError, match=words):
            open_folder(folder)
    with pytest.raises(InputError, match="the folder is damaged"):
        pack(folder, tmp_path / "other")
    change_manifest(tmp_path / "package", lambda files: files.update({name: "0" * 64}))
    command = [sys.executable, str(tmp_path / "package" / "run.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("is not as it was packed; copy the package again\n")
    assert "Traceback" not in done.stderr


def test_a_file_that_is_a_link(folder, tmp_path):
    file = folder / "config.json"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")  # as the Hub's cache does
    verify(folder)
    with pytest.raises(InputError, match=r"config\.json lies outside"):
        pack(folder, tmp_path / "package")
    for target in ("/dev/zero", "config.json", "nowhere", "."):
        file.unlink()
        file.symlink_to(target)
        with pytest.raises(InputError, match=r"config\.json is missing"):
            quantkit.load(folder)


def test_copies_that_are_whole(folder, tmp_path):
    """As git, the Hub, a file manager and `cp` leave them."""
    for name in (".git/objects/a", ".gitattributes", ".cache/huggingface/download/config.json.metadata"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    (tmp_path / "link").symlink_to(folder)
    pack(tmp_path / "link", tmp_path / "package.zip")
    with zipfile.ZipFile(tmp_path / "package.zip") as package:
        package.extractall(tmp_path / "extracted")
    for path in (folder, tmp_path / "link", tmp_path / "extracted" / "package"):
        verify(path)
    assert quantkit.load(tmp_path / "link").generate("w1", max_new_tokens=1)


def test_an_artifact_of_a_version_without_sums(folder):
    document = json.loads((folder / "manifest.json").read_text())
    document.pop("sums", None)
    (folder / "manifest.json").write_text(json.dumps(document))
    assert quantkit.load(folder).folder == verify(folder).folder
    (folder / "manifest.json").write_text(json.dumps({**document, "files": None}))
    with pytest.raises(InputError, match=r"lists no files.*next: make it again; --check none"):
        quantkit.load(folder)
    assert quantkit.load(folder, check="none").folder == folder
    with pytest.raises(InputError, match="'none' compares no file"):
        verify(folder, check="none")


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "missing"])
def test_sums_of_large_files_see_each_damage(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "LARGE_BYTES", 1000)
    content = os.urandom((1 << 18) * 2 + 77)
    (tmp_path / "weights").write_bytes(content)
    document = {"files": manifest.hash_files(tmp_path), "sums": manifest.sum_files(tmp_path)}
    assert list(document["sums"]) == ["weights"]
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    for check in ("all", "quick"):
        require_whole(tmp_path, check)
    DAMAGES[damage](tmp_path / "weights")
    for check in ("all", "quick"):
        with pytest.raises(InputError, match="weights differs"):
            require_whole(tmp_path, check)
    assert require_whole(tmp_path, "none") == {}


def test_a_host_folder_is_checked_when_it_is_opened(tmp_path):
    folder = shutil.copytree(CORPUS / "host", tmp_path / "host")
    flipped(folder / "model.onnx")
    with pytest.raises(InputError, match=r"model\.onnx differs"):
        open_host(folder, threads=1)


def test_a_host_graph_whose_caches_have_no_width(tmp_path):
    folder = shutil.copytree(CORPUS / "host", tmp_path / "host")
    graph = onnx.load(folder / "model.onnx")
    for value in graph.graph.input:
        if value.name.startswith("past_key_values"):
            value.type.tensor_type.shape.dim[3].Clear()
    onnx.save(graph, folder / "model.onnx")
    with pytest.raises(InputError, match=r"model\.onnx: not the blocks of a split model"):
        open_host(folder, threads=1, check="none")


def test_metadata_that_is_no_text_is_one_line(tmp_path):
    folder = shutil.copytree(CORPUS / "artifact", tmp_path / "artifact")
    path = folder / "model.onnx"
    content = path.read_bytes()
    at = content.rindex(b'"kind"')
    path.write_bytes(content[: at + 1] + b"\x8f" + content[at + 2 :])
    with pytest.raises(InputError, match="the metadata of the graph: not text"):
        open_decoder(folder)
