"""Models that are not emitted directly, traced by optimum, lowered, and run for real.

The oracle is the checkpoint read back into transformers' modules, with inputs rounded as the operators
round them; where optimum does not work beside this transformers, the reason is said.
"""

from __future__ import annotations

import copy
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from checkpoints import TRANSPOSED, quantize
from exporting import build_tiny, error
from fake_quantize import fake_quantize

from quantkit.errors import InputError
from quantkit.export.check import check_models
from quantkit.export.decoder import why_not
from quantkit.export.encoder import why_not_encoder
from quantkit.export.graph import save
from quantkit.export.traced import trace as tracing
from quantkit.export.traced.lower import integer_projections, lower
from quantkit.export.traced.trace import trace, why_not_trace
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.runtime.cpu_session import open_on_cpu

REASON = why_not_trace()
needs_optimum = pytest.mark.skipif(
    bool(REASON), reason=f"optimum-onnx does not run beside transformers {transformers.__version__}: {REASON}"
)
GENERATOR = np.random.default_rng(0)
IDS = GENERATOR.integers(2, 60, (2, 9))
MASK = np.ones_like(IDS)
MASK[1, 6:] = 0
STEPS = 6
# Neither has a row in the families table: one looks back a few tokens, one fuses query, key and value.
UNKNOWN = {
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 40,
        },
    ),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 40},
    ),
}
DECODERS = {
    "bloom": ("BloomForCausalLM", dict(FAMILIES["bloom"].tiny)),
    **UNKNOWN,
}


def trace_to(model, folder):
    """The float files of one model."""
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder / "model")
    return trace(
        folder / "model",
        folder / "float",
        model_type=model.config.model_type,
        architecture=type(model).__name__,
    )


def export(model, paths, folder, **options):
    """(lowered files, quantized) of one model."""
    quantized = quantize(model, folder, packs_attention=False, **options)
    files = lower(
        {path.name: onnx.load(path) for path in paths},
        quantized.contents,
        quantized.checkpoint,
        quantized.source,
        transposed=TRANSPOSED,
        **quantized.options(outside=True),
    )
    for name, made in files.items():
        save(made, folder / name)
    return files, quantized


def open_session(path):
    return open_on_cpu(str(path), onnxruntime.SessionOptions())


def run(session, feeds):
    wanted = {entry.name: feeds[entry.name] for entry in session.get_inputs()}
    return dict(zip([entry.name for entry in session.get_outputs()], session.run(None, wanted), strict=True))


@pytest.fixture(scope="module", params=[0, 1], ids=["tied", "gated"])
def t5(request, tmp_path_factory):
    row = FAMILIES["t5"]
    model = build_tiny(row.tiny_class, {**row.tiny, **({}, *row.variants)[request.param]})
    folder = tmp_path_factory.mktemp("t5")
    return (model, folder, *export(model, trace_to(model, folder), folder / "out"))


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request, tmp_path_factory):
    """(model, its traced files)"""
    class_name, sizes = DECODERS[request.param]
    model = build_tiny(class_name, sizes)
    return model, trace_to(model, tmp_path_factory.mktemp(request.param))


def greedy(encoder, first, later, num_steps=STEPS):
    """(tokens, logits) by the three files, as clients of such exports call them."""
    feeds = {"input_ids": IDS, "attention_mask": MASK, "encoder_attention_mask": MASK}
    feeds["encoder_hidden_states"] = run(encoder, feeds)["last_hidden_state"]
    tokens, all_logits, past = np.zeros((2, 1), np.int64), [], {}
    for step in range(num_steps):
        made = run(later if step else first, {**feeds, **past, "input_ids": tokens[:, -1:]})
        past |= {
            name.replace("present", "past_key_values"): value
            for name, value in made.items()
            if name != "logits"
        }
        all_logits.append(made["logits"][:, -1])
        tokens = np.concatenate([tokens, all_logits[-1].argmax(-1)[:, None]], axis=1)
    return tokens, np.stack(all_logits, axis=1)


def sessions(folder):
    names = ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx")
    return [open_session(folder / name) for name in names]


def forced(model, tokens):
    """Logits of transformers for these decoder tokens."""
    with torch.inference_mode():
        return model(
            input_ids=torch.tensor(IDS),
            attention_mask=torch.tensor(MASK),
            decoder_input_ids=torch.tensor(tokens),
        ).logits.numpy()


