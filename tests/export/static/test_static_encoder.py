"""Encoders of a fixed length: in float they are the model, in integers they are the formulas of their grids.

The oracle of the float graph is transformers itself, with padding in the batch. That of the integer graph is
a walk over the float one in float64, which rounds each value by the formula for the range it was seen in.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from checkpoints import quantize
from exporting import NOTHING, build_tiny, error
from onnx import helper, numpy_helper

from quantkit.errors import InputError
from quantkit.export.encoder import HEADS
from quantkit.export.graph import save
from quantkit.export.static.encoder import emit_static_encoder, why_not_static_encoder
from quantkit.export.static.qdq import Bits, quantize_static
from quantkit.export.static.ranges import showing_ranges
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.pipeline.quantize import quantize as quantize_whole
from quantkit.pipeline.stages.export_static import encoder_texts
from quantkit.plan.targets import Target
from quantkit.recipe import Recipe, override
from quantkit.runtime.encoder import encode, encoder_of
from quantkit.runtime.generate import generate
from quantkit.runtime.providers.table import PROVIDERS, plugin_devices
from quantkit.runtime.providers.trial_stages import Trial, write_logits
from quantkit.runtime.ranges import observe_ranges
from quantkit.runtime.session import open_session
from quantkit.runtime.static_decoder import open_static_session

DEMO = Path(__file__).parents[3] / "quantkit" / "assets" / "demo"
needs_qnn = pytest.mark.skipif(
    not plugin_devices(PROVIDERS["qnn"]), reason=f"no QNN plugin: {PROVIDERS['qnn'].install}"
)
TARGET = Target(opset=21, ir_version=10, domains=(), description="static graphs of standard operators")
STATIC = [name for name in HEADS if name != "deberta_v2"]  # refused, below
CLASSES = {name: HEADS[name].classes[0] for name in STATIC}
TASKS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
CASES = [pytest.param(CLASSES[name] + task, FAMILIES[name].tiny) for name in STATIC for task in TASKS]
CASES += [
    pytest.param("AlbertModel", {**FAMILIES["albert"].tiny, **FAMILIES["albert"].variants[0]}, id="groups"),
    pytest.param("BertForMaskedLM", {**FAMILIES["bert"].tiny, "hidden_act": "relu"}, id="relu"),
    pytest.param("BertForMaskedLM", {**FAMILIES["bert"].tiny, "tie_word_embeddings": False}, id="untied"),
    pytest.param("RobertaModel", {**FAMILIES["roberta"].tiny, "type_vocab_size": 1}, id="one-type"),
    pytest.param("ElectraModel", {**FAMILIES["electra"].tiny, "embedding_size": 32}, id="as-wide"),
    pytest.param(
        "ModernBertForMaskedLM",
        {**FAMILIES["modernbert"].tiny, **FAMILIES["modernbert"].variants[0]},
        id="biased",
    ),
    pytest.param("ModernBertModel", {**FAMILIES["modernbert"].tiny, "local_attention": 60}, id="wide-window"),
]
EACH_TASK = (
    "BertModel",
    "RobertaForMaskedLM",
    "DistilBertForSequenceClassification",
    "AlbertForQuestionAnswering",
    "BertForTokenClassification",
    "MPNetModel",
    "ElectraForSequenceClassification",
    "ModernBertForMaskedLM",
)
PADDING_ID, LENGTH, COUNT, SHOWN = 1, 24, 20, 13
WIDTHS = [Bits(), Bits(products=8), Bits(values=8, products=8)]
WIDTH_NAMES = ["16", "16-8", "8"]


def texts(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch in which every second text is shorter."""
    generator = np.random.default_rng(seed)
    feeds = {
        "input_ids": generator.integers(3, 60, (count, COUNT)),
        "attention_mask": np.ones((count, COUNT), np.int64),
        "token_type_ids": generator.integers(0, 2, (count, COUNT)),
    }
    feeds["input_ids"][1::2, SHOWN:] = PADDING_ID
    feeds["attention_mask"][1::2, SHOWN:] = 0
    return feeds


CALIBRATION = texts(12)
FEEDS = {name: values[:4] for name, values in CALIBRATION.items()}  # what lies outside of a range is cut off


def emit(model, folder, *, tokens=LENGTH, **options):
    made = quantize(model, folder, **{"min_dim": NOTHING, **options})
    graph = emit_static_encoder(
        made.map, made.contents, made.checkpoint, tokens=tokens, target=TARGET, metadata={"kind": "encoder"}
    )
    onnx.load_external_data_for_model(graph, str(folder))
    return graph


