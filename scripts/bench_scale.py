#!/usr/bin/env python3
"""Growth of time, memory and disk with the size of a model, and projections to 8B, 70B and 405B.

    .venv/bin/python scripts/bench_scale.py [--sizes NAME ...] [--folder DIR] [--again]

Random Llamas of four sizes are quantized with GPTQ and with the default, each in a process of its own. The
seconds of a stage are fitted as a constant and a factor on the work that the dry run counts for it, on the
smaller sizes; the largest is held out and shows the error of the fit. The same factors on the work of
published shapes are the projections. Weights of published shapes are not written: a dry run reads only the
headers of their checkpoints. Measurements that stand in docs/benchmarks/scale.json are kept, unless `--again`
is given: a run that was interrupted, or was given a few sizes, is continued by the next one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from other_programs import others

from quantkit import quantize
from quantkit.evaluation.memory import run_and_measure
from quantkit.model.inspect import inspect
from quantkit.pipeline.dry_run import sizes_of
from quantkit.pipeline.estimate import stages
from quantkit.pipeline.options import Options, with_options
from quantkit.pipeline.rates import Rates, measure_rates
from quantkit.pipeline.stages.resolve import resolve
from quantkit.progress import Progress
from quantkit.recipe import Recipe
from quantkit.runtime.machine.facts import read_cpu

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "quantkit" / "assets" / "demo"
PAGE = ROOT / "docs" / "benchmarks" / "scale"
BAR = 0.2  # error at the held-out size
FEWEST = 3  # sizes: two that are fitted, and one that is held out
NOT_TIMED: Options = {"latency": False, "memory": False, "max_tokens": 2048}
RECIPES: dict[str, Options] = {
    "default": {**NOT_TIMED},
    "gptq": {**NOT_TIMED, "scheme": "int4_block32", "calibration_windows": 16},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the checkpoint's tensors, whose head has a weight of its own."""
        keys = self.hidden // self.heads * self.kv_heads
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            block = f"model.layers.{index}"
            shapes |= {
                f"{block}.self_attn.q_proj.weight": (self.hidden, self.hidden),
                f"{block}.self_attn.k_proj.weight": (keys, self.hidden),
                f"{block}.self_attn.v_proj.weight": (keys, self.hidden),
                f"{block}.self_attn.o_proj.weight": (self.hidden, self.hidden),
                f"{block}.mlp.gate_proj.weight": (self.inner, self.hidden),
                f"{block}.mlp.up_proj.weight": (self.inner, self.hidden),
                f"{block}.mlp.down_proj.weight": (self.hidden, self.inner),
                f"{block}.input_layernorm.weight": (self.hidden,),
                f"{block}.post_attention_layernorm.weight": (self.hidden,),
            }
        return {**shapes, "model.norm.weight": (self.hidden,), "lm_head.weight": (self.vocab, self.hidden)}

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