@needs_optimum
def test_encoder_and_decoders_of_t5_are_the_checkpoint(t5):
    model, folder, files, quantized = t5
    assert set(files) == {"encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"}
    tokens, made = greedy(*sessions(folder / "out"))
    fake = forced(fake_quantize(copy.deepcopy(model), quantized.checkpoint), tokens[:, :-1])
    assert error(made, fake).relative < 3e-2
    assert min(error(*rows).relative for rows in zip(made, fake, strict=True)) < 1e-4
    original = forced(model, tokens[:, :-1])
    assert 1e-4 < error(made, original).relative < 0.1


@needs_optimum
def test_the_float_files_of_t5_are_the_model(t5):
    model, folder, *_ = t5
    tokens, made = greedy(*sessions(folder / "float"))
    assert error(made, forced(model, tokens[:, :-1])).relative < 1e-4


@needs_optimum
def test_the_files_of_t5_share_one_checkpoint(t5):
    *_, files, quantized = t5
    done = {name: integer_projections(made) for name, made in files.items()}
    planned = {layer.name for layer in quantized.map.layers}
    assert set().union(*done.values()) == planned
    assert done["encoder_model.onnx"] == {name for name in planned if name.startswith("encoder")}
    # With a cache, keys and values of the encoder are not computed again.
    cached = {name for name in planned if name.endswith(("EncDecAttention.k", "EncDecAttention.v"))}
    assert done["decoder_with_past_model.onnx"] == done["decoder_model.onnx"] - cached
    for made in files.values():
        outside = {
            entry.value
            for tensor in made.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        assert outside == {quantized.checkpoint.path.name}
        assert max((len(t.raw_data) for t in made.graph.initializer), default=0) < 1024


@needs_optimum
@pytest.mark.parametrize("name", ["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"])
def test_a_projection_is_done_when_every_file_that_computes_it_has_integers(t5, name, tmp_path):
    model, folder, *_ = t5
    files = {path.name: onnx.load(path) for path in (folder / "float").glob("*.onnx")}
    quantized = quantize(model, tmp_path, packs_attention=False)
    options = {"transposed": TRANSPOSED, **quantized.options(outside=True)}

    def checked():
        lowered = lower(files, quantized.contents, quantized.checkpoint, quantized.source, **options)
        for file, graph in lowered.items():
            save(graph, tmp_path / file)
        return check_models([tmp_path / file for file in lowered], quantized.plan)

    assert len(checked().projections) == quantized.plan.projections.total
    stack = name.partition("_")[0]
    projection = f"{stack}.block.0.layer.0.SelfAttention.o"
    graph = files[name].graph
    end = projection.removeprefix("encoder." if stack == "encoder" else "").replace(".", "/")
    node = next(n for n in graph.node if n.name.replace(".", "/").endswith(f"/{end}/MatMul"))
    weight = next(tensor for tensor in graph.initializer if tensor.name == node.input[1])
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(values * 1.001, weight.name))
    with pytest.raises(InputError, match=f"not (integer|found) in the .*: {projection}"):
        checked()


