"""The reference for an encoder and its decoder: the original as a function of what each of them reads."""

from __future__ import annotations

import numpy as np
import torch
from exporting import build_tiny, error

from quantkit.model.families import FAMILIES
from quantkit.model.load import open_source
from quantkit.model.reference import reference_answer_logits

IDS = np.random.default_rng(0).integers(3, 60, (2, 9))
ANSWER = np.random.default_rng(1).integers(3, 60, (2, 5))


def test_it_is_the_checkpoint_in_float32(tmp_path):
    row = FAMILIES["t5"]
    model = build_tiny(row.tiny_class, dict(row.tiny), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    made = reference_answer_logits(open_source(str(tmp_path)))(IDS, ANSWER)
    with torch.inference_mode():
        wanted = model.float()(input_ids=torch.tensor(IDS), decoder_input_ids=torch.tensor(ANSWER)).logits
    assert made.dtype == np.float32
    assert error(made, wanted.numpy()).relative < 1e-6
