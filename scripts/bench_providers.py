#!/usr/bin/env python3
"""Which provider runs which target, how much of it, how accurately, and how fast beside float on the CPU.

    .venv/bin/python scripts/bench_providers.py          demo: docs/benchmarks/providers.md and .json
    .venv/bin/python scripts/bench_providers.py MODEL --rounds 5 --threads 2
    .venv/bin/python scripts/bench_providers.py gpt2 --random-weights --targets openvino,cpu

Each provider that cannot stand beside plain onnxruntime gets an environment of its own under --cache, made
once. Every target's artifact is made anew, and in each round `quantkit bench` times the float model on the
CPU and then all pairs, each in a process of its own; ratios are those within a round, and the median of the
rounds counts. Emulators are timed in the first round alone. This file holds the order of things and the
page; every figure comes from `quantkit bench`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from peers.workplace import fingerprint

from quantkit.pipeline.stages.write import write_float_model
from quantkit.report.figures import bar, percent
from quantkit.report.tables import Page, Table, to_markdown
from quantkit.runtime.machine.cache import cache_folder
from quantkit.runtime.machine.facts import read_cpu
from quantkit.runtime.providers.table import PROVIDERS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
BESIDE = ("numpy", "psutil")  # what the process of a provider needs besides an onnxruntime
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "qnn": ("onnxruntime>=1.24.2", "onnxruntime-qnn>=2.7,<3"),
    "openvino": ("onnxruntime-openvino>=1.24",),  # which replaces onnxruntime, and runs on any x86 processor
    "webgpu": ("onnxruntime>=1.24", "onnxruntime-ep-webgpu>=0.4"),
}
FLOAT = "float32"
# Target -> who is asked to run it.
PAIRS: dict[str, tuple[str, ...]] = {
    FLOAT: ("cpu", "openvino"),
    "cpu": ("cpu", "openvino"),
    "openvino": ("openvino", "cpu"),
    "npu": ("qnn", "openvino", "cpu"),
    "gpu": ("webgpu",),
}
SLOW = ("qnn",)  # emulated here, so one round has to do


def say(text: str) -> None:
    """Progress goes to stderr."""
    print(f"bench_providers: {text}", file=sys.stderr, flush=True)


def interpreter(name: str, cache: Path) -> str:
    """The Python of a provider's environment, made once; a stamp, written last, tells a finished one."""
    if name not in ENVIRONMENTS:
        return sys.executable
    wanted = (*ENVIRONMENTS[name], *BESIDE)
    folder = cache / "environments" / f"provider-{name}"
    stamp = folder / f".done-{fingerprint(*wanted)}"
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    if not stamp.exists():
        say(f"installing {', '.join(wanted)}")
        venv.create(folder, with_pip=True, clear=True)
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-input",
        ]
        subprocess.run([*install, *wanted], check=True, capture_output=True, text=True)
        stamp.touch()
    return str(python)


def make(model: str, target: str, folder: Path, flags: list[str]) -> None:
    """The artifact of one target, or the same model in float32."""
    say(f"making {target}")
    if target == FLOAT:
        is_random = "--random-weights" in flags
        folder.mkdir(parents=True)
        write_float_model(model, folder, random_weights=is_random)
        settings = {"model": model, "random_weights": is_random}
        (folder / "recipe.yaml").write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        return
    command = [
        sys.executable,
        "-m",
        "quantkit.cli",
        "quantize",
        model,
        "--target",
        target,
        "--no-eval",
        *flags,
    ]
    done = subprocess.run([*command, "-o", str(folder)], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])


def bench(folder: Path, name: str, python: str, flags: list[str]) -> dict[str, Any]:
    """What `quantkit bench` finds out of one provider."""
    provider = name if python == sys.executable else f"{name}@{python}"
    command = [
        sys.executable,
        "-m",
        "quantkit.cli",
        "bench",
        str(folder),
        "--provider",
        provider,
        "--json",
        *flags,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"provider": name, "outcome": "failed", "why_not": done.stderr.strip().splitlines()[-1]}
    document = json.loads(done.stdout)
    return {**document["providers"][0], "environment": document["environment"]}


def measure(arguments: argparse.Namespace, workplace: Path) -> list[dict[str, Any]]:
    """A row for each pair, with the runs of all rounds."""
    flags = ["--random-weights"] if arguments.random_weights else []
    limits = ["--time-limit", str(arguments.time_limit), "--threads", str(arguments.threads)]
    limits += ["--prompt", str(arguments.prompt), "--decode", str(arguments.decode)]
    rows: list[dict[str, Any]] = []
    for target in arguments.targets:
        reason = None
        try:
            make(arguments.model, target, workplace / target, flags)
        except Exception as error:  # a row all the same
            reason = " ".join(str(error).split())
        for name in PAIRS[target]:
            row: dict[str, Any] = {"target": target, "provider": name, "runs": [], "reason": reason}
            try:
                row["python"] = interpreter(name, arguments.cache) if reason is None else None
            except (subprocess.CalledProcessError, OSError) as error:
                row["reason"] = f"its packages cannot be installed here ({error})"
            rows.append(row)
    for number in range(arguments.rounds):
        for row in rows:
            if row["reason"] is None and (number == 0 or row["provider"] not in SLOW):
                say(f"round {number + 1}: {row['target']} on {row['provider']}")
                row["runs"].append(bench(workplace / row["target"], row["provider"], row["python"], limits))
    return rows