@needs_optimum
def test_optimum_generates_from_the_lowered_t5(t5):
    from optimum.onnxruntime import ORTModelForSeq2SeqLM

    model, folder, *_ = t5
    model.config.save_pretrained(folder / "out")
    client = ORTModelForSeq2SeqLM.from_pretrained(folder / "out")
    made = client.generate(
        input_ids=torch.tensor(IDS),
        attention_mask=torch.tensor(MASK),
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    assert made.tolist() == greedy(*sessions(folder / "out"))[0].tolist()


@needs_optimum
@pytest.mark.parametrize("scheme", ["int8_block32", "int8_channel"])
def test_a_decoder_without_a_fused_graph_is_the_checkpoint(decoder, scheme, tmp_path):
    model, paths = decoder
    model_map = map_module(model, name="tiny")
    assert why_not(model_map) and why_not_encoder(model_map)
    files, quantized = export(model, paths, tmp_path, scheme=scheme)
    assert integer_projections(files["model.onnx"]) == {layer.name for layer in model_map.layers}
    session = open_session(tmp_path / "model.onnx")
    positions = np.arange(IDS.shape[1])[None].repeat(2, 0)

    def feeds(start, end, past):
        named = {
            "input_ids": IDS[:, start:end],
            "attention_mask": np.ones((2, end), np.int64),
            "position_ids": positions[:, start:end],
        }
        return {**named, **past}

    empty = {}
    for entry in session.get_inputs():
        if entry.name.startswith("past"):
            shape = [size if isinstance(size, int) else 0 for size in entry.shape]
            empty[entry.name] = np.zeros([2, *shape[1:]], np.float32)
    prompt = run(session, feeds(0, 6, empty))
    past = {n.replace("present", "past_key_values"): v for n, v in prompt.items() if n != "logits"}
    later = run(session, feeds(6, 9, past))["logits"]
    made = np.concatenate([prompt["logits"], later], axis=1)

    def logits(module):
        with torch.inference_mode():
            return module(input_ids=torch.tensor(IDS), use_cache=False).logits.numpy()

    fake, original = logits(fake_quantize(copy.deepcopy(model), quantized.checkpoint)), logits(model)
    if "block" in scheme:  # one scale for a tensor depends on what else is in it, so on how the text is cut
        assert error(made, fake).relative < 3e-2
        assert min(error(*rows).relative for rows in zip(made, fake, strict=True)) < 1e-4
    assert 1e-4 < error(made, original).relative < 0.1


@needs_optimum
def test_a_partly_planned_fused_matrix_is_cut(tmp_path):
    """Query, key and value of BLOOM alternate head by head in one matrix; any of them may be excluded."""
    model = build_tiny("BloomForCausalLM", dict(FAMILIES["bloom"].tiny))
    paths = trace_to(model, tmp_path)
    files, quantized = export(model, paths, tmp_path / "out", exclude=("*h.0*key_value[[]key]",))
    planned = {layer.name for layer in quantized.plan.layers if layer.quantized}
    assert len(planned) == len(quantized.map.layers) - 1
    assert integer_projections(files["model.onnx"]) == planned


@needs_optimum
def test_tracing_says_nothing(tmp_path, capfd, recwarn):
    model = build_tiny("BloomForCausalLM", dict(FAMILIES["bloom"].tiny))
    model.save_pretrained(tmp_path / "model")
    capfd.readouterr()
    recwarn.clear()
    trace(tmp_path / "model", tmp_path / "out", model_type="bloom", architecture="BloomForCausalLM")
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert (tmp_path / "out" / "model.onnx").exists()


@needs_optimum
def test_optimum_asks_nobody_for_a_tokenizer(tmp_path, monkeypatch):
    """It looks where the config says that the model came from, which may be a name on the Hub."""
    folders = []
    search = "optimum.exporters.onnx.convert.maybe_save_preprocessors"
    monkeypatch.setattr(search, lambda source, folder: folders.append(source))
    model = build_tiny("BloomForCausalLM", dict(FAMILIES["bloom"].tiny))
    model.config._name_or_path = "someone/bloom"
    trace_to(model, tmp_path)
    assert folders == [str(tmp_path / "float")]


@needs_optimum
def test_what_optimum_cannot_trace_is_refused(tmp_path):
    with pytest.raises(InputError, match="optimum cannot trace NoSuchModel of model type 'no_such'"):
        trace(tmp_path, tmp_path, model_type="no_such", architecture="NoSuchModel")
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    grouped = {"new_decoder_architecture": True, "num_kv_heads": 2}  # optimum gives its caches other shapes
    with pytest.raises(InputError, match="the tracing exporter failed"):
        trace_to(build_tiny("FalconForCausalLM", {**sizes, **grouped}), tmp_path)


def test_without_optimum_the_way_to_get_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optimum.exporters.onnx.model_configs", None)
    monkeypatch.setitem(sys.modules, "optimum.exporters.onnx", None)
    with pytest.raises(InputError) as caught:
        tracing.trace(tmp_path, tmp_path, model_type="bloom", architecture="BloomForCausalLM")
    assert "pip install 'quantkit-onnx[trace]'" in str(caught.value)
    assert "\n" not in str(caught.value)


@needs_optimum
def test_a_model_that_rounds_to_half_precision_within_is_refused(tmp_path):
    """Falcon's ALiBi is a product in bfloat16; the exporter makes it one in float32, far off at place 300."""
    sizes = {
        **FAMILIES["falcon"].tiny,
        "alibi": True,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    }
    build_tiny("FalconForCausalLM", sizes).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="rounds to bfloat16"):
        trace(tmp_path / "model", tmp_path / "out", model_type="falcon", architecture="FalconForCausalLM")
    assert not list(tmp_path.glob("out/*"))
