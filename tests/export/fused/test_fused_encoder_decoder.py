"""Every family of encoder-decoders, run for real: the three fused graphs are the model, in float and in INT8.

The oracle of the float graphs is transformers itself, with padding in the batch. That of the INT8 graphs is
the checkpoint read back into transformers' modules with inputs rounded as the operators round them.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from checkpoints import quantize
from exporting import NOTHING, build_tiny, error
from fake_quantize import fake_quantize

from quantkit.errors import InputError
from quantkit.export.check import check_models
from quantkit.export.encoder_decoder import why_not_encoder_decoder
from quantkit.export.fused.encoder_decoder import emit_encoder_decoder
from quantkit.export.graph import save
from quantkit.model.families import FAMILIES
from quantkit.plan.targets import TARGETS
from quantkit.runtime.cpu_session import open_on_cpu

try:
    from optimum.onnxruntime import ORTModelForSeq2SeqLM
except ImportError as missing:
    WHY_NO_OPTIMUM = str(missing)
else:
    WHY_NO_OPTIMUM = ""

FILES = ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx")
NAMES = ("t5", "mt5", "bart", "mbart", "marian", "pegasus")
GENERATOR = np.random.default_rng(0)
IDS = GENERATOR.integers(3, 60, (2, 11))
MASK = np.ones_like(IDS)
MASK[1, 7:] = 0
ANSWER = GENERATOR.integers(3, 60, (2, 9))


def sizes_of(name, variant=0):
    row = FAMILIES[name]
    return row.tiny_class, {**row.tiny, **({}, *row.variants)[variant]}


CASES = [
    pytest.param(*sizes_of(name, variant), id=f"{name}-{variant}")
    for name in NAMES
    for variant in range(1 + len(FAMILIES[name].variants))
]
CASES += [
    pytest.param(
        "T5ForConditionalGeneration",
        {
            **sizes_of("t5")[1],
            "relative_attention_num_buckets": 12,
            "relative_attention_max_distance": 7,
            "num_decoder_layers": 1,
            "d_kv": 6,
        },
        id="near-buckets",
    ),
]


def build(tiny_class, sizes):
    model = build_tiny(tiny_class, sizes)
    if hasattr(model, "final_logits_bias"):  # a buffer, of zeros where nobody trained it
        model.final_logits_bias.data.normal_(generator=torch.Generator().manual_seed(3))
    return model


def emit(model, folder, **options):
    """(sessions of the three files, quantized) of one model."""
    quantized = quantize(model, folder, **options)
    graphs = emit_encoder_decoder(
        quantized.map,
        quantized.contents,
        quantized.checkpoint,
        target=TARGETS["cpu"],
        metadata={"max_positions": quantized.map.context, "kind": "encoder_decoder"},
    )
    for name, graph in graphs.items():
        save(graph, folder / name)
    assert tuple(graphs) == FILES
    return [open_on_cpu(str(folder / name), onnxruntime.SessionOptions()) for name in FILES], quantized


def run(session, feeds):
    wanted = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
    return dict(zip([entry.name for entry in session.get_outputs()], session.run(None, wanted), strict=True))


def forced(sessions, ids=IDS, mask=MASK, answer=ANSWER, steps=(3, 1, 1, 4)):
    """Logits of the answer's tokens, fed in steps of these lengths."""
    encoder, first, later = sessions
    feeds = {"input_ids": ids, "attention_mask": mask, "encoder_attention_mask": mask}
    feeds["encoder_hidden_states"] = run(encoder, feeds)["last_hidden_state"]
    ends, logits, past = np.cumsum(steps), [], {}
    for number, end in enumerate(ends):
        tokens = answer[:, end - steps[number] : end]
        made = run(later if number else first, {**feeds, **past, "input_ids": tokens})
        logits.append(made.pop("logits"))
        past |= {name.replace("present", "past_key_values"): value for name, value in made.items()}
    return np.concatenate(logits, axis=1)


def original(model, ids=IDS, mask=MASK, answer=ANSWER):
    with torch.inference_mode():
        return model(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            decoder_input_ids=torch.tensor(answer),
            use_cache=False,
        ).logits.numpy()


