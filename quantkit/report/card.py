"""The model card of an artifact: README.md in the Hub's form, from the recipe and the measurements alone.

https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from quantkit.recipe import Recipe
from quantkit.report.clients import Head, head_of, loading
from quantkit.report.inspection import plan_lines
from quantkit.report.losses import scheme_text
from quantkit.report.measurements import measured_tables, protocol_lines, verdict_line
from quantkit.report.tables import Json, Page, to_markdown

CARD_FILE = "README.md"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
TASKS: Mapping[str, str] = {  # kind of the graph -> the Hub's name of the task
    "decoder": "text-generation",
    "encoder": "feature-extraction",
}
HEAD_TASKS: Mapping[Head, str] = {
    "texts": "text-classification",
    "tokens": "token-classification",
    "pairs": "text-ranking",
    "vectors": "sentence-similarity",
    "pictures": "image-classification",
    "picture vectors": "image-feature-extraction",
}


def model_card(document: Json, recipe: Recipe) -> str:
    """The card, from the content of report.json."""
    metadata: dict[str, object] = {
        "tags": ["quantkit", "onnx", "onnxruntime", "quantized", str(document["scheme"])],
        "library_name": "onnxruntime",
    }
    task = HEAD_TASKS.get(head_of(document)) or TASKS.get(document.get("kind", ""))
    if task:
        metadata["pipeline_tag"] = task
    base = recipe.model or ""
    is_of_hub = HUB_NAME.fullmatch(base) and base != "demo" and not Path(base).exists()
    if is_of_hub and not recipe.random_weights:
        metadata |= {"base_model": base, "base_model_relation": "quantized"}
    sections = (
        "\n".join(("---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items()), "---")),
        f"# {document['model']}, quantized to {scheme_text(document)}",
        f"An ONNX graph for the target `{document['target']}`, written by quantkit. {_verdict(document)}",
        "## Measured\n\n" + to_markdown(Page(tables=measured_tables(document)[:1])).strip(),
        "\n".join(f"- {line}" for line in protocol_lines(document)),
        "## Quantization\n\n" + "\n".join(f"- {line}" for line in _quantization(document, recipe)),
        "## Use\n\n" + "\n\n".join(_uses(document)),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(document)),
    )
    return "\n\n".join(sections) + "\n"


def _verdict(document: Json) -> str:
    line = verdict_line(document)
    return f"{line[0].upper()}{line[1:]}."


def _quantization(document: Json, recipe: Recipe) -> Iterable[str]:
    yield from plan_lines(document)
    transforms = ", ".join(recipe.transforms) or "none"
    yield f"rounding: {recipe.fit}; transforms: {transforms}"
    yield f"calibration data: {recipe.calibration.text or 'the text that comes with quantkit'}"
    yield "`recipe.yaml` makes the same bytes again: `quantkit quantize --recipe recipe.yaml`"
    for entry in document.get("kept", []):
        yield f"not quantized: {entry['count']} {entry['role']} ({entry['reason']})"


def _uses(document: Json) -> Iterable[str]:
    yield "In a copy of this repository:"
    for code in loading(document):
        yield f"{code.title}:\n\n```python\n{code.text}\n```"
    yield "`quantkit verify .` compares every file with its hash in `manifest.json`."


def _limits(document: Json) -> Iterable[str]:
    judgement = document.get("judgement") or {}
    yield from judgement.get("reasons", [])
    yield from document.get("notes", [])
    yield from (f"not measured: {failure}" for failure in document.get("failures", []))
    yield "Accuracy was measured on the text named above alone; `quantkit eval` measures it on yours."
    yield "The licence and the limits of the original model hold for this one too."
