"""GPTQ by llm-compressor: 4 bits in groups of 32, the head float, and logits of the result.

python llm_compressor_gptq.py MODEL CALIBRATION.npy EVALUATION.npy LOGITS.npy
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

GROUP = 32


def main() -> None:
    source, calibration, evaluation, logits = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    samples = [
        {
            "input_ids": torch.from_numpy(ids_T)[None],
            "attention_mask": torch.ones(1, len(ids_T), dtype=torch.long),
        }
        for ids_T in np.load(calibration)
    ]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    modifier = GPTQModifier(
        config_groups={"all": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"]
    )
    begin = time.perf_counter()
    oneshot(
        model=model,
        dataset=DataLoader(samples, batch_size=None),
        recipe=[modifier],
        num_calibration_samples=len(samples),
        max_seq_length=samples[0]["input_ids"].shape[1],
        pipeline="sequential",
    )
    seconds = time.perf_counter() - begin
    with torch.inference_mode():
        outputs = [
            model(torch.from_numpy(ids_T)[None]).logits[0].float().numpy() for ids_T in np.load(evaluation)
        ]
    np.save(logits, np.stack(outputs))
    print(json.dumps({"seconds": seconds, "threads": torch.get_num_threads()}))


main()