MEASURED = {
    "11M": Shape(hidden=320, inner=896, layers=5, heads=5, kv_heads=5, vocab=8192),
    "33M": Shape(hidden=512, inner=1408, layers=8, heads=8, kv_heads=4, vocab=8192),
    "110M": Shape(hidden=768, inner=2048, layers=12, heads=12, kv_heads=4, vocab=16384),
    "330M": Shape(hidden=1152, inner=3072, layers=20, heads=18, kv_heads=6, vocab=16384),
}
PROJECTED = {  # of Llama 3.1
    "8B": Shape(hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    "70B": Shape(hidden=8192, inner=28672, layers=80, heads=64, kv_heads=8, vocab=128256),
    "405B": Shape(hidden=16384, inner=53248, layers=126, heads=128, kv_heads=8, vocab=128256),
}


def write_checkpoint(folder: Path, shape: Shape, *, has_weights: bool) -> None:
    """Random weights in bfloat16, or a file of holes behind a header."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, folder / name)
    header, offset = {}, 0
    for name, sizes in shape.tensors().items():
        num_bytes = 2 * int(np.prod(sizes))
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        if not has_weights:
            file.truncate(8 + len(encoded) + offset)
            return
        for sizes in shape.tensors().values():
            values = random.standard_normal(sizes, np.float32) * 0.02 + (len(sizes) == 1)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def predicted(folder: Path, options: Options, rates: Rates) -> dict[str, dict[str, float]]:
    """Seconds at fixed rates, bytes held and bytes written of every stage, as the dry run counts them."""
    recipe = with_options(Recipe(model=str(folder)), options)
    resolved = resolve(recipe, Progress(quiet=True))
    counted: dict[str, Counter[str]] = {}
    for stage in stages(sizes_of(resolved), rates):
        seen = counted.setdefault(stage.name, Counter())
        seen["seconds"] += stage.work.seconds(rates)  # type: ignore[assignment]
        seen["file_bytes"] += int(stage.work.file_bytes)
        seen["held_bytes"] = max(seen["held_bytes"], stage.held_bytes)
    return {name: dict(values) for name, values in counted.items()}


def quantize_one(folder: str, options: str) -> None:
    """Quantizes in this process, and prints the seconds of each stage and the bytes read and written."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="quantkit-scale-", dir=Path(folder).parent) as output:
        artifact = quantize(folder, output=Path(output) / "out", **json.loads(options))
        seconds = time.perf_counter() - begin
        report = json.loads((artifact.folder / "report.json").read_text())
        size = sum(path.stat().st_size for path in artifact.folder.iterdir())
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    print(
        json.dumps(
            {
                "stages": report["seconds"],
                "seconds": seconds,
                "artifact_bytes": size,
                "bytes_read": int(io["rchar"]),
                "bytes_written": int(io["wchar"]),
            }
        )
    )


def measure_one(folder: Path, options: Options) -> dict[str, Any]:
    with others() as cores_of_others:
        ran = run_and_measure([sys.executable, __file__, "--one", str(folder), json.dumps(options)])
    if ran.exit_code:
        raise SystemExit(f"{folder}: {ran.errors[-600:]}")
    measured = json.loads(ran.output.splitlines()[-1])
    return {**measured, "peak_bytes": ran.peak_bytes, "cores_of_others": cores_of_others()}


def inspected_seconds(folder: Path) -> float:
    begin = time.perf_counter()
    inspect(str(folder))
    return time.perf_counter() - begin


def fitted(work: Sequence[float], observed: Sequence[float]) -> NDArray[np.float64]:
    """(constant, factor), neither negative, of least relative error: observed = constant + factor x work."""
    both_N2 = np.stack([np.ones(len(work)), work], axis=1) / np.maximum(observed, 1e-9)[:, None]
    wanted_N = np.ones(len(work))
    solutions = [np.linalg.lstsq(both_N2, wanted_N)[0]]
    if solutions[0].min() < 0:  # then one of them is 0
        for column in range(2):
            alone = np.zeros(2)
            alone[column] = np.linalg.lstsq(both_N2[:, [column]], wanted_N)[0][0]
            solutions.append(alone)
    allowed = [solution for solution in solutions if solution.min() >= 0]
    return min(allowed, key=lambda solution: float(np.square(both_N2 @ solution - wanted_N).sum()))


def fit_recipe(rows: Mapping[str, Mapping[str, Any]], projected: Mapping[str, Any]) -> dict[str, Any]:
    """Stages of a recipe: fitted on all sizes but the last, which shows the error."""
    names = list(rows)
    held_out = names[-1]
    stage_names = [name for name in rows[held_out]["predicted"] if name in rows[held_out]["stages"]]
    results: dict[str, Any] = {"stages": {}, "held_out": held_out}
    for stage in stage_names:
        work = [rows[name]["predicted"][stage]["seconds"] for name in names]
        observed = [rows[name]["stages"][stage] for name in names]
        constant, factor = fitted(work[:-1], observed[:-1])
        again = fitted(work, observed)  # with the held-out size, for the projections
        results["stages"][stage] = {
            "observed": observed,
            "work": work,
            "constant": constant,
            "factor": factor,
            "held_out_predicted": constant + factor * work[-1],
            "projected": {
                name: float(again[0] + again[1] * counted[stage]["seconds"])
                for name, counted in projected.items()
            },
        }
    rest = [
        rows[name]["seconds"] - sum(rows[name]["stages"].get(stage, 0) for stage in stage_names)
        for name in names
    ]
    constant, factor = fitted([rows[name]["parameters"] for name in names[:-1]], rest[:-1])
    predicted_rest = constant + factor * rows[held_out]["parameters"]
    results["rest"] = {"observed": rest, "held_out_predicted": predicted_rest}
    total = sum(stage["held_out_predicted"] for stage in results["stages"].values()) + predicted_rest
    results["total"] = {
        "observed": [rows[name]["seconds"] for name in names],
        "held_out_predicted": total,
        "error": total / rows[held_out]["seconds"] - 1,
        "projected": {
            name: sum(stage["projected"][name] for stage in results["stages"].values()) for name in projected
        },
    }
    held = [max(stage["held_bytes"] for stage in rows[name]["predicted"].values()) for name in names]
    peaks = [rows[name]["peak_bytes"] for name in names]
    constant, factor = fitted(held[:-1], peaks[:-1])
    again = fitted(held, peaks)
    results["memory"] = {
        "observed": peaks,
        "held_out_predicted": constant + factor * held[-1],
        "error": (constant + factor * held[-1]) / peaks[-1] - 1,
        "projected": {
            name: float(again[0] + again[1] * max(stage["held_bytes"] for stage in counted.values()))
            for name, counted in projected.items()
        },
    }
    results["disk"] = {
        "observed": [rows[name]["bytes_written"] for name in names],
        "artifact": [rows[name]["artifact_bytes"] for name in names],
        "projected": {
            name: sum(stage["file_bytes"] for stage in counted.values())
            for name, counted in projected.items()
        },
    }
    return results


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = "|".join(["---", *["---:"] * (len(heads) - 1)])
    return "\n".join([f"| {' | '.join(heads)} |", f"|{ruler}|", *(f"| {' | '.join(row)} |" for row in rows)])


def page_of(results: Mapping[str, Any]) -> str:
    parts = [
        "# Growth with the size of the model",
        "Written by `scripts/bench_scale.py`. Random Llamas in bfloat16, each quantized in a process of its "
        "own, once. Seconds of a stage are fitted as a constant and a factor on the work that the dry run "
        "counts, on all sizes but the largest, which is held out. Projections use all sizes.",
        f"{results['machine']}, {results['cores']:g} cores; "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items()),
    ]
    for recipe, fit in results["fits"].items():
        sizes = [name for name, row in results["shapes"].items() if recipe in row]
        heads = ["", *sizes, f"{sizes[-1]}, predicted", "error", *results["projected"]]
        rows = [
            [
                stage,
                *(f"{seconds:.1f}" for seconds in values["observed"]),
                f"{values['held_out_predicted']:.1f}",
                f"{values['held_out_predicted'] / values['observed'][-1] - 1:+.0%}",
                *(duration(values["projected"][name]) for name in results["projected"]),
            ]
            for stage, values in fit["stages"].items()
        ]
        total, memory, disk = fit["total"], fit["memory"], fit["disk"]
        rows += [
            [
                "**all, s**",
                *(f"{seconds:.1f}" for seconds in total["observed"]),
                f"{total['held_out_predicted']:.1f}",
                f"{total['error']:+.0%}",
                *(duration(total["projected"][name]) for name in results["projected"]),
            ],
            [
                "peak memory, GB",
                *(f"{peak / 1e9:.2f}" for peak in memory["observed"]),
                f"{memory['held_out_predicted'] / 1e9:.2f}",
                f"{memory['error']:+.0%}",
                *(f"{memory['projected'][name] / 1e9:,.0f}" for name in results["projected"]),
            ],
            [
                "written, GB",
                *(f"{count / 1e9:.2f}" for count in disk["observed"]),
                "-",
                "-",
                *(f"{disk['projected'][name] / 1e9:,.0f}" for name in results["projected"]),
            ],
            [
                "cores of other programs",
                *(f"{results['shapes'][name][recipe]['cores_of_others']:.2f}" for name in sizes),
                *["-"] * (2 + len(results["projected"])),
            ],
        ]
        command = {
            "default": "quantkit quantize MODEL",
            "gptq": "quantkit quantize MODEL --scheme int4_block32",
        }
        parts += [f"## `{command[recipe]}`", table(heads, rows)]
    inspected = {**results["shapes"], **results["projected"]}
    rows = [[name, f"{row['inspect_seconds']:.2f}"] for name, row in inspected.items()]
    parts += ["## `quantkit inspect MODEL`", table(["", "s"], rows)]
    rows = [
        [name, *(str(value) for value in asdict(shape).values())]
        for name, shape in {**MEASURED, **PROJECTED}.items()
    ]
    parts += ["## Shapes", table(["", *asdict(MEASURED["11M"])], rows)]
    return "\n\n".join(parts) + "\n"