def opened(model, path, provider="cpu"):
    save(model, path)
    return encoder_of(open_static_session(path, provider=provider, threads=1))


def windows(model, batch, length=LENGTH):
    names = [each.name for each in model.graph.input]
    filled = {
        name: np.pad(values, ((0, 0), (0, length - values.shape[1]))).astype(np.int32)
        for name, values in batch.items()
    }
    return [{name: filled[name][row : row + 1] for name in names} for row in range(len(batch["input_ids"]))]


def ranges_of(model, batch, length=LENGTH):
    opened, names = showing_ranges(model)
    return observe_ranges(opened.SerializeToString(), names, windows(model, batch, length), threads=1)


def run(encoder, feeds=FEEDS):
    return encode(encoder, feeds["input_ids"], feeds["attention_mask"], token_types=feeds["token_type_ids"])


def shown(values, feeds=FEEDS):
    """What belongs to a token of a text; behind it anything may stand."""
    if values.shape[:2] == feeds["input_ids"].shape:
        return values[feeds["attention_mask"] == 1]
    return values


def original(model, feeds=FEEDS):
    is_told = getattr(model.config, "type_vocab_size", 1) > 1
    inputs = {key: torch.tensor(value) for key, value in feeds.items() if key != "token_type_ids" or is_told}
    with torch.inference_mode():
        return {key: value.numpy() for key, value in model(**inputs).items()}


@pytest.mark.parametrize(("class_name", "sizes"), CASES)
def test_the_float_graph_is_the_model(class_name, sizes, tmp_path):
    model = build_tiny(class_name, sizes)
    graph = emit(model, tmp_path)
    onnx.checker.check_model(graph, full_check=True)
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    made, wanted = run(opened(graph, tmp_path / "model.onnx")), original(model)
    assert set(made) == set(wanted)
    for name, values in made.items():
        found = error(shown(values), shown(wanted[name]))
        assert found.relative < 1e-5
        assert found.absolute < 1e-4


def rounded(values, low, high, bits):
    """The nearest of 2^bits evenly spaced numbers that reach from low to high, zero being one of them."""
    low, high, steps = min(low, 0.0), max(high, 0.0), 2**bits - 1
    step = max((high - low) / steps, 1e-30)  # zeros alone have no range
    zero = np.round(-low / step)
    return (np.clip(np.round(values / step) + zero, 0, steps) - zero) * step


OPERATORS = {
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "MatMul": lambda a, b: a @ b,
    "Gemm": lambda a, b, c: a @ b + c,
    "Reshape": lambda a, sizes: a.reshape(sizes),
    "Transpose": lambda a, perm: a.transpose(perm),
    "Gather": lambda a, rows, axis: a.take(rows, axis),
    "Concat": lambda *parts, axis: np.concatenate(parts, axis),
    "Tanh": np.tanh,
    "Relu": lambda a: np.maximum(a, 0),
    "Gelu": lambda a, approximate=b"none": torch.nn.functional.gelu(
        torch.from_numpy(a), approximate=approximate.decode()
    ).numpy(),
    "Softmax": lambda a, axis: torch.softmax(torch.from_numpy(a), axis).numpy(),
    "LayerNormalization": lambda a, gain, bias=0, *, axis, epsilon: (
        (a - a.mean(axis, keepdims=True)) / np.sqrt(a.var(axis, keepdims=True) + epsilon) * gain + bias
    ),
}


def split(a, *sizes, axis, num_outputs=None):
    return np.split(a, num_outputs or np.cumsum(*sizes)[:-1], axis)


