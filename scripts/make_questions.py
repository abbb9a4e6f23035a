"""Write the bundled questions and passages, from frequently asked questions of Python and Django.

    python scripts/make_questions.py

Fetches the Debian package python3.11-doc and the source of Django with apt and pip; nothing of them is run.
The candidates of a question are the passages that a search by words finds (BM25), best first: what a reranker
gets. The calibration text has nothing of these files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "quantkit" / "assets"
DEBIAN, DJANGO = "python3.11-doc", "django==5.2"
SHORTEST, LONGEST = 80, 300  # characters of a passage
NUM_QUESTIONS, NUM_CANDIDATES = 48, 12
NUM_PASSAGES = 2  # of an answer
TITLE = re.compile(r"^(?P<title>[A-Z`\"*].{14,}\?)\n[=~*-]{15,}$", flags=re.MULTILINE)
MARKUP = (
    (r":[\w:+-]+:`~?([^`<]+?)(?:\s*<[^`]+>)?`", r"\1"),
    (r"`([^`<]+?)\s*<[^`]+>`_{1,2}", r"\1"),
    (r"`{1,2}([^`]+)`{1,2}_?", r"\1"),
    (r"(?<!\w)\*{1,2}([^*\n]+)\*{1,2}(?!\w)", r"\1"),
    (r"\s+", " "),
)
CARD = """# Questions

`questions.json` holds questions, passages, and for each question the numbers of the passages that a search by
words finds. Rankings are compared on it, and labels on its texts. Nothing of it is calibrated on.
`python scripts/make_questions.py` writes this folder; [LICENSES](LICENSES) holds the licences.

| source | licence | questions | passages |
|---|---|---:|---:|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ASSETS / "questions")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sources = [of_python(Path(scratch)), of_django(Path(scratch))]
    passages, questions, rows = [], [], []
    for name, licence, pairs, _ in sources:
        asked = pairs[:: max(1, math.ceil(len(pairs) * len(sources) / NUM_QUESTIONS))]
        questions += [question for question, _ in asked]
        own = [passage for _, answer in pairs for passage in answer[:NUM_PASSAGES]]
        passages += own
        rows.append(f"| {name} | {licence} | {len(asked)} | {len(own)} |")
    passages = list(dict.fromkeys(passages))
    document = {
        "passages": passages,
        "questions": [{"text": question, "candidates": best(question, passages)} for question in questions],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "questions.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (options.output / "README.md").write_text(CARD + "\n".join(rows) + "\n", encoding="utf-8")
    licences = "\n".join(f"{name}\n\n{text}" for name, _, _, text in sources)
    (options.output / "LICENSES").write_text(licences, encoding="utf-8")
    print(f"{len(questions)} questions, {len(passages)} passages")


def of_python(scratch: Path) -> tuple[str, str, list[tuple[str, list[str]]], str]:
    subprocess.run(["apt-get", "download", DEBIAN], cwd=scratch, check=True)
    subprocess.run(["dpkg-deb", "-x", next(scratch.glob("*.deb")), scratch / "python"], check=True)
    documents = scratch / "python/usr/share/doc"
    files = sorted(documents.glob("python3.11/html/_sources/faq/*.rst.txt"))
    text = next(documents.glob("*/copyright")).read_text(encoding="utf-8")
    licence = text[text.index("PYTHON SOFTWARE FOUNDATION LICENSE") : text.index("BEOPEN.COM LICENSE")]
    pairs = [pair for file in files for pair in answers(file.read_text(encoding="utf-8"))]
    return "Python 3.11, frequently asked questions", "PSF-2.0", pairs, licence.rstrip() + "\n"


def of_django(scratch: Path) -> tuple[str, str, list[tuple[str, list[str]]], str]:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-binary=:all:", "--dest", scratch, DJANGO], check=True)
    with tarfile.open(next(scratch.glob("[Dd]jango-*.tar.gz"))) as sdist:
        texts = {
            member.name.partition("/")[2]: content.read().decode("utf-8")
            for member in sdist
            if re.search(r"^[^/]+/(docs/faq/\w+\.txt|LICENSE)$", member.name)
            and (content := sdist.extractfile(member))
        }
    pairs = [pair for name, text in sorted(texts.items()) if name != "LICENSE" for pair in answers(text)]
    return "Django 5.2, frequently asked questions", "BSD-3-Clause", pairs, texts["LICENSE"]


def answers(text: str) -> list[tuple[str, list[str]]]:
    """(question, the plain paragraphs of its answer)."""
    titles = [*TITLE.finditer(text)]
    ends = [title.start() for title in titles[1:]] + [len(text)] * bool(titles)
    pairs = [
        (plain(title["title"]), paragraphs(text[title.end() : end]))
        for title, end in zip(titles, ends, strict=True)
    ]
    return [(question, passages) for question, passages in pairs if passages]


def paragraphs(text: str) -> list[str]:
    """Paragraphs of plain prose: no code, list, directive or heading."""
    blocks = [block for block in re.split(r"\n\s*\n", text) if re.match(r"\n*[A-Z`*:\"]", block)]
    prose = [
        block
        for block in blocks
        if not re.search(r"::\s*$|^[=~*-]{4,}$|^\s*\.\. |^ {2,}", block, re.MULTILINE)
    ]
    return [passage for passage in map(plain, prose) if SHORTEST <= len(passage) <= LONGEST]


def plain(text: str) -> str:
    for pattern, replacement in MARKUP:
        text = re.sub(pattern, replacement, text)
    return text.strip()


def best(question: str, passages: list[str]) -> list[int]:
    """The passages with the highest BM25 (k1 = 1.5, b = 0.75), best first."""
    counts = [Counter(re.findall(r"\w+", passage.lower())) for passage in passages]
    mean = sum(map(Counter.total, counts)) / len(counts)

    def score(count: Counter[str]) -> float:
        total = 0.0
        for word in set(re.findall(r"\w+", question.lower())):
            holding = sum(word in other for other in counts)
            weight = math.log(1 + (len(counts) - holding + 0.5) / (holding + 0.5))
            total += weight * count[word] * 2.5 / (count[word] + 1.5 * (0.25 + 0.75 * count.total() / mean))
        return total

    scores = [score(count) for count in counts]
    return sorted(range(len(passages)), key=lambda index: -scores[index])[:NUM_CANDIDATES]


if __name__ == "__main__":
    main()
