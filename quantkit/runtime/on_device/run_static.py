"""Runs the graphs of fixed sizes that lie beside this file, with onnxruntime, tokenizers and numpy alone.

python run.py "Once upon a time"       a decoder continues the text: one graph reads it, one adds tokens
python run.py "One text" "Another"     an encoder prints one line a text: its vector, or its outputs
python run.py "A text" --provider qnn  all of it on Qualcomm's NPU; needs the package onnxruntime-qnn too
python run.py --check                  compares every file with the manifest
"""

from collections.abc import Iterator

import device
import numpy as np

OPTIONS, STOPS = device.arguments(__doc__, "cpu", "qnn"), device.stops()
CONTINUES = (device.HERE / "decode.onnx").exists()
NAMES = ("prompt.onnx", "decode.onnx") if CONTINUES else ("model.onnx",)
# The CPU has no products of 16-bit codes: with this setting it dequantizes weights once, not in every run.
FIRST, *NEXT = (device.open_session(name, OPTIONS, disable_quant_qdq="1") for name in NAMES)
SIZE = device.length_of(FIRST, "input_ids")
CONTEXT = device.length_of(NEXT[0], "attention_mask") if CONTINUES else SIZE


def filled(ids: list[int]) -> device.Outputs:
    """A text in the first places of a graph, with its mask."""
    row, mask = ([[*values, *[0] * (SIZE - len(ids))]] for values in (ids, [1] * len(ids)))
    return {"input_ids": row, "attention_mask": mask, "logit_position": [len(ids) - 1]}


def generate(ids: list[int]) -> Iterator[int]:
    """New tokens; the KV cache lies in arrays of fixed length, which are kept here between runs."""
    outputs, caches = device.run(FIRST, filled(ids[:SIZE])), {}
    place, waiting, choose = len(ids[:SIZE]), ids[SIZE:], device.chooser(OPTIONS)
    for name, past in device.pasts(NEXT[0]).items():
        new = outputs[name.replace("past_key_values", "present")]
        # Empty places repeat the first: older graphs hide scores by -50, and other codes may score higher.
        caches[name] = np.repeat(new[:, :, :1], past.shape[2], axis=2)
        caches[name][:, :, :place] = new[:, :, :place]
    while True:
        token = waiting.pop(0) if waiting else choose(outputs["logits"][0, -1])
        if place >= len(ids):  # a prompt that is longer than its graph goes on token by token
            yield token
            if token in STOPS or place - len(ids) + 1 >= OPTIONS.max_new_tokens:
                return
        mask = np.append(np.arange(CONTEXT - 1) < place, True)[None]  # the new token stands behind all
        one = {"input_ids": [[token]], "attention_mask": mask, "position_ids": [[place]], **caches}
        outputs = device.run(NEXT[0], one)
        for name, cache in caches.items():
            if place < CONTEXT - 1:
                cache[:, :, place] = outputs[name.replace("past_key_values", "present")][:, :, 0]
        place += 1


def encode(ids: list[int], kinds: list[int]) -> device.Outputs:
    """Outputs of an encoder; those behind the text mean nothing."""
    return device.run(FIRST, filled(ids) | {"token_type_ids": [[*kinds, *[0] * (SIZE - len(ids))]]})


device.answer(OPTIONS, CONTEXT, generate if CONTINUES else None, encode)
