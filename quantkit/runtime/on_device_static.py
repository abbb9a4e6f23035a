"""Runs the graphs of fixed sizes that lie beside this file, with onnxruntime, tokenizers and numpy alone.

python run.py "Once upon a time"       a decoder continues the text: one graph reads it, one adds tokens
python run.py "One text" "Another"     an encoder prints one line a text: its vector, or what it says of it
python run.py "A text" --provider qnn  all of it on Qualcomm's NPU; needs the package onnxruntime-qnn too
python run.py --check                  compares every file with the manifest
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
TYPES: dict[str, Any] = {
    "tensor(int32)": np.int32,
    "tensor(uint16)": np.uint16,
    "tensor(uint8)": np.uint8,
    "tensor(float)": np.float32,
}
ENDS = ("start_logits", "end_logits")  # one number a token; other outputs of tokens have three dimensions


def read(name: str) -> dict[str, Any]:
    """One of the JSON files; empty where there is none."""
    path = HERE / name
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def open_session(name: str, asked: argparse.Namespace) -> Any:  # noqa: ANN401
    """A graph on the CPU, or all of it on the NPU, there from its compiled form where that fits."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = asked.threads, 4
    if asked.provider == "cpu":  # which has no products of 16-bit codes: weights become floats, and once
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        return onnxruntime.InferenceSession(str(HERE / name), options, ["CPUExecutionProvider"])
    try:
        plugin = importlib.import_module("onnxruntime_qnn")
    except ImportError:
        sys.exit("provider qnn needs the package onnxruntime-qnn: pip install onnxruntime-qnn")
    try:
        ep_name = plugin.get_ep_name()
        if all(each.ep_name != ep_name for each in onnxruntime.get_ep_devices()):
            onnxruntime.register_execution_provider_library(ep_name, plugin.get_library_path())
        found = [each for each in onnxruntime.get_ep_devices() if each.ep_name == ep_name]
        device = next((each for each in found if each.device.type.name == "NPU"), found[0])
        options.add_provider_for_devices([device], {"backend_type": "htp"})
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


def run(session: Any, wanted: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """All outputs by name; the graph is fed what it has inputs for, in their types."""
    inputs = session.get_inputs()
    feeds = {each.name: np.ascontiguousarray(wanted[each.name], TYPES[each.type]) for each in inputs}
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def length_of(session: Any) -> int:  # noqa: ANN401
    """Tokens that a graph reads at once."""
    return int(next(each.shape[1] for each in session.get_inputs() if each.name == "input_ids"))


def filled(ids: list[int], length: int) -> dict[str, Any]:
    """A text in the first places of a graph, and which places these are."""
    row, filler = np.array(ids, np.int32), (0, length - len(ids))
    return {
        "input_ids": np.pad(row, filler)[None],
        "attention_mask": np.pad(np.ones_like(row), filler)[None],
        "logit_position": [len(ids) - 1],
    }


def encode(session: Any, encoding: Any) -> dict[str, Any]:  # noqa: ANN401
    """The mean vector of a text's tokens, or another model's own outputs."""
    length, count = length_of(session), len(encoding.ids)
    kinds = np.pad(np.array(encoding.type_ids), (0, length - count))[None]
    outputs = run(session, filled(encoding.ids, length) | {"token_type_ids": kinds})
    if "last_hidden_state" in outputs:
        return {"vector": outputs["last_hidden_state"][0, :count].mean(axis=0).tolist()}
    return {
        name: (values[0, :count] if name in ENDS or values.ndim == 3 else values[0]).tolist()
        for name, values in outputs.items()
    }


def choose(logits: Any, temperature: float, random: np.random.Generator) -> int:  # noqa: ANN401
    """The most likely token, or a drawn one."""
    if temperature == 0:
        return int(logits.argmax())
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max())
    sums = np.cumsum(weights / weights.sum())
    return min(int((sums <= random.random() * sums[-1]).sum()), len(sums) - 1)


def generate(prompt: Any, decode: Any, ids: list[int], asked: argparse.Namespace) -> Iterator[int]:  # noqa: ANN401
    """New tokens; keys and values are codes in arrays of fixed length, which are kept here between runs."""
    size = length_of(prompt)
    place, waiting, left = min(len(ids), size), ids[size:], asked.max_new_tokens
    made, caches = run(prompt, filled(ids[:size], size)), dict[str, Any]()
    for each in decode.get_inputs():
        if each.name.startswith("past_key_values"):
            new = made[each.name.replace("past_key_values", "present")]
            # Empty places repeat the first: they are hidden, but codes that stand for no key may score high.
            caches[each.name] = np.repeat(new[:, :, :1], each.shape[2], axis=2)
            caches[each.name][:, :, :place] = new[:, :, :place]
    num_past = next(iter(caches.values())).shape[2]
    ends = read("generation_config.json").get("eos_token_id", read("config.json").get("eos_token_id"))
    random, stops = np.random.default_rng(asked.seed), ends if isinstance(ends, list) else [ends]
    while True:
        if waiting:  # a prompt that is longer than its graph goes on token by token
            token = waiting.pop(0)
        else:
            token, left = choose(made["logits"][0, -1], asked.temperature, random), left - 1
            yield token
            if token in stops or not left:
                return
        mask = np.append(np.arange(num_past) < place, True)[None]  # the new token stands behind all places
        one = {"input_ids": [[token]], "attention_mask": mask, "position_ids": [[place]]}
        made = run(decode, one | caches)
        for name, cache in caches.items():
            if place < num_past:
                cache[:, :, place] = made[name.replace("past_key_values", "present")][:, :, 0]
        place += 1


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--provider", choices=("cpu", "qnn"), default="cpu")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: all cores")
    parser.add_argument("--json", action="store_true", help="print token ids too")
    parser.add_argument("--check", action="store_true", help="compare every file with the manifest")
    asked = parser.parse_args()
    if not asked.texts and not asked.check:
        parser.error("give a text, or --check")
    for name, wanted in read("manifest.json")["files"].items() if asked.check else ():
        if not (HERE / name).exists() or hashlib.sha256((HERE / name).read_bytes()).hexdigest() != wanted:
            sys.exit(f"{name} is not as it was packed; copy the package again")
    if not asked.texts:
        return
    if asked.provider != "cpu":  # whose library prints too; what it says goes to the errors
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    continues = (HERE / "decode.onnx").exists()
    names = ("prompt.onnx", "decode.onnx") if continues else ("model.onnx",)
    sessions = [open_session(name, asked) for name in names]
    context = length_of(sessions[0])
    if continues:  # as long as the mask of the graph that goes on
        context = next(each.shape[1] for each in sessions[1].get_inputs() if each.name == "attention_mask")
    for text in asked.texts:
        encoding, num_new = tokenizer.encode(text), max(1, asked.max_new_tokens) if continues else 0
        if not encoding.ids or len(encoding.ids) + num_new > context:
            sys.exit(f"{len(encoding.ids)} tokens and {num_new} new ones; allowed: 1 to {context} together")
        if not continues:
            print(json.dumps({"text": text, **encode(sessions[0], encoding)}))
            continue
        made, shown = list[int](), ""
        for token in generate(sessions[0], sessions[1], encoding.ids, asked):
            made.append(token)
            answer = tokenizer.decode(made)
            if not asked.json and not answer.endswith("\ufffd"):  # part of a character
                print((text if not shown else "") + answer[len(shown) :], end="", flush=True)
                shown = answer
        answer = {"prompt": text, "text": tokenizer.decode(made), "tokens": made}
        print(json.dumps(answer) if asked.json else "")


if __name__ == "__main__":
    main()