def write_fits(results: dict[str, Any]) -> None:
    results["fits"] = {
        recipe: fit_recipe(
            {name: row[recipe] for name, row in results["shapes"].items() if recipe in row},
            {name: row[recipe] for name, row in results["projected"].items()},
        )
        for recipe in RECIPES
    }
    PAGE.with_suffix(".md").write_text(page_of(results))


def write_results(results: Mapping[str, Any]) -> None:
    PAGE.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


def begun() -> dict[str, Any]:
    """Results without measurements, and rates of the machine that serve all sizes."""
    cpu = read_cpu()
    return {
        "machine": cpu.model,
        "cores": cpu.usable_cores,
        "versions": {name: version(name) for name in ("quantkit-onnx", "torch", "onnxruntime", "numpy")},
        "rates": asdict(measure_rates(1024, 1024)),
        "shapes": {},
        "projected": {},
    }


def measure(results: dict[str, Any], folder: Path, name: str) -> None:
    """Measure what is missing of a size; results are written after each recipe."""
    row = results["shapes"].setdefault(name, {})
    missing = [recipe for recipe in RECIPES if recipe not in row]
    if not missing:
        return
    source = folder / name
    write_checkpoint(source, MEASURED[name], has_weights=True)
    row["inspect_seconds"] = inspected_seconds(source)
    parameters = sum(int(np.prod(sizes)) for sizes in MEASURED[name].tensors().values())
    for recipe in missing:
        row[recipe] = {**measure_one(source, RECIPES[recipe]), "parameters": parameters}
        print(name, recipe, json.dumps({key: row[recipe][key] for key in ("seconds", "stages")}), flush=True)
        write_results(results)
    shutil.rmtree(source)