def by_formula(model, ranges, bits, feeds):
    """The outputs when every value is rounded where it is made, in float64."""
    found = {name: value.astype(np.int64) for name, value in feeds.items()}
    constants = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    masked = {node.input[0] for node in model.graph.node if node.op_type == "Softmax"}
    scores = {name: node.input[0] for node in model.graph.node for name in node.output if name in masked}
    # Scores more than 16 below the least peak weigh nothing, and hidden ones lie another 16 below these.
    floors = {name: max(ranges[scores[name]][0], ranges[name][2] - 16) for name in masked}
    lows = {scores[name]: floor for name, floor in floors.items()}
    lows |= {name: floor - 16 for name, floor in floors.items()}
    highs = {read: ranges[name][1] for name in masked for read in (name, scores[name])}
    for node in model.graph.node:
        inputs = [found[name] if name in found else constants[name] for name in node.input]
        for place, name in enumerate(node.input):
            if name not in constants or inputs[place].dtype != np.float32:
                continue
            if node.op_type in ("Gemm", "MatMul") and place == 1:
                scale = np.maximum(np.abs(inputs[place]).max(axis=0) / 127, 1e-30)
                inputs[place] = np.round(inputs[place] / scale) * scale
            elif (
                node.op_type != "Gemm" and inputs[place].min() > -1e4
            ):  # a bias has 32 bits, a mask two values
                values = inputs[place].astype(np.float64)
                inputs[place] = rounded(values, values.min(), values.max(), bits)
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type == "Split":
            outputs = split(*inputs, **attributes)
        else:
            outputs = [OPERATORS[node.op_type](*inputs, **attributes)]
        for name, value in zip(node.output, outputs, strict=True):
            low, high = lows.get(name, ranges[name][0]), highs.get(name, ranges[name][1])
            if node.op_type == "Softmax":
                low, high = 0, 1
            elif node.op_type == "Tanh":
                low, high = -1, 1
            is_moved = node.op_type in ("Reshape", "Transpose", "Split", "Concat", "Gather")
            found[name] = value if is_moved else rounded(value, low, high, bits)
    return {each.name: found[each.name] for each in model.graph.output}


@pytest.mark.once
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("class_name", EACH_TASK)
def test_the_integer_graph_is_its_formulas(class_name, bits, tmp_path):
    family = next(name for name, prefix in CLASSES.items() if class_name.startswith(prefix))
    graph = emit(build_tiny(class_name, FAMILIES[family].tiny), tmp_path)
    ranges = ranges_of(graph, CALIBRATION)
    integers = quantize_static(graph, ranges, Bits(values=bits, products=bits))
    onnx.checker.check_model(integers, full_check=True)
    session = opened(integers, tmp_path / "integers.onnx").session
    names = [each.name for each in session.get_outputs()]
    for feeds in windows(graph, FEEDS)[:2]:
        wanted = by_formula(graph, ranges, bits, feeds)
        for name, made in zip(names, session.run(names, feeds), strict=True):
            # Sums in another order may round to the neighbouring code, and later layers carry that on.
            found = error(made, wanted[name])
            assert found.relative < (0.002 if bits == 16 else 0.06)
            assert found.absolute < (0.01 if bits == 16 else 0.2)


@pytest.mark.parametrize("bits", WIDTHS, ids=WIDTH_NAMES)
@pytest.mark.parametrize("name", STATIC)
def test_integers_stay_near_the_floats(name, bits, tmp_path):
    graph = emit(build_tiny(CLASSES[name] + "ForMaskedLM", FAMILIES[name].tiny), tmp_path)
    ranges = ranges_of(graph, CALIBRATION)
    floats = opened(graph, tmp_path / "floats.onnx")
    integers = opened(quantize_static(graph, ranges, bits), tmp_path / "integers.onnx")
    made, wanted = (shown(run(each)["logits"]) for each in (integers, floats))
    assert 0 < error(made, wanted).relative < (0.03 if bits.products == 16 else 0.15)


@pytest.mark.once
def test_a_layer_that_is_called_again_is_stored_once(tmp_path):
    graph = emit(build_tiny("AlbertModel", FAMILIES["albert"].tiny), tmp_path)
    integers = quantize_static(graph, ranges_of(graph, CALIBRATION), Bits())
    calls = FAMILIES["albert"].tiny["num_hidden_layers"]
    products = [node for node in integers.graph.node if node.op_type == "Gemm" and ".ffn#" in f"{node.name}#"]
    assert len(products) == calls
    assert len({node.input[1] for node in products}) == 1  # one weight,
    assert len({node.input[2] for node in products}) == calls  # and a bias on the grid of each input


