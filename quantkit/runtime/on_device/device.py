"""Shared by both runners: the files of the package, sessions, the command line, texts in and out.

Needs onnxruntime, tokenizers and numpy alone, jinja2 for `--chat`, and onnxruntime-qnn for `--provider qnn`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reads it when it is imported
import onnxruntime
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
TYPES: dict[str, Any] = {
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}
ENDS = ("start_logits", "end_logits")  # one number a token; other outputs of tokens have three dimensions
Outputs = dict[str, Any]


def read(name: str) -> dict[str, Any]:
    """A JSON file beside this one; empty where there is none."""
    path = HERE / name
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, RecursionError, TypeError, ValueError):
        sys.exit(f"{name} is damaged; copy the package again")


def sha256_of(name: str) -> str:
    with (HERE / name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sum_of(name: str) -> str:
    """SHA-256 of a file's length and of the 64-bit sums of its parts."""
    part = np.zeros(1 << 15, np.uint64)
    content = part.view(np.uint8)
    digest = hashlib.sha256(str((HERE / name).stat().st_size).encode())
    with (HERE / name).open("rb") as file:
        while count := file.readinto(content.data):
            content[count:] = 0
            digest.update(int(part.sum(dtype=np.uint64)).to_bytes(8, "little"))
    return digest.hexdigest()


def require_whole(manifest: dict[str, Any], *, everything: bool) -> None:
    """End with a line where a file differs; sums are many times as fast as SHA-256 for large files."""
    files, sums = manifest.get("files"), manifest.get("sums")
    if not isinstance(files, dict) or not isinstance(sums, dict) or not files:
        sys.exit("manifest.json is damaged; copy the package again")
    for name, sha256 in files.items():
        uses_sums = not everything and name in sums
        is_there = os.path.isfile(HERE / name)  # noqa: PTH113 - Path.is_file raises on long names
        if not is_there or (sum_of(name) != sums[name] if uses_sums else sha256_of(name) != sha256):
            sys.exit(f"{name} is not as it was packed; copy the package again")


def arguments(description: str | None, *providers: str) -> argparse.Namespace:
    """The command line; `--check` is done here, and without texts it is all."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--provider", choices=providers, default=providers[0])
    parser.add_argument("--chat", action="store_true", help="answer in the model's chat template")
    parser.add_argument("--system", help="the system's turn of a chat")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: all cores")
    parser.add_argument("--json", action="store_true", help="print token ids too")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, help="compare all hashes with the manifest, or none"
    )
    options = parser.parse_args()
    if not options.texts and not options.check:
        parser.error("give a text, or --check")
    if options.check is not False:
        require_whole(read("manifest.json"), everything=options.check is True)
    if not options.texts:
        sys.exit(0)
    if options.provider != "cpu":  # whose library prints too: to standard error
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    return options


def has_vnni() -> bool:
    """Whether the processor is known to have VNNI."""
    facts = Path("/proc/cpuinfo")
    return facts.exists() and "vnni" in facts.read_text(errors="replace")


def open_session(name: str, arguments: argparse.Namespace, **cpu_settings: str) -> Any:
    """A graph on the CPU, or all of it on the NPU, there from its compiled graph where that fits."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = arguments.threads, 4
    if arguments.provider == "cpu":
        for key, value in cpu_settings.items():
            options.add_session_config_entry(f"session.{key}", value)
        return onnxruntime.InferenceSession(str(HERE / name), options, ["CPUExecutionProvider"])
    try:
        plugin = importlib.import_module("onnxruntime_qnn")
    except ImportError:
        sys.exit("provider qnn needs the package onnxruntime-qnn: pip install onnxruntime-qnn")
    try:
        ep_name = plugin.get_ep_name()
        if all(device.ep_name != ep_name for device in onnxruntime.get_ep_devices()):
            onnxruntime.register_execution_provider_library(ep_name, plugin.get_library_path())
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == ep_name]
        device = next((device for device in devices if device.device.type.name == "NPU"), devices[0])
        emulated = {"htp_arch": "73"} if device.device.type.name == "CPU" else {}
        options.add_provider_for_devices([device], {"backend_type": "htp", **emulated})
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        kept = f"compiled/{Path(name).stem}.qnn"
        record = read(f"{kept}.json")
        hardware = f"{device.device.vendor_id:#x}:{device.device.device_id:#x} on {platform.machine()}"
        fits = (
            record.get("provider_version") == version("onnxruntime-qnn")
            and record.get("onnxruntime") == onnxruntime.__version__
            and record["device"].endswith(hardware)
        )
        return onnxruntime.InferenceSession(str(HERE / (f"{kept}.onnx" if fits else name)), options)
    except Exception as error:  # onnxruntime's share no base class; without a device there is no first one
        sys.exit(f"provider qnn cannot run {name}: {' '.join(str(error).split())[:300]}")


