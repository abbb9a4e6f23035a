"""Running whole texts: what a graph declares is what it is fed, padding and defaults included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import quantize
from exporting import NOTHING, build_tiny, error

from quantkit.errors import InputError
from quantkit.export.fused.encoder import emit_encoder
from quantkit.export.graph import save
from quantkit.model.families import FAMILIES
from quantkit.runtime.encoder import encode, open_encoder

IDS = np.random.default_rng(0).integers(3, 60, (2, 12))
MASK = np.ones_like(IDS)
MASK[1, 8:] = 0


def write(class_name, family, folder, emit):
    model = build_tiny(class_name, dict(FAMILIES[family].tiny))
    quantized = quantize(model, folder, min_dim=NOTHING)
    save(
        emit(quantized.map, quantized.contents, quantized.checkpoint, **quantized.options()),
        folder / "model.onnx",
    )
    return model, open_encoder(folder, threads=1)


def test_token_types_and_mask_have_their_usual_defaults(tmp_path):
    model, encoder = write("BertModel", "bert", tmp_path, emit_encoder)
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor(IDS))
        padded = model(input_ids=torch.tensor(IDS), attention_mask=torch.tensor(MASK))
        second = model(input_ids=torch.tensor(IDS), token_type_ids=torch.ones_like(torch.tensor(IDS)))
    for made, wanted in (
        (encode(encoder, IDS), plain),
        (encode(encoder, IDS, MASK), padded),
        (encode(encoder, IDS, token_types=np.ones_like(IDS)), second),
    ):
        assert set(made) == {"last_hidden_state", "pooler_output"}
        assert error(made["pooler_output"], wanted["pooler_output"].numpy()).relative < 1e-5
    assert error(encode(encoder, IDS)["last_hidden_state"], padded[0].numpy()).relative > 1e-3


def test_what_else_a_graph_wants_is_named(tmp_path):
    _, encoder = write("BertModel", "bert", tmp_path, emit_encoder)
    wider = type(encoder)(
        session=encoder.session,
        inputs={**encoder.inputs, "encoder_hidden_states": ("b", "s", 32)},
        outputs=(),
    )
    with pytest.raises(InputError, match="also needs encoder_hidden_states"):
        encode(wider, IDS)
    with pytest.raises(InputError, match="no such file"):
        open_encoder(tmp_path / "absent.onnx")
