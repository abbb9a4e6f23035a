"""Runs the model that lies beside this file, with onnxruntime, tokenizers and numpy alone.

python run.py "Once upon a time"    a decoder continues the text, its KV cache written in place
python run.py "One text" "Another"  an encoder prints one line a text: its vector, or its outputs
python run.py --check               compares every file with the manifest
"""

import json
from collections.abc import Iterator

import device
import numpy as np
import onnxruntime

OPTIONS, STOPS = device.arguments(__doc__, "cpu"), device.stops()
# Without VNNI an x86 CPU cuts sums of 8-bit products off; this setting makes them exact, but slower. It does
# not take two products of one weight, as 16-bit inputs need: their weights become floats.
EXACT = {"x64quantprecision": "1"}
if "static16" in str(device.read("manifest.json").get("scheme")):
    EXACT = {"disable_quant_qdq": "1"}
SESSION = device.open_session("model.onnx", OPTIONS, **({} if device.has_vnni() else EXACT))
PASTS = device.pasts(SESSION)


def generate(ids: list[int]) -> Iterator[int]:
    """New tokens, one by one; past and present of a layer share their memory."""
    binding, length, capacity = SESSION.io_binding(), len(ids), len(ids) + OPTIONS.max_new_tokens
    for name, past in PASTS.items():
        empty = np.zeros((1, past.shape[1], capacity, past.shape[3]), device.TYPES[past.type])
        memory = onnxruntime.OrtValue.ortvalue_from_numpy(empty)
        binding.bind_ortvalue_input(name, memory)
        binding.bind_ortvalue_output(name.replace("past_key_values", "present"), memory)
    width = next(value.shape[2] for value in SESSION.get_outputs() if value.name == "logits")
    logits, choose = np.empty((1, 1, width), np.float32), device.chooser(OPTIONS)
    binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))
    # MatMuls take rows in pairs and sum an odd row in another order: an odd prompt is padded by one.
    chunk = np.array([ids + [0] * (length % 2)], np.int64)
    mask = (np.arange(capacity) < length).astype(np.int64)[None]
    shown, token, place = mask[:, : chunk.shape[1]], np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
    inputs = {"input_ids": chunk, "position_ids": shown.cumsum(axis=1) - 1, "attention_mask": shown}
    for number in range(OPTIONS.max_new_tokens):
        for name, values in inputs.items():
            binding.bind_cpu_input(name, values)
        SESSION.run_with_iobinding(binding)
        chosen = choose(logits[0, -1])
        yield chosen
        if chosen in STOPS:
            return
        # The inputs of a token stay bound from the first one on; their values change.
        inputs = {} if number else {"input_ids": token, "position_ids": place, "attention_mask": mask}
        token[0, 0], place[0, 0], mask[0, length + number] = chosen, length + number, 1


def encode(ids: list[int], kinds: list[int]) -> device.Outputs:
    inputs = {"input_ids": [ids], "attention_mask": np.ones_like([ids]), "token_type_ids": [kinds]}
    return device.run(SESSION, inputs | {"position_ids": np.arange(len(ids))[None]})


FACTS = json.loads(SESSION.get_modelmeta().custom_metadata_map["quantkit"])
device.answer(OPTIONS, FACTS.get("max_positions"), generate if PASTS else None, encode, FACTS.get("sentence"))
