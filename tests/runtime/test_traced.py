"""Traced models with a cache against transformers: all logits at once, step by step, and whole answers.

The float graph must be the original, and the INT8 one the checkpoint read back into transformers' modules.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from exporting import NOTHING, build_tiny, error, export
from fake_quantize import fake_quantize
from stored import open_checkpoint

from quantkit.errors import InputError
from quantkit.export.traced.trace import why_not_trace
from quantkit.model.families import FAMILIES
from quantkit.pipeline.stages.export import WEIGHTS_FILE
from quantkit.runtime.generate import Sampling, generate
from quantkit.runtime.graph import NotTextError, holds_model
from quantkit.runtime.session import open_session
from quantkit.runtime.traced import LATER_FILE, Traced, TracedTexts, read_start_ids

REASON = why_not_trace()
needs_optimum = pytest.mark.skipif(
    bool(REASON), reason=f"optimum-onnx does not run beside transformers {transformers.__version__}: {REASON}"
)
DECODERS = {
    "bloom": ("BloomForCausalLM", dict(FAMILIES["bloom"].tiny)),
    # Neither has a row in the families table; one takes positions.
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
T5, GATED = FAMILIES["t5"].tiny, FAMILIES["t5"].variants[0]
HALVES = {"encoder": 2, "decoder": 2}
ANSWERING = {
    "t5": ("T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "t5_gated": ("T5ForConditionalGeneration", {**T5, **GATED, "decoder_start_token_id": 0}),
    "bart": (
        "BartForConditionalGeneration",
        {
            "vocab_size": 61,
            "d_model": 32,
            **{f"{half}_layers": count for half, count in HALVES.items()},
            **{f"{half}_attention_heads": 4 for half in HALVES},
            **{f"{half}_ffn_dim": 64 for half in HALVES},
            "max_position_embeddings": 40,
            "forced_bos_token_id": 7,
            "forced_eos_token_id": None,
        },
    ),
}
GENERATOR = np.random.default_rng(0)
IDS = GENERATOR.integers(3, 60, (2, 9))
ANSWER = GENERATOR.integers(3, 60, (2, 6))
PROMPTS = [[int(each) for each in GENERATOR.integers(3, 60, count)] for count in (3, 8, 5)]
COUNT = 7


def both(name, row, folder):
    """(model, float, INT8, folder of INT8)"""
    model = build_tiny(*row)
    model.save_pretrained(folder / "model")
    for kind, min_dim in (("float", NOTHING), ("int8", 1)):
        export(folder / "model", folder / kind, min_dim=min_dim, original=folder / "model")
    opened = [open_session(folder / kind, threads=1) for kind in ("float", "int8")]
    return model, *opened, folder / "int8"


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request, tmp_path_factory):
    return both(request.param, DECODERS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=ANSWERING)
def answering(request, tmp_path_factory):
    return both(request.param, ANSWERING[request.param], tmp_path_factory.mktemp(request.param))


def torch_logits(model, ids, **others):
    with torch.inference_mode():
        named = {name: torch.tensor(values) for name, values in others.items()}
        return model(input_ids=torch.tensor(ids), use_cache=False, **named).logits.numpy()


def torch_answer(model, prompt):
    """The tokens that transformers adds to one prompt."""
    made = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=COUNT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    return made[-COUNT:]


def step_by_step(model, ids, first=4):
    """Logits from position first - 1 on: a prompt, two tokens at once, then one at a time."""
    state = TracedTexts(model=model, ids=ids[:, :first])
    made = [state.read()]
    assert all(isinstance(value, onnxruntime.OrtValue) for value in state.caches.values())
    for begin, end in ((first, first + 2), *((each, each + 1) for each in range(first + 2, ids.shape[1]))):
        made.append(state.feed(ids[:, begin:end]))
    assert state.length == ids.shape[1]
    return np.stack(made, axis=1)


def answers(model, prompts, **options):
    steps = list(generate(model, prompts, **{"max_new_tokens": COUNT, **options}))
    return [list(row) for row in zip(*steps, strict=True)]


def assert_is_fake_quantized(made, fake, original):
    """A row in which no activation falls on the other side of a rounding edge is equal."""
    assert error(made, fake).relative < 3e-2
    assert min(error(*rows).relative for rows in zip(made, fake, strict=True)) < 1e-4
    assert 1e-4 < error(made, original).relative < 0.1


@needs_optimum
def test_a_decoders_logits(decoder):
    model, full, quantized, folder = decoder
    wanted = torch_logits(model, IDS)
    assert error(full.logits(IDS), wanted).relative < 1e-4
    fake = fake_quantize(copy.deepcopy(model), open_checkpoint(folder / WEIGHTS_FILE))
    assert_is_fake_quantized(quantized.logits(IDS), torch_logits(fake, IDS), wanted)


@needs_optimum
def test_a_cache_changes_nothing(decoder):
    _, full, quantized, _ = decoder
    for model in (full, quantized):
        whole, stepped = model.logits(IDS), step_by_step(model, IDS)
        assert error(stepped, whole[:, [3, *range(5, 9)]]).relative < 1e-5


@needs_optimum
def test_a_decoder_says_what_transformers_says(decoder):
    model, full, quantized, _ = decoder
    wanted = [torch_answer(model, prompt) for prompt in PROMPTS]
    assert answers(full, PROMPTS) == wanted
    assert len({tuple(row) for row in wanted}) == len(PROMPTS)
    for prompt, row in zip(PROMPTS, answers(quantized, PROMPTS), strict=True):
        assert answers(quantized, [prompt]) == [row], "a row is the same alone and beside others"
        ids = list(prompt)
        for token in row:
            assert token == quantized.logits(np.array([ids]))[0, -1].argmax()
            ids.append(token)


@needs_optimum
def test_logits_of_an_answer(answering):
    model, full, quantized, folder = answering
    wanted = torch_logits(model, IDS, decoder_input_ids=ANSWER)
    assert error(full.answer_logits(IDS, ANSWER), wanted).relative < 1e-4
    fake = fake_quantize(copy.deepcopy(model), open_checkpoint(folder / WEIGHTS_FILE))
    made = quantized.answer_logits(IDS, ANSWER)
    assert_is_fake_quantized(made, torch_logits(fake, IDS, decoder_input_ids=ANSWER), wanted)
    other = full.answer_logits(IDS[:, ::-1], ANSWER)
    assert error(other, wanted).relative > 1e-3, "the encoder is heard"


@needs_optimum
def test_an_answer_step_by_step(answering):
    model, full, *_ = answering
    state = TracedTexts(model=full, ids=IDS)
    last = state.read()
    begun = np.tile(np.array(full.start_ids), (2, 1))
    made = [last, *(state.feed(ANSWER[:, place : place + 1]) for place in range(ANSWER.shape[1]))]
    wanted = torch_logits(model, IDS, decoder_input_ids=np.concatenate([begun, ANSWER], axis=1))
    assert error(np.stack(made, axis=1), wanted[:, len(full.start_ids) - 1 :]).relative < 1e-4


@needs_optimum
def test_an_answer_is_that_of_transformers(answering):
    model, full, quantized, _ = answering
    prompts = PROMPTS
    wanted = [torch_answer(model, prompt) for prompt in prompts]
    if len(full.start_ids) == 2:  # there the forced token counts as a new one
        assert full.start_ids == (2, 7)
        assert all(row[0] == 7 for row in wanted)
        wanted = [row[1:] for row in wanted]
    count = len(wanted[0])
    assert answers(full, prompts, max_new_tokens=count) == wanted
    for prompt, row in zip(prompts, answers(quantized, prompts), strict=True):
        assert answers(quantized, [prompt]) == [row]


@needs_optimum
def test_stop_tokens_and_seeds(decoder):
    _, full, *_ = decoder
    free = answers(full, PROMPTS)
    stop = next(token for token in free[0] if token not in free[1])
    place = free[0].index(stop)
    first, second = answers(full, PROMPTS[:2], stop_ids=frozenset({stop}))
    assert first == free[0][: place + 1] + [None] * (COUNT - place - 1)
    assert second == free[1]

    def drawn(seed):
        return answers(full, PROMPTS, sampling=Sampling(temperature=3.0, seed=seed))

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


@needs_optimum
def test_the_context_is_the_limit(decoder):
    _, full, *_ = decoder
    if full.context is None:
        assert len(answers(full, [[5] * 60])[0]) == COUNT, "BLOOM has no last position"
        return
    longest = [5] * (full.context - COUNT)
    assert len(answers(full, [longest])[0]) == COUNT
    with pytest.raises(InputError, match="up to 40 tokens together"):
        answers(full, [[*longest, 5]])


@needs_optimum
def test_an_encoder_has_a_context_of_its_own(answering):
    _, full, *_ = answering
    if full.context is None:
        return
    assert len(answers(full, [[5] * 40], max_new_tokens=38)[0]) == 38
    for prompt, count in (([5] * 41, 1), ([5], 39)):
        with pytest.raises(InputError, match="up to 40 tokens of the prompt"):
            answers(full, [prompt], max_new_tokens=count)


@needs_optimum
@pytest.mark.parametrize(
    ("prompts", "words"),
    [([], "empty prompt"), ([[1], []], "empty prompt"), ([[1], [61]], "id 61, and the model has 61")],
    ids=str,
)
def test_wrong_prompts(decoder, prompts, words):
    with pytest.raises(InputError, match=words):
        next(generate(decoder[1], prompts, max_new_tokens=1))


@needs_optimum
def test_a_lost_or_damaged_file_is_named(answering, tmp_path):
    folder = answering[3]
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / LATER_FILE).unlink()
    with pytest.raises(NotTextError, match=f"no {LATER_FILE}"):
        open_session(tmp_path)
    (tmp_path / LATER_FILE).write_bytes(b"no graph")
    with pytest.raises(InputError, match=LATER_FILE) as caught:
        open_session(tmp_path)
    assert not isinstance(caught.value, NotTextError)


def assert_is_opened(folder):
    assert holds_model(folder)
    assert not holds_model(folder.parent / "model"), "a checkpoint is no exported model"
    assert isinstance(open_session(folder, threads=1), Traced)


@needs_optimum
def test_a_traced_decoder_is_opened_as_such(decoder):
    assert_is_opened(decoder[3])


@needs_optimum
def test_an_encoder_and_its_decoder_are_opened_as_such(answering):
    assert_is_opened(answering[3])


@pytest.mark.parametrize(("name", "is_text"), [("gpt2", True), ("bert", False)])
def test_a_fused_model_is_opened_as_such(name, is_text, tmp_path):
    row = FAMILIES[name]
    build_tiny(row.tiny_class, dict(row.tiny)).save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "out")
    session = open_session(tmp_path / "out", threads=1)
    assert (session.kind, session.generates) == (("decoder", True) if is_text else ("encoder", False))
    if not is_text:
        with pytest.raises(InputError, match="text"):
            next(generate(session, [[1]], max_new_tokens=1))


@pytest.mark.once
@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"decoder_start_token_id": 3}, {"decoder_start_token_id": 4}, (3,)),
        (None, {"decoder_start_token_id": 4, "pad_token_id": 0}, (4,)),
        ({"bos_token_id": 1}, {"decoder_start_token_id": 4, "bos_token_id": 1}, (4,)),
        ({"pad_token_id": 0}, {}, (0,)),
        ({"decoder_start_token_id": 2, "forced_bos_token_id": 9}, {}, (2, 9)),
        ({"forced_bos_token_id": 9}, {"decoder_start_token_id": 2, "forced_bos_token_id": 8}, (2, 9)),
    ],
    ids=str,
)
def test_what_a_decoder_begins_with(generation, config, wanted, tmp_path):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert read_start_ids(tmp_path) == wanted


@pytest.mark.once
def test_nothing_says_what_a_decoder_begins_with(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotTextError, match="decoder_start_token_id"):
        read_start_ids(tmp_path)