@pytest.mark.parametrize(("tiny_class", "sizes"), CASES)
def test_float_graphs_are_the_model(tiny_class, sizes, tmp_path):
    model = build(tiny_class, sizes)
    sessions, _ = emit(model, tmp_path, min_dim=NOTHING)
    expected = original(model)
    for steps in ((3, 1, 1, 4), (9,)):
        made = error(forced(sessions, steps=steps), expected)
        assert made.relative < 1e-5
        assert made.absolute < 1e-4


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_long_texts_and_answers_are_the_model(name, tmp_path):
    """Beyond the largest distance of T5's biases; BART ends at its last position."""
    tiny_class, sizes = sizes_of(name)
    model = build(tiny_class, sizes)
    sessions, _ = emit(model, tmp_path, min_dim=NOTHING)
    length = 300 if name == "t5" else sizes["max_position_embeddings"]
    ids, answer = (GENERATOR.integers(3, 60, (1, length)) for _ in range(2))
    inputs = {"ids": ids, "mask": np.ones_like(ids), "answer": answer}
    made = forced(sessions, steps=(length - 2, 1, 1), **inputs)
    assert error(made, original(model, **inputs)).relative < 1e-5


@pytest.mark.parametrize("scheme", ["int8_block32", "int8_token", "int4_block32"])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_graphs_are_the_checkpoint(name, scheme, tmp_path):
    model = build(*sizes_of(name))
    sessions, quantized = emit(model, tmp_path, scheme=scheme)
    placement = check_models([tmp_path / file for file in FILES], quantized.plan, TARGETS["cpu"])
    assert len(placement.projections) == quantized.plan.projections.total
    made, expected = forced(sessions), original(model)
    fake = original(fake_quantize(copy.deepcopy(model), quantized.checkpoint))
    assert error(made, fake).relative < 3e-2
    if "block" in scheme:
        assert min(error(*rows).relative for rows in zip(made, fake, strict=True)) < 1e-3
    assert 1e-4 < error(made, expected).relative < (0.6 if "int4" in scheme else 0.1)


def test_keys_and_values_of_the_encoder_are_computed_once(tmp_path):
    *_, quantized = emit(build(*sizes_of("bart")), tmp_path)
    cross = {
        layer.name
        for layer in quantized.map.layers
        if layer.is_cross_attention and layer.role in ("attention_key", "attention_value")
    }
    assert len(cross) == 4

    def computed(file):
        nodes = onnx.load(tmp_path / file, load_external_data=False).graph.node
        return cross & {node.name for node in nodes}

    assert [computed(file) for file in FILES] == [set(), cross, set()]


def test_graphs_hold_no_weights(tmp_path):
    emit(build(*sizes_of("t5")), tmp_path)
    for file in FILES:
        graph = onnx.load(tmp_path / file, load_external_data=False).graph
        assert max(len(tensor.raw_data) for tensor in graph.initializer) <= 8 * 257  # T5's rows by distance
        beside = {
            entry.value for t in graph.initializer for entry in t.external_data if entry.key == "location"
        }
        assert beside == {"weights.safetensors"}


@pytest.mark.skipif(bool(WHY_NO_OPTIMUM), reason=f"no optimum.onnxruntime here: {WHY_NO_OPTIMUM}")
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_optimum_generates_as_transformers_does(name, tmp_path):
    model = build(*sizes_of(name))
    emit(model, tmp_path, min_dim=NOTHING)
    model.config.save_pretrained(tmp_path)
    client = ORTModelForSeq2SeqLM.from_pretrained(tmp_path)
    settings = {
        "input_ids": torch.tensor(IDS),
        "attention_mask": torch.tensor(MASK),
        "max_new_tokens": 6,
        "do_sample": False,
        "num_beams": 3,
        "eos_token_id": None,
        "pad_token_id": 1,
        "decoder_start_token_id": 2,
    }
    assert client.generate(**settings).tolist() == model.generate(**settings).tolist()


@pytest.mark.parametrize(
    ("tiny_class", "sizes", "reason"),
    [
        ("T5EncoderModel", sizes_of("t5")[1], "it is no encoder with a decoder"),
        ("BartForSequenceClassification", sizes_of("bart")[1], "no language-model head"),
        ("BertForMaskedLM", FAMILIES["bert"].tiny, "it is no encoder with a decoder"),
    ],
)
def test_other_models_are_refused(tiny_class, sizes, reason, tmp_path):
    model = build_tiny(tiny_class, sizes)
    quantized = quantize(model, tmp_path)
    assert reason in (why_not_encoder_decoder(quantized.map) or "")
    with pytest.raises(InputError, match=reason):
        emit_encoder_decoder(
            quantized.map, quantized.contents, quantized.checkpoint, target=TARGETS["cpu"], metadata={}
        )
