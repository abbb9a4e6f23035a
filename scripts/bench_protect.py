#!/usr/bin/env python3
"""Cost of splitting a model: bytes and time per token, accuracy, and the share that an attack recovers.

    .venv/bin/python scripts/bench_protect.py [--rounds N] [--tokens N]

The host runs in a process of its own and is reached over loopback. Four subjects take turns within each
round: the model in one piece, both sides in one process, and both sides over the connection with float32 and
with float16 features. Results go to docs/benchmarks/private-inference.md and .json.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from protecting import whole_text  # noqa: E402

from quantkit.evaluation.accuracy import measure_accuracy  # noqa: E402
from quantkit.evaluation.text import encoded_text  # noqa: E402
from quantkit.model.model_map import to_json  # noqa: E402
from quantkit.pipeline.quantize import quantize  # noqa: E402
from quantkit.pipeline.stages.write import write_float_model  # noqa: E402
from quantkit.private.audit import audit  # noqa: E402
from quantkit.private.client.connection import connect  # noqa: E402
from quantkit.private.client.model import generate_split, open_client  # noqa: E402
from quantkit.private.host.model import open_host  # noqa: E402
from quantkit.private.keys import read_token  # noqa: E402
from quantkit.private.protect import PERMUTED, protect  # noqa: E402
from quantkit.private.protocol import features_message  # noqa: E402
from quantkit.recipe import Measure, Recipe, check_recipe  # noqa: E402
from quantkit.runtime.decoder import open_decoder  # noqa: E402
from quantkit.runtime.generate import generate  # noqa: E402
from quantkit.runtime.machine.facts import read_cpu  # noqa: E402

OUTPUT = ROOT / "docs" / "benchmarks" / "private-inference.md"
TIMED = ({"model": "demo"}, {"model": "gpt2", "random_weights": True})
SCHEMES = ("int8_block32", "int8_block64", "int8_block128", "int8_token", "int8_channel")
PROMPT, NEW_TOKENS = 128, 33  # the first comes with the prompt
UNMEASURED = {"accuracy": False, "latency": False, "memory": False}


def recipe_of(scheme: str, **settings: Any) -> Recipe:
    """Everything of any size, measured by this script alone."""
    content = {"scheme": scheme, "select": {"min_dim": 1}, "measure": UNMEASURED, **settings}
    return check_recipe(content, where="bench_protect")


def make(recipe: Recipe, folder: Path) -> Path:
    """The model in one piece and in two, by one recipe."""
    quantize(recipe=recipe, output=folder / "whole")
    protect(recipe, key_file=folder / "a.key", output=folder / "split", quiet=True)
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The host in a process of its own; its address."""
    command = [sys.executable, "-m", "quantkit.cli", "serve-host", str(folder / "host"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"http://[\d.:]+\d", process.stdout.readline())
        assert address, "the host did not start"
        yield address[0]
    finally:
        process.terminate()
        process.wait()


def time_tokens(steps: Iterator[Any]) -> tuple[float, float]:
    """(milliseconds to the first token, and for each one after it)."""
    begin = time.perf_counter()
    next(steps)
    first = time.perf_counter()
    count = sum(1 for _ in steps)
    end = time.perf_counter()
    return 1e3 * (first - begin), 1e3 * (end - first) / count


def timings(recipe: Recipe, rounds: int) -> dict[str, Any]:
    """Medians and spreads of the four subjects, round by round in turn; and what crossed the connection."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make(recipe, Path(temporary))
        client, decoder = open_client(folder / "split" / "client"), open_decoder(folder / "whole")
        host = open_host(folder / "split" / "host")
        prompt = np.random.default_rng(0).integers(1, client.vocab_size, PROMPT).tolist()
        token = None
        sessions: list[Any] = []
        with serving(folder / "split") as url:
            token = read_token(folder / "split" / "host.token")

            def remote(features: str, **options: Any) -> Any:
                sessions.append(connect(url, token=token, features=features, **options))
                return sessions[-1]

            split = partial(generate_split, client, max_new_tokens=NEW_TOKENS, prompts=[prompt])
            subjects: dict[str, Callable[[], Iterator[Any]]] = {
                "one piece": lambda: generate(decoder, [prompt], max_new_tokens=NEW_TOKENS),
                "two sides, one process": lambda: split(opener=lambda *, capacity, **_: host.open(capacity)),
                "two processes, float32": lambda: split(opener=partial(remote, "float32")),
                "two processes, float16": lambda: split(opener=partial(remote, "float16")),
            }
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
            for number in range(rounds + 1):
                for name, subject in subjects.items():
                    times = time_tokens(subject())
                    if number:  # the first round warms up
                        taken[name].append(times)
        rows = {}
        for name, times in taken.items():
            first, later = ([pair[index] for pair in times] for index in (0, 1))
            rows[name] = {
                "prompt_ms": statistics.median(first),
                "prompt_spread_ms": [min(first), max(first)],
                "decode_ms": statistics.median(later),
                "decode_spread_ms": [min(later), max(later)],
            }
        float32 = sessions[0]
        width = client.manifest.width
        return {
            "model": recipe.model,
            "scheme": recipe.scheme,
            "width": width,
            "bytes_a_step_each_way": len(features_message(np.zeros((1, width)), np.float32)),
            "sent_bytes": float32.bytes_sent,
            "received_bytes": float32.bytes_received,
            "rows": rows,
        }


def accuracies(tokens: int) -> list[dict[str, Any]]:
    """The embedded model in every INT8 scheme, in one piece and split, against the original in float."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "float").mkdir()
        write_float_model("demo", Path(temporary) / "float")
        reference = open_decoder(Path(temporary) / "float")
        ids, text = encoded_text(Measure(max_tokens=tokens), Path(temporary) / "float")
        rows = []
        for scheme in SCHEMES:
            folder = Path(temporary) / scheme
            folder.mkdir()
            make(recipe_of(scheme, model="demo"), folder)
            whole, client = open_decoder(folder / "whole"), open_client(folder / "split" / "client")
            host = open_host(folder / "split" / "host")

            def split(ids_BS: Any, client: Any = client, host: Any = host, wire: Any = np.float32) -> Any:
                features = np.stack([client.embed(row, 0) for row in ids_BS]).astype(wire)
                new_features_BTI = whole_text(host.decoder, features.astype(np.float32))[0].astype(wire)
                return client.logits(new_features_BTI.astype(np.float32))

            subjects = {
                "one piece": whole.logits,
                "split": split,
                "split, float16 features": partial(split, wire=np.float16),
            }
            for name, logits in subjects.items():
                accuracy = measure_accuracy(
                    reference=reference.logits,
                    quantized=logits,
                    token_ids=ids,
                    window=512,
                    stride=256,
                    text=text,
                )
                rows.append({"scheme": scheme, "subject": name, **to_json(accuracy)})
        return rows


def audits() -> list[dict[str, Any]]:
    """What the public weights give away, of the embedded model in the default scheme."""
    with tempfile.TemporaryDirectory() as temporary:
        recipe = recipe_of("int8_block64", model="demo")
        folder = make(recipe, Path(temporary))
        host, key_file = folder / "split" / "host", folder / "a.key"
        results = audit(recipe, host=host, key_file=key_file, permutes=tuple(PERMUTED))
        return [to_json(recovered) for recovered in results]


def page(document: dict[str, Any]) -> str:
    """The document as Markdown."""
    lines = [
        "# Private inference: what the split costs",
        "",
        "Written by `scripts/bench_protect.py`. " + document["machine"] + ".",
        "",
        "## Time and bytes",
        "",
        f"A prompt of {PROMPT} tokens and {NEW_TOKENS - 1} tokens after it, all subjects in turn within each "
        f"of {document['rounds']} rounds; medians, least and most in brackets. The host is a process of its "
        "own, reached over loopback.",
    ]
    for timed in document["timings"]:
        sent, received = timed["sent_bytes"], timed["received_bytes"]
        step_bytes = timed["bytes_a_step_each_way"]
        lines += [
            "",
            f"**{timed['model']}**, `{timed['scheme']}`, {timed['width']} features: "
            f"{step_bytes:,} bytes a decoded token each way "
            f"({step_bytes - 4 * timed['width']} of them header); "
            f"the whole text sent {sent:,} and received {received:,}.",
            "",
            "| | first token, ms | each later token, ms | added to a token, ms |",
            "|---|---:|---:|---:|",
        ]
        base = timed["rows"]["one piece"]["decode_ms"]
        for name, row in timed["rows"].items():
            low, high = row["prompt_spread_ms"]
            least, most = row["decode_spread_ms"]
            lines.append(
                f"| {name} | {row['prompt_ms']:.1f} ({low:.1f} to {high:.1f}) | "
                f"{row['decode_ms']:.2f} ({least:.2f} to {most:.2f}) | {row['decode_ms'] - base:+.2f} |"
            )
    first = document["accuracy"][0]
    lines += [
        "",
        "## Accuracy",
        "",
        f"The embedded model against itself in float32, {first['num_tokens']:,} tokens of the "
        f"{first['text']}, residual, FFN and values permuted.",
        "",
        "| scheme | | perplexity | increase | KL, nats | top-1 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| `{row['scheme']}` | {row['subject']} | {row['quantized']['value']:.3f} | "
        f"{row['increase']:+.3%} | {row['kl_divergence']:.5f} | {row['top1_agreement']:.2%} |"
        for row in document["accuracy"]
    ]
    lines += [
        "",
        "## What the public weights give away",
        "",
        "`quantkit protect demo --audit`: share of positions whose original place was found; of tokens, "
        "those recovered from the features of a prompt's first position.",
        "",
        "| weights | permuted | order of | by known rows | by sorted values |",
        "|---|---|---|---:|---:|",
    ]
    lines += [
        f"| {row['weights']} | {', '.join(row['permutes'])} | {row['space']} | "
        f"{row['by_known_rows']:.1%} | {row['by_sorted_values']:.1%} |"
        for row in document["audit"]
        if not row["is_given"]
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure, and write both files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    cpu = read_cpu()
    versions = ", ".join(f"{name} {version(name)}" for name in ("onnxruntime", "numpy", "quantkit-onnx"))
    document: dict[str, Any] = {
        "machine": f"{cpu.model}, {cpu.num_threads} threads for each process; {versions}",
        "rounds": arguments.rounds,
        "timings": [timings(recipe_of("int8_block64", **timed), arguments.rounds) for timed in TIMED],
        "accuracy": accuracies(arguments.tokens),
        "audit": audits(),
    }
    OUTPUT.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    OUTPUT.write_text(page(document), encoding="utf-8")
    print(page(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
