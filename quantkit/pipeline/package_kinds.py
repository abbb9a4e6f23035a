"""What kinds of artifacts can be packed: the graphs of each, the runner that fits, and what its page says.

A row of the table is a kind; a package holds one runner, so a runner serves whatever its kind may hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import InputError
from quantkit.export.check import Written, read_written
from quantkit.runtime.graph import DECODE_FILE, MODEL_FILE, PROMPT_FILE

PACKAGE = Path(__file__).parents[1]
RUNNER, STATIC_RUNNER, DEVICE = (  # the last is what both runners stand on
    PACKAGE / "runtime" / "on_device" / name for name in ("run_growing.py", "run_static.py", "device.py")
)
PAGE, STATIC_PAGE = (PACKAGE / "assets" / "runner" / name for name in ("README.md", "README-npu.md"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A row of the table."""

    name: str
    graphs: Mapping[str, str]  # file -> what it is
    command: str
    notes: str  # on the page, below what the graphs read and give
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


def kind_of(folder: Path, files: Mapping[str, str]) -> tuple[Kind, dict[str, Written]]:
    """(the kind of an artifact, what its graphs say of themselves); one without a runner is refused."""
    if all(name in files for name in STATIC_DECODER.graphs):
        return STATIC_DECODER, {name: read_written(folder / name) for name in STATIC_DECODER.graphs}
    if MODEL_FILE not in files:
        graphs = [name for name in files if name.endswith(".onnx")]
        raise InputError(
            f"the runner has no way to run its files ({', '.join(graphs) or 'no graph at all'})",
            where=str(folder),
            allowed="a decoder or an encoder in one model.onnx, or a decoder for an NPU in two graphs",
        )
    written = read_written(folder / MODEL_FILE)
    kinds = {"decoder": DECODER, "encoder": STATIC_ENCODER if is_static(written) else ENCODER}
    kind = kinds.get("encoder" if written.kind == "traced" and not written.has_cache else written.kind)
    if kind is None:
        raise InputError(
            "the runner has no way to run it: its cache grows by copying, or quantkit did not write it",
            where=str(folder / MODEL_FILE),
            allowed="a decoder that is written as a fused graph, or an encoder",
        )
    return kind, {MODEL_FILE: written}


def is_static(written: Written) -> bool:
    """Whether every size of what it reads is fixed."""
    return all(isinstance(size, int) for value in written.inputs for size in value.shape)