def run(session: Any, inputs: dict[str, Any]) -> Outputs:
    """All outputs by name; inputs that the graph does not have are left out."""
    feeds = {
        value.name: np.ascontiguousarray(inputs[value.name], TYPES[value.type])
        for value in session.get_inputs()
    }
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def pasts(session: Any) -> dict[str, Any]:
    return {value.name: value for value in session.get_inputs() if value.name.startswith("past_key_values")}


def length_of(session: Any, name: str) -> int:
    return int(next(value.shape[1] for value in session.get_inputs() if value.name == name))


def chooser(options: argparse.Namespace) -> Callable[[Any], int]:
    """The choice of a token from its logits: the most likely one, or a drawn one."""
    random = np.random.default_rng(options.seed)

    def choose(logits: Any) -> int:
        if options.temperature == 0:
            return int(logits.argmax())
        scores = logits.astype(np.float64) / options.temperature
        weights = np.exp(scores - scores.max())
        sums = np.cumsum(weights / weights.sum())
        return min(int((sums <= random.random() * sums[-1]).sum()), len(sums) - 1)

    return choose


def stops() -> list[int]:
    ends: Any = read("generation_config.json").get("eos_token_id", read("config.json").get("eos_token_id"))
    return ends if isinstance(ends, list) else [ends]


def summary(outputs: Outputs, count: int) -> dict[str, Any]:
    """A text's embedding, the mean vector of its tokens, or another encoder's own outputs."""
    if "sentence_embedding" in outputs:
        return {"vector": outputs["sentence_embedding"][0].tolist()}
    if "last_hidden_state" in outputs:
        return {"vector": outputs["last_hidden_state"][0, :count].mean(axis=0).tolist()}
    return {
        name: (values[0, :count] if name in ENDS or values.ndim == 3 else values[0]).tolist()
        for name, values in outputs.items()
    }


def turn(text: str, options: argparse.Namespace) -> str:
    """A user's turn as the model was trained on it."""
    return str(importlib.import_module("chat").rendered_here(HERE, text, options.system))


def answer(
    options: argparse.Namespace,
    context: int | None,
    generate: Callable[[list[int]], Iterator[int]] | None,
    encode: Callable[[list[int], list[int]], Outputs],
    sentence: dict[str, Any] | None = None,
) -> None:
    """One text after the other: continued as tokens come, or one line of an encoder's outputs.

    A model of sentence embeddings cuts a long text, and puts its prompt before each.
    """
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    prefix, lowercases = "", False
    if sentence:
        limits = [limit for limit in (sentence["max_tokens"], context) if limit]
        if limits:
            tokenizer.enable_truncation(min(limits))
        prefix = sentence["prompts"].get(sentence["default_prompt"], "")
        lowercases = sentence["lowercases"]
    for text in options.texts:
        whole = turn(text, options) if options.chat and generate else prefix + text
        whole = whole.lower() if lowercases else whole
        encoding = tokenizer.encode(whole, add_special_tokens=not options.chat)
        num_new = max(1, options.max_new_tokens) if generate else 0
        if not encoding.ids or len(encoding.ids) + num_new > (context or sys.maxsize):
            sys.exit(f"{len(encoding.ids)} tokens and {num_new} new ones; allowed: 1 to {context} together")
        if generate is None:
            outputs = encode(encoding.ids, encoding.type_ids)
            print(json.dumps({"text": text, **summary(outputs, len(encoding.ids))}))
            continue
        tokens, shown = list[int](), ""
        for token in generate(encoding.ids):
            tokens.append(token)
            so_far = tokenizer.decode(tokens)
            if not options.json and not so_far.endswith("\ufffd"):  # part of a character
                print(
                    (text if not shown and not options.chat else "") + so_far[len(shown) :],
                    end="",
                    flush=True,
                )
                shown = so_far
        document = {"prompt": text, "text": tokenizer.decode(tokens), "tokens": tokens}
        print(json.dumps(document) if options.json else "")
