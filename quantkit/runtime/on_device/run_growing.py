"""Runs the model that lies beside this file, with onnxruntime, tokenizers and numpy alone.

python run.py "Once upon a time"    a decoder continues the text, its key-value cache written in place
python run.py "One text" "Another"  an encoder prints one line a text: its vector, or what it says of it
python run.py --check               compares every file with the manifest
"""

import json
from collections.abc import Iterator

import device
import numpy as np
import onnxruntime

ASKED, STOPS = device.arguments(__doc__, "cpu"), device.stops()
# Without VNNI an x86 CPU cuts off sums of 8-bit products, and this takes exact ones; the two products of one
# weight that 16-bit inputs need it cannot rewrite.
IS_EXACT = "static16" in str(device.read("manifest.json").get("scheme"))
SESSION = device.open_session("model.onnx", ASKED, **({} if IS_EXACT else {"x64quantprecision": "1"}))
PASTS = device.pasts(SESSION)


def generate(ids: list[int]) -> Iterator[int]:
    """New tokens, one by one; the past and the present of a layer are the same memory."""
    binding, capacity, held, chunk = SESSION.io_binding(), len(ids) + ASKED.max_new_tokens, 0, ids
    for name, past in PASTS.items():
        empty = np.zeros((1, past.shape[1], capacity, past.shape[3]), device.TYPES[past.type])
        memory = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
        binding.bind_ortvalue_input(name, memory)
        binding.bind_ortvalue_output(name.replace("past_key_values", "present"), memory)
    width = next(each.shape[2] for each in SESSION.get_outputs() if each.name == "logits")
    logits, choose = np.empty((1, 1, width), np.float32), device.chooser(ASKED)
    binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))
    for _ in range(ASKED.max_new_tokens):
        filled = held + len(chunk)
        # Products take tokens in pairs and sum an odd one in another order: an odd prompt is padded by one.
        padding = [0] * (held == 0 and len(chunk) % 2 and filled < capacity)
        mask = np.array([[1] * filled + padding], np.int64)
        binding.bind_cpu_input("input_ids", np.array([chunk + padding], np.int64))
        binding.bind_cpu_input("attention_mask", mask)
        binding.bind_cpu_input("position_ids", np.ascontiguousarray(mask.cumsum(axis=1)[:, held:] - 1))
        SESSION.run_with_iobinding(binding)
        token = choose(logits[0, -1])
        held, chunk = filled, [token]
        yield token
        if token in STOPS:
            return


def encode(ids: list[int], kinds: list[int]) -> device.Outputs:
    """What an encoder gives for a text."""
    wanted = {"input_ids": [ids], "attention_mask": np.ones_like([ids]), "token_type_ids": [kinds]}
    return device.run(SESSION, wanted | {"position_ids": np.arange(len(ids))[None]})


CONTEXT = json.loads(SESSION.get_modelmeta().custom_metadata_map["quantkit"]).get("max_positions")
device.answer(ASKED, CONTEXT, generate if PASTS else None, encode)
