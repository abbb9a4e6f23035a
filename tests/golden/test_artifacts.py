"""Golden artifacts: SHA-256 of every graph, weights file and recipe that a table of runs writes.

The runs go through the command line alone, so the hashes hold across any change inside the package that is
meant to leave its output as it is. Hashes depend on the processor and on library versions (sums of floats are
ordered differently), so they are kept for one of each and compared where both are the same.

To accept an intended change: UPDATE_GOLDEN=1 pytest tests/golden/test_artifacts.py -m ''
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from exporting import KINDS, build_tiny

from quantkit import cli
from quantkit.model.families import FAMILIES

KEPT = Path(__file__).parent / "artifacts.json"
RECIPES = Path(__file__).parents[2] / "recipes"
HASHED = (".onnx", ".data", ".safetensors", ".yaml")
PACKAGES = ("numpy", "torch", "transformers", "onnx", "onnxruntime", "optimum-onnx", "ml_dtypes")
FEW = ("--calibration-windows", "4", "--calibration-length", "32", "--calibration-text", "ids.npy")
STATIC = ("--target", "npu", "--prompt-length", "6", *FEW)
NOT_STATIC = (  # without a graph of fixed shapes
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    *("deberta_v2", "clip_text", "siglip_text"),
)
TRACED = ("bloom", "quantkit_one_wide")  # each takes seconds
PAIRS = ("t5", "mt5", "bart", "mbart", "marian", "pegasus")  # in three graphs; their hashes are not recorded
WIDE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
}  # heads that the operator rotates itself


@dataclass(frozen=True)
class Run:
    """One artifact: a tiny checkpoint of a family, and the flags it is quantized with."""

    name: str
    family: str
    flags: tuple[str, ...]
    variant: int = 0
    sizes: tuple[tuple[str, int], ...] = ()


def default_runs() -> list[Run]:
    """Every family and variant as it comes."""
    return [
        Run(f"{family}-{variant}", family, FEW, variant)
        for family, row in FAMILIES.items()
        if family in KINDS and family not in (*TRACED, *PAIRS)
        for variant in range(1 + len(row.variants))
    ]


def static_runs() -> list[Run]:
    """Graphs of fixed shapes."""
    return [Run(f"{name}-npu", name, STATIC) for name in KINDS if name not in (*TRACED, *PAIRS)] + [
        Run("gpt2-npu-8", "gpt2", (*STATIC, "--scheme", "int8_static8")),
        Run("gpt2-openvino", "gpt2", ("--target", "openvino", "--prompt-length", "6", *FEW)),
        Run("bert-openvino", "bert", ("--target", "openvino", "--prompt-length", "6", *FEW)),
    ]


SCHEMES = (
    "int8_block16",
    "int8_block32",
    "int8_block128",
    "int8_channel",
    "int8_mixed",
    "int8_token",
    "int8_token_outliers",
    "int8_block64_outliers",
    "int8_static16",
    "int8_static8",
    "int4_block32",
    "int4_block64_zeros",
)
OPTIONS = {
    "rtn": ("--scheme", "int4_block32", "--fit", "rtn", "--transform", "none"),
    "mse": ("--scheme", "int4_block32_zeros", "--fit", "mse"),
    "output": ("--scheme", "int4_block32", "--fit", "output"),
    "smoothquant": ("--transform", "smoothquant"),
    "awq": ("--transform", "awq", "--untie-head"),
    "hadamard": ("--transform", "hadamard", "--untie-head"),
    "bias": ("--scheme", "int8_channel", "--bias-correction"),
    "cache": ("--cache", "int8"),
    "mixed": ("--layer", "ffn_down=int8_block32", "--layer", "attention_out=float", "--keep-checkpoint"),
    "partial": ("--exclude", "lm_head", "--min-dim", "40"),
    "gpu": ("--target", "gpu"),
    "avx2": ("--target", "cpu-avx2"),
    "arm": ("--target", "cpu-arm"),
    "random": ("--random-weights",),
}
RUNS = [
    *default_runs(),
    *static_runs(),
    *(
        Run(f"{family}-{scheme}", family, ("--scheme", scheme, *FEW))
        for family in ("gpt2", "llama")
        for scheme in SCHEMES
    ),
    *(
        Run(f"{family}-{name}", family, (*flags, *FEW))
        for family in ("gpt2", "llama")
        for name, flags in OPTIONS.items()
        if (family, name) != ("gpt2", "hadamard")  # LayerNorm permits no rotation
    ),
    Run("llama-wide", "llama", FEW, sizes=tuple(WIDE.items())),
    Run("gemma3-wide", "gemma3", FEW, sizes=tuple(WIDE.items())),
    Run("bert-gpu", "bert", ("--target", "gpu", "--scheme", "int8_block32", *FEW)),
    Run("bert-block32", "bert", ("--scheme", "int8_block32", *FEW)),
    Run("ws_ffn-latents", "ws_ffn", ("--keep-latent", *FEW)),
    Run("gemma3-cache", "gemma3", ("--cache", "int8", *FEW)),
]
SLOW_RUNS = [
    *(Run(f"{family}-traced", family, FEW) for family in TRACED),
    *(
        Run(f"{family}-{variant}", family, FEW, variant)
        for family, row in FAMILIES.items()
        if family not in (*TRACED, *PAIRS, *KINDS) and row.picture is None
        for variant in range(1 + len(row.variants))
    ),
    *(
        Run(f"{name}-npu", name, STATIC)
        for name, row in FAMILIES.items()
        if name not in (*TRACED, *PAIRS, *KINDS, *NOT_STATIC) and row.picture is None
    ),
]


def fingerprint() -> dict[str, str]:
    """What the last bit of a float sum depends on."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith("flags")), "")
    return {
        "processor": hashlib.sha256(" ".join(sorted(flags.split()[2:])).encode()).hexdigest()[:16],
        **{name: version(name) for name in PACKAGES},
    }


