"""Runs the model that lies beside this file, with onnxruntime, tokenizers and numpy alone.

python run.py "Once upon a time"    a decoder continues the text, its key-value cache written in place
python run.py "One text" "Another"  an encoder prints one line a text: its vector, or what it says of it
python run.py --check               compares every file with the manifest
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
CACHE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


def read(name: str) -> dict[str, Any]:
    """One of the JSON files; empty where there is none."""
    path = HERE / name
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def choose(logits: Any, temperature: float, random: np.random.Generator) -> int:  # noqa: ANN401
    """The most likely token, or a drawn one."""
    if temperature == 0:
        return int(logits.argmax())
    scores = logits.astype(np.float64) / temperature
    weights = np.exp(scores - scores.max())
    sums = np.cumsum(weights / weights.sum())
    return min(int((sums <= random.random() * sums[-1]).sum()), len(sums) - 1)


def generate(session: Any, ids: list[int], asked: argparse.Namespace) -> Iterator[int]:  # noqa: ANN401
    """New tokens, one by one; the past and the present of a layer are the same memory."""
    binding, capacity, held, chunk = session.io_binding(), len(ids) + asked.max_new_tokens, 0, ids
    for each in session.get_inputs():
        if each.name.startswith("past_key_values"):
            empty = np.zeros((1, each.shape[1], capacity, each.shape[3]), CACHE_TYPES[each.type])
            memory = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
            binding.bind_ortvalue_input(each.name, memory)
            binding.bind_ortvalue_output(each.name.replace("past_key_values", "present"), memory)
    ends = read("generation_config.json").get("eos_token_id", read("config.json").get("eos_token_id"))
    random, stops = np.random.default_rng(asked.seed), ends if isinstance(ends, list) else [ends]
    for _ in range(asked.max_new_tokens):
        filled = held + len(chunk)
        # Products take tokens in pairs and sum an odd one in another order: an odd prompt is padded by one.
        padding = [0] * (held == 0 and len(chunk) % 2 and filled < capacity)
        mask = np.array([[1] * filled + padding], np.int64)
        binding.bind_cpu_input("input_ids", np.array([chunk + padding], np.int64))
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_cpu_input("position_ids", np.ascontiguousarray(mask.cumsum(axis=1)[:, held:] - 1))
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        token = choose(binding.get_outputs()[-1].numpy()[0, -1], asked.temperature, random)
        held, chunk = filled, [token]
        yield token
        if token in stops:
            return


def encode(session: Any, encoding: Any) -> dict[str, Any]:  # noqa: ANN401
    """The mean vector of a text's tokens, or another model's own outputs."""
    ids = np.array([encoding.ids], np.int64)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
    feeds["token_type_ids"] = np.array([encoding.type_ids], np.int64)
    names = [each.name for each in session.get_outputs()]
    found = session.run(names, {each.name: feeds[each.name] for each in session.get_inputs()})
    outputs = dict(zip(names, found, strict=True))
    if "last_hidden_state" in outputs:
        return {"vector": outputs["last_hidden_state"][0].mean(axis=0).tolist()}
    return {name: values[0].tolist() for name, values in outputs.items()}


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--json", action="store_true", help="print token ids too")
    parser.add_argument("--check", action="store_true", help="compare every file with the manifest")
    asked = parser.parse_args()
    if not asked.texts and not asked.check:
        parser.error("give a text, or --check")
    for name, wanted in read("manifest.json")["files"].items() if asked.check else ():
        if not (HERE / name).exists() or hashlib.sha256((HERE / name).read_bytes()).hexdigest() != wanted:
            sys.exit(f"{name} is not as it was packed; copy the package again")
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = asked.threads, 3
    # Without VNNI an x86 CPU cuts off sums of 8-bit products; there this takes exact ones.
    described = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
    if "static16" not in str(described.get("scheme")):  # whose two products of one weight it cannot rewrite
        options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(str(HERE / "model.onnx"), options, ["CPUExecutionProvider"])
    continues = any(each.name.startswith("past_key_values") for each in session.get_inputs())
    context = json.loads(session.get_modelmeta().custom_metadata_map["quantkit"]).get("max_positions")
    for text in asked.texts:
        encoding, num_new = tokenizer.encode(text), asked.max_new_tokens if continues else 0
        if not encoding.ids or len(encoding.ids) + num_new > (context or sys.maxsize):
            sys.exit(f"{len(encoding.ids)} tokens and {num_new} new ones; allowed: 1 to {context} together")
        if not continues:
            print(json.dumps({"text": text, **encode(session, encoding)}))
            continue
        made, shown = list[int](), ""
        for token in generate(session, encoding.ids, asked):
            made.append(token)
            answer = tokenizer.decode(made)
            if not asked.json and not answer.endswith("\ufffd"):  # part of a character
                print((text if not shown else "") + answer[len(shown) :], end="", flush=True)
                shown = answer
        print(
            json.dumps({"prompt": text, "text": tokenizer.decode(made), "tokens": made}) if asked.json else ""
        )


if __name__ == "__main__":
    main()