@pytest.mark.once
def test_stored_codes_are_handed_over_as_they_are(tmp_path):
    model = build_tiny("BertForMaskedLM", FAMILIES["bert"].tiny)
    graph = emit(model, tmp_path, min_dim=1, scheme="int8_channel")
    integers = quantize_static(graph, ranges_of(graph, CALIBRATION), Bits())
    before, after = (
        {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        for model in (graph, integers)
    )
    names = [name for name in before if name.endswith(".codes_IO")]
    assert len(names) == 2 * 4 + 1  # of two blocks, and what comes before the vocabulary
    for name in names:
        np.testing.assert_array_equal(after[name], before[name])


@pytest.mark.once
def test_texts_of_any_length_up_to_the_graphs(tmp_path):
    graph = emit(build_tiny("RobertaModel", FAMILIES["roberta"].tiny), tmp_path)
    encoder = opened(graph, tmp_path / "model.onnx")
    alone = encode(encoder, FEEDS["input_ids"][1:2, :SHOWN])["last_hidden_state"]
    padded = encode(encoder, FEEDS["input_ids"][1:2], FEEDS["attention_mask"][1:2])["last_hidden_state"]
    assert alone.shape[1] == SHOWN
    assert error(padded[:, :SHOWN], alone).relative < 1e-6
    with pytest.raises(InputError, match="1 to 24 tokens"):
        encode(encoder, np.ones((1, LENGTH + 1), np.int64))
    with pytest.raises(InputError, match="begin at the first place"):
        encode(encoder, FEEDS["input_ids"][1:2], FEEDS["attention_mask"][1:2, ::-1])


@pytest.mark.once
def test_what_has_no_static_graph_is_named(tmp_path):
    model = build_tiny("RobertaModel", FAMILIES["roberta"].tiny)
    model_map = map_module(model, name="tiny")
    limit = FAMILIES["roberta"].tiny["max_position_embeddings"] - 2  # a row of padding, and one before it
    assert why_not_static_encoder(model_map, limit) is None
    assert f"{limit} positions" in why_not_static_encoder(model_map, limit + 1)
    means = {**FAMILIES["modernbert"].tiny, "classifier_pooling": "mean"}
    tokens = map_module(build_tiny("ModernBertForTokenClassification", means), name="tiny")
    classifier = map_module(build_tiny("ModernBertForSequenceClassification", means), name="tiny")
    assert why_not_static_encoder(tokens, LENGTH) is None
    assert "mean of a text (classifier_pooling)" in why_not_static_encoder(classifier, LENGTH)
    detector = map_module(build_tiny("ElectraForPreTraining", FAMILIES["electra"].tiny), name="tiny")
    assert "one number a token" in why_not_static_encoder(detector, LENGTH)
    decoder = map_module(build_tiny("GPT2LMHeadModel", FAMILIES["gpt2"].tiny), name="gpt2")
    assert "no plain encoder" in why_not_static_encoder(decoder, LENGTH)
    disentangled = map_module(
        build_tiny("DebertaV2Model", dict(FAMILIES["deberta_v2"].tiny)), name="disentangled"
    )
    assert "no operator of fixed shape" in why_not_static_encoder(disentangled, LENGTH)
    with pytest.raises(InputError, match="no static graph"):
        emit(model, tmp_path, tokens=limit + 1)


@pytest.mark.parametrize("class_name", ["BertModel", "AlbertForMaskedLM"])
def test_the_whole_pipeline(class_name, tmp_path):
    """Quantized, written, held against its target, and measured beside transformers."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128, "max_position_embeddings": 40}
    build_tiny(class_name, sizes).save_pretrained(tmp_path / "model")
    shutil.copyfile(DEMO / "tokenizer.json", tmp_path / "model" / "tokenizer.json")
    wanted = {"model": str(tmp_path / "model"), "target": "npu", "static.prompt": LENGTH, "fit": "rtn"}
    wanted |= {"select.min_dim": 1, "measure.latency": False, "measure.memory": False}
    recipe = override(Recipe(), {**wanted, "measure.max_tokens": 480, "calibration.windows": 16})
    report = quantize_whole(recipe=recipe, output=tmp_path / "out").report
    assert report.scheme == "int8_static16"
    assert report.similarity is not None
    assert report.similarity.window == LENGTH
    assert 0.9995 < report.similarity.lowest_cosine <= 1
    assert 0 < report.similarity.relative_rms_error < 0.02
    assert report.similarity.max_relative_error < 0.05
    (graph,) = (tmp_path / "out").glob("*.onnx")
    for value in onnx.load(graph, load_external_data=False).graph.input:
        assert [size.dim_value for size in value.type.tensor_type.shape.dim] == [1, LENGTH]
    with pytest.raises(InputError, match="quantkit package"):
        next(generate(open_session(tmp_path / "out"), [[1]], max_new_tokens=1))
    with pytest.raises(InputError, match="keeps no cache"):
        quantize_whole(recipe=override(recipe, {"static.cache": 30}), output=tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "class_name", ["BertModel", "BertForQuestionAnswering", "BertForSequenceClassification"]
)
def test_outputs_that_providers_are_compared_by(class_name, tmp_path):
    """One answer a text, or one number a token: either way what transformers gives, text by text."""
    model = build_tiny(class_name, FAMILIES["bert"].tiny)
    session = opened(emit(model, tmp_path), tmp_path / "model.onnx").session
    ids = FEEDS["input_ids"][::2]
    np.save(tmp_path / "ids.npy", ids)
    options = Namespace(ids=tmp_path / "ids.npy", logits=tmp_path / "logits.npy", patience=60.0)
    trial = Trial(options=options, provider=PROVIDERS["cpu"], results={}, sessions={tmp_path: session})
    write_logits(trial)
    with torch.inference_mode():
        wanted = next(iter(model(input_ids=torch.from_numpy(ids)).values())).numpy()
    wanted = wanted if wanted.ndim == 3 else wanted[:, None]
    assert error(np.load(options.logits), wanted).relative < 1e-5
    assert trial.results["positions"] == list(range(wanted.shape[1]))


@pytest.mark.once
def test_calibration_shows_an_encoder_what_it_will_meet():
    windows = np.arange(100, 100 + 4 * 8).reshape(4, 8)
    texts = encoder_texts(windows, 10, [1, 2])
    assert {values.shape for text in texts for values in text.values()} == {(1, 10)}
    counts = [int(text["attention_mask"].sum()) for text in texts]
    assert max(counts) == 8 > min(counts) > 1
    ends = [
        (int(text["input_ids"][0, 0]), int(text["input_ids"][0, count - 1]))
        for text, count in zip(texts, counts, strict=True)
    ]
    assert ends[0] == (100, 107)  # one of them bare,
    assert ends[1:] == [(1, 2)] * 3  # the others between the tokens that frame a text,
    assert sum(bool(text["token_type_ids"].any()) for text in texts) == 1  # and one a pair
    for text, count in zip(texts, counts, strict=True):
        assert not any(values[0, count:].any() for values in text.values())


def cosine(made, wanted):
    made, wanted = made.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    return made @ wanted / np.linalg.norm(made) / np.linalg.norm(wanted)


@pytest.mark.qnn
@needs_qnn
@pytest.mark.parametrize("bits", WIDTHS, ids=WIDTH_NAMES)
@pytest.mark.parametrize("class_name", EACH_TASK)
def test_every_family_compiles_whole_and_stays_near_the_floats(class_name, bits, tmp_path):
    """No node is left to the CPU, or the session would not open."""
    family = next(name for name, prefix in CLASSES.items() if class_name.startswith(prefix))
    graph = emit(build_tiny(class_name, FAMILIES[family].tiny), tmp_path)
    floats = opened(graph, tmp_path / "floats.onnx")
    integers = quantize_static(graph, ranges_of(graph, CALIBRATION), bits)
    npu = opened(integers, tmp_path / "integers.onnx", "qnn")
    made, wanted = run(npu), run(floats)
    for name in wanted:
        found, bar = shown(made[name]), 0.999 if bits.products == 16 else 0.998
        assert cosine(found, shown(wanted[name])) > bar
        assert error(found, shown(wanted[name])).relative < (0.03 if bits.products == 16 else 0.1)


@pytest.mark.qnn
@pytest.mark.slow
@needs_qnn
def test_a_base_size_encoder(tmp_path, record_property):
    """110 million random weights, 32 tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_act": "gelu", "vocab_size": 30522}
    model = build_tiny("BertModel", sizes, spread=0.0)
    graph = emit(model, tmp_path, tokens=32)
    generator = np.random.default_rng(0)
    batch = {"input_ids": generator.integers(0, 30522, (6, 32)), "attention_mask": np.ones((6, 32), np.int64)}
    batch["token_type_ids"] = np.zeros_like(batch["input_ids"])
    integers = quantize_static(graph, ranges_of(graph, batch, 32), Bits())
    npu = opened(integers, tmp_path / "integers.onnx", "qnn")
    feeds = {name: values[:1] for name, values in batch.items()}
    made, wanted = run(npu, feeds), original(model, feeds)
    for name in wanted:
        assert cosine(made[name], wanted[name]) > 0.999
        found = error(made[name], wanted[name])
        record_property(name, (found.absolute, found.relative))
        assert found.relative < 0.05