def summary(row: dict[str, Any], baseline: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the page: of the last run, with ratios to the float model on the CPU in the same round."""
    last = row["runs"][-1] if row["runs"] else {"outcome": "not run", "why_not": row["reason"]}
    found: dict[str, Any] = {"target": row["target"], "provider": row["provider"], "outcome": last["outcome"]}
    found["why_not"] = last.get("why_not")
    placement = last.get("placement") or {}
    num_nodes = placement.get("num_nodes")
    found["nodes"] = num_nodes and f"{num_nodes - len(placement['unplaced'])} of {num_nodes}"
    found["macs"] = placement.get("mac_fraction")
    found["left"] = sorted({node["operator"] for node in placement.get("unplaced", ())})
    for phase in ("prefill", "decode"):
        pairs = [
            (run[phase]["median_ms"], beside[phase]["median_ms"])
            for run, beside in zip(row["runs"], baseline, strict=False)
            if phase in run and phase in beside
        ]
        found[phase] = statistics.median(made / wanted for made, wanted in pairs) if pairs else None
        found[f"{phase}_ms"] = statistics.median(made for made, _ in pairs) if pairs else None
    found["accuracy"] = last.get("accuracy")
    found["start"] = [last.get("start_ms"), last.get("start_again_ms")]
    found["device"], found["version"] = last.get("device"), last.get("version")
    return found


def page(document: dict[str, Any]) -> str:
    """The support table, as Markdown."""
    columns = ("MACs", "nodes", "prompt", "token", "perplexity", "KL, nats", "logit error", "start again")

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        accuracy, (cold, kept) = row["accuracy"] or {}, row["start"]
        return (
            f"`{bar(row['macs'])}` {percent(row['macs'])}" if row["macs"] is not None else "-",
            row["nodes"] or "-",
            *(f"{row[phase]:.2f}" if row[phase] else "-" for phase in ("prefill", "decode")),
            f"x {accuracy['perplexity_ratio']:.4f} ({accuracy['num_tokens']})"
            if "perplexity_ratio" in accuracy
            else "-",
            f"{accuracy['kl_divergence']:.2g}" if "kl_divergence" in accuracy else "-",
            f"{accuracy['max_relative_logit_error']:.2%}" if accuracy else "-",
            f"{cold / kept:.1f} times faster" if cold and kept else "-",
        )

    def where(row: dict[str, Any]) -> str:
        if row["outcome"] in ("failed", "not run"):
            return f"not run: {row['why_not']}"
        left = f"; left to the CPU: {', '.join(row['left'])}" if row["left"] else ""
        died = f"; {row['why_not']}" if row["why_not"] else ""
        return f"{row['device'] or 'device not named'}, version {row['version']}{left}{died}"

    table = Table(
        title=f"{document['model']}: target by provider",
        columns=("target", "provider", *columns, "where"),
        rows=tuple((row["target"], row["provider"], *cells(row), where(row)) for row in document["rows"]),
        numeric=columns,
    )
    references = sorted({row["accuracy"]["reference"] for row in document["rows"] if row["accuracy"]})
    tried = {row["provider"] for row in document["rows"]}
    others = [(name, row.needs) for name, row in PROVIDERS.items() if name not in tried]
    return to_markdown(
        Page(
            head=(
                f"{document['date']}, {document['machine']}, {document['threads']} threads, batch 1, prompt "
                f"{document['prompt']}, {document['rounds']} rounds.",
            ),
            tables=(
                table,
                Table(title="Not tried here", columns=("provider", "it needs"), rows=tuple(others)),
            ),
            foot=(
                "prompt, token: time beside float32 of the same model on onnxruntime's CPU provider, in "
                "the same round; less than 1 is faster",
                f"perplexity, KL, logit error: beside {', '.join(references)}, on the tokens in brackets",
                "logit error: the greatest difference over the greatest logit",
                "start again: sessions from what was compiled and kept, beside compiling",
                "an emulated device says nothing about the speed of a real one",
            ),
        )
    )


def main() -> None:
    """Make, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(PAIRS))
    for name, default in (
        ("rounds", 3),
        ("threads", read_cpu().num_threads),
        ("prompt", 128),
        ("decode", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds for each provider")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "peers")
    parser.add_argument("--output", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.targets if name not in PAIRS]
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; allowed: {', '.join(PAIRS)}")
    arguments.targets = [FLOAT, *(name for name in arguments.targets if name != FLOAT)]
    with tempfile.TemporaryDirectory(prefix="quantkit-") as workplace:
        rows = measure(arguments, Path(workplace))
    baseline = next(row["runs"] for row in rows if (row["target"], row["provider"]) == (FLOAT, "cpu"))
    document = {
        "model": arguments.model,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{read_cpu().model}, {platform.platform()}",
        **{name: getattr(arguments, name) for name in ("rounds", "threads", "prompt", "decode")},
        "rows": [summary(row, baseline) for row in rows],
        "runs": rows,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "providers.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = page(document)
    title = "# Targets and providers\n\nWritten by `scripts/bench_providers.py`.\n\n"
    (arguments.output / "providers.md").write_text(title + text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