def count_work(results: dict[str, Any], folder: Path) -> None:
    """The work that the dry run counts for every shape, from headers alone."""
    rates = Rates(**results["rates"])
    for name, shape in {**MEASURED, **PROJECTED}.items():
        source = folder / f"{name}-header"
        write_checkpoint(source, shape, has_weights=False)
        for recipe, options in RECIPES.items():
            counted = predicted(source, options, rates)
            if name in MEASURED:
                results["shapes"].get(name, {}).get(recipe, {})["predicted"] = counted
            else:
                results["projected"].setdefault(name, {})[recipe] = counted
        if name in PROJECTED:
            results["projected"][name]["inspect_seconds"] = inspected_seconds(source)
        shutil.rmtree(source)


def main() -> int:
    if sys.argv[1:2] == ["--one"]:
        quantize_one(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=MEASURED, default=list(MEASURED))
    parser.add_argument("--folder", type=Path, help="for checkpoints and artifacts; default: a temporary one")
    parser.add_argument("--again", action="store_true", help="measure sizes that stand already")
    arguments = parser.parse_args()
    earlier = PAGE.with_suffix(".json")
    results = json.loads(earlier.read_text()) if earlier.exists() else begun()
    if arguments.again:
        for name in arguments.sizes:
            results["shapes"].pop(name, None)
    with tempfile.TemporaryDirectory(prefix="quantkit-", dir=arguments.folder) as temporary:
        for name in arguments.sizes:
            measure(results, Path(temporary), name)
        for recipe in RECIPES:
            measured = [name for name, row in results["shapes"].items() if recipe in row]
            if len(measured) < FEWEST:
                print(f"{recipe}: {len(measured)} of at least {FEWEST} sizes are measured")
                return 0
        count_work(results, Path(temporary))
    write_fits(results)
    write_results(results)
    errors = {recipe: fit["total"]["error"] for recipe, fit in results["fits"].items()}
    print(", ".join(f"{recipe}: {error:+.1%} at the held-out size" for recipe, error in errors.items()))
    return 0 if all(abs(error) <= BAR for error in errors.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