def quantkit(*arguments: str) -> int:
    """Exit code of the command in this process."""
    with mock.patch.object(sys, "argv", ["quantkit", *arguments]), pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def hashes_of(folder: Path) -> dict[str, str]:
    """SHA-256 of graphs, weights and recipe by their path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in HASHED
    }


def check(name: str, made: dict[str, str]) -> None:
    """Hold hashes against the kept ones, or keep them."""
    assert made
    if os.environ.get("UPDATE_GOLDEN"):
        document = json.loads(KEPT.read_text()) if KEPT.exists() else {"runs": {}}
        document = {"made_with": fingerprint(), "runs": {**document["runs"], name: made}}
        KEPT.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    assert made == json.loads(KEPT.read_text())["runs"][name]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder to work in, an empty cache, one thread, and hashes that can be compared."""
    if not os.environ.get("UPDATE_GOLDEN"):
        kept, found = json.loads(KEPT.read_text())["made_with"], fingerprint()
        others = [f"{key} {found[key]}, kept with {kept[key]}" for key in kept if kept[key] != found[key]]
        if others:
            pytest.skip(f"hashes are kept for another machine or other versions: {'; '.join(others)}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(1, 60, 4000))
    yield
    torch.set_num_threads(threads)


def write_model(family: str, variant: int = 0, sizes: dict | None = None) -> None:
    """A tiny checkpoint in the folder `model`."""
    row = FAMILIES[family]
    changes = row.variants[variant - 1] if variant else {}
    build_tiny(row.tiny_class, {**row.tiny, **changes, **(sizes or {})}).save_pretrained("model")


@pytest.mark.parametrize(
    "run",
    [
        *(pytest.param(run, id=run.name) for run in RUNS),
        *(pytest.param(run, id=run.name, marks=pytest.mark.slow) for run in SLOW_RUNS),
    ],
)
def test_an_artifact_is_as_kept(run: Run) -> None:
    write_model(run.family, run.variant, dict(run.sizes))
    sized = () if "--min-dim" in run.flags else ("--min-dim", "1")
    assert quantkit("quantize", "model", "--no-eval", *sized, *run.flags, "-o", "out") == 0
    check(run.name, hashes_of(Path("out")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [*(path.stem for path in sorted(RECIPES.glob("*.yaml")) if "smallest" not in path.stem)]
)
def test_the_embedded_model_by_a_recipe_is_as_kept(recipe: str) -> None:
    flags = ("--calibration-windows", "4", "--calibration-length", "128", "--no-eval")
    assert quantkit("quantize", "demo", "--recipe", str(RECIPES / f"{recipe}.yaml"), *flags, "-o", "out") == 0
    check(f"demo-{recipe}", hashes_of(Path("out")))


@pytest.mark.slow
def test_a_search_within_a_budget_is_as_kept() -> None:
    recipe = {
        "budget": {"max_kl": 0.002, "evaluations": 7},
        "calibration": {"windows": 8, "length": 64, "gradient_windows": 2},
        "measure": {"max_tokens": 600, "latency": False, "memory": False, "threads": 1},
    }
    Path("recipe.yaml").write_text(json.dumps(recipe))
    assert quantkit("quantize", "demo", "--recipe", "recipe.yaml", "-o", "out") == 0
    check("demo-budget", hashes_of(Path("out")))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_both_sides_of_a_protected_model_are_as_kept(family: str) -> None:
    write_model(family)
    with mock.patch("secrets.token_bytes", lambda count: bytes(range(count))):
        assert quantkit("protect", "model", "--key", "key", "--min-dim", "1", "-o", "out") == 0
    check(f"{family}-protected", hashes_of(Path("out")))
