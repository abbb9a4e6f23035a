"""Hidden places have no weight in static graphs, however far their scores lie above the visible ones.

The queries of a model are scaled until a hidden score lies above all visible ones of its row by a given
distance. The oracle is transformers; and what a hidden token is must not matter at all.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from checkpoints import quantize
from exporting import NOTHING, build_tiny, error
from static_graphs import TARGET, emit_both, round_both

from quantkit.export.static.encoder import emit_static_encoder
from quantkit.export.static.qdq import Bits, quantize_static
from quantkit.export.static.ranges import showing_ranges, showing_values
from quantkit.model.families import FAMILIES
from quantkit.runtime.encoder import encode, encoder_of
from quantkit.runtime.ranges import observe_ranges
from quantkit.runtime.static_decoder import StaticRow, join, open_raw, open_static_session, run_prompt

pytestmark = pytest.mark.once
DECODERS = ("gpt2", "opt", "llama", "mistral", "qwen3", "gemma3")
ENCODERS = ("BertModel", "RobertaModel", "MPNetModel", "DistilBertModel", "AlbertModel")
SPREADS = (5, 20, 50, 100)
WIDTHS = {"16": Bits(), "16-8": Bits(products=8), "8": Bits(values=8, products=8)}
TOKENS, PAST, VISIBLE = 12, 20, 8
IDS = np.random.default_rng(1).integers(3, 60, (12, TOKENS))
ONES = np.ones((1, TOKENS), np.int32)
SHORT = (np.arange(TOKENS) < VISIBLE).astype(np.int32)[None]  # the mask of a text with padding
LATER = np.triu(np.ones((TOKENS, TOKENS), bool), 1)


def scale_queries(model, factor):
    for name, module in model.named_modules():
        place = name.rpartition(".")[2]
        if place == "c_attn":
            for parameter in (module.weight, module.bias):
                parameter.data[..., : model.config.n_embd] *= factor
        elif place == "q_norm":
            offset = 1.0 if model.config.model_type.startswith("gemma") else 0.0
            module.weight.data = (module.weight.data + offset) * factor - offset
        elif place in ("q_proj", "q_lin", "query", "q"):
            for parameter in module.parameters():
                parameter.data *= factor


def lead_of(graph, feeds, is_hidden) -> float:
    """How far a hidden score of the first block lies above all visible ones of its row, at most."""
    shown, names = showing_values(graph)
    name = next(name for name in names if "/scores/" in name)
    session = onnxruntime.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    scores = np.concatenate([session.run([name], feed)[0].reshape(-1, TOKENS, TOKENS) for feed in feeds])
    hidden = np.where(is_hidden, scores, -np.inf).max(-1)
    return float((hidden - np.where(is_hidden, -np.inf, scores).max(-1)).max())


def tiny(name, factor=1.0):
    window = {"sliding_window": 64} if "sliding_window" in FAMILIES[name].tiny else {}
    model = build_tiny(FAMILIES[name].tiny_class, {**FAMILIES[name].tiny, **window})
    scale_queries(model, factor)
    return model


@pytest.fixture(scope="module")
def leads(tmp_path_factory):
    """Leads of hidden scores in models whose queries are not scaled."""
    return {}, tmp_path_factory.mktemp("unscaled")


def decoder_graphs(model, folder):
    model.save_pretrained(folder / "model")
    return emit_both(folder / "model", folder / "out", prompt=TOKENS, past=PAST)


def decoder_lead(name, leads):
    known, folder = leads
    if name not in known:
        feeds = [{"input_ids": row[None].astype(np.int32), "attention_mask": ONES} for row in IDS]
        known[name] = lead_of(decoder_graphs(tiny(name), folder / name).whole, feeds, LATER)
    return known[name]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", DECODERS)
def test_no_token_reads_a_later_one(name, spread, leads, tmp_path):
    model = tiny(name, spread / decoder_lead(name, leads))
    graphs = decoder_graphs(model, tmp_path)
    changed = np.concatenate([IDS[0, :VISIBLE], IDS[1, VISIBLE:]])
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(IDS[:1])).logits[0].numpy()
    rounded = {label: round_both(graphs, IDS, bits) for label, bits in WIDTHS.items()}
    for label, pair in {"float": graphs, **rounded}.items():
        paths = pair.save(label)
        decoder = join(*(open_static_session(paths[kind], threads=1) for kind in ("prompt", "decode")))
        logits, other = (run_prompt(decoder.prompt, ids)[0] for ids in (IDS[0], changed))
        np.testing.assert_array_equal(logits[:VISIBLE], other[:VISIBLE], err_msg=label)
        if label == "float":
            assert error(logits, wanted).relative < 1e-5
        steps = []
        for filling in (0, 1):  # of places in the cache that hold no token
            row = StaticRow(decoder=decoder, prompt=IDS[0, :VISIBLE])
            row.read()
            for cache in row.caches.values():
                noise = np.random.default_rng(filling).integers(0, 100, cache[:, :, VISIBLE:].shape)
                cache[:, :, VISIBLE:] = noise
            steps.append(row.step(int(IDS[0, VISIBLE])))
        np.testing.assert_array_equal(*steps, err_msg=label)
        if label == "float":
            assert error(steps[0], wanted[VISIBLE : VISIBLE + 1]).relative < 1e-5


def encoder_graph(model, folder):
    folder.mkdir(exist_ok=True)
    made = quantize(model, folder, min_dim=NOTHING)
    graph = emit_static_encoder(
        made.map, made.contents, made.checkpoint, tokens=TOKENS, target=TARGET, metadata={}
    )
    names = {graph_input.name for graph_input in graph.graph.input}

    def feeds(mask):
        rows = [{"input_ids": ids[None], "attention_mask": mask, "token_type_ids": 0 * ONES} for ids in IDS]
        return [
            {name: values.astype(np.int32) for name, values in row.items() if name in names} for row in rows
        ]

    return graph, feeds


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("class_name", ENCODERS)
def test_no_token_reads_padding(class_name, spread, leads, tmp_path):
    family = class_name.removesuffix("Model").lower()
    known, folder = leads
    if class_name not in known:
        graph, feeds = encoder_graph(build_tiny(class_name, FAMILIES[family].tiny), folder / class_name)
        known[class_name] = lead_of(graph, feeds(SHORT), SHORT[0] == 0)
    model = build_tiny(class_name, FAMILIES[family].tiny)
    scale_queries(model, spread / known[class_name])
    graph, feeds = encoder_graph(model, tmp_path)
    ids, mask = IDS[:2].copy(), SHORT.repeat(2, axis=0).astype(np.int64)
    ids[1, :VISIBLE] = ids[0, :VISIBLE]
    with torch.inference_mode():
        wanted = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))[0].numpy()
    opened, names = showing_ranges(graph)
    ranges = observe_ranges(opened.SerializeToString(), names, feeds(ONES) + feeds(SHORT), threads=1)
    rounded = {label: quantize_static(graph, ranges, bits) for label, bits in WIDTHS.items()}
    for label, each in {"float": graph, **rounded}.items():
        encoder = encoder_of(open_raw(each.SerializeToString(), tmp_path, threads=1))
        found = encode(encoder, ids, mask)["last_hidden_state"][:, :VISIBLE]
        np.testing.assert_array_equal(found[0], found[1], err_msg=label)
        if label == "float":
            assert error(found, wanted[:, :VISIBLE]).relative < 1e-5
