"""The specification against published figures, figures derived by hand, and PyTorch's own FLOP counter."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
import transformers
from cost_maps import MAPS, albert_map, gemma_map, gpt2_map, linear, model_map, t5_map, unknown_map
from examples import pictures_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from tracing import build_tiny

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect, map_module
from quantkit.model.model_map import Attention, ModelMap, PositionKind, Residual, Role, to_json
from quantkit.plan.cost.roofline import times_us
from quantkit.plan.cost.specification import Specification, specify
from quantkit.plan.machines import MACHINES
from quantkit.report.costs import group_rows

DEVICES = tuple(MACHINES.values())
SERVER = MACHINES["server-2core-vnni"]
GPT2 = gpt2_map()
GPT2_SPEC = specify(GPT2, batch=1, length=1024, devices=DEVICES)
every_map = pytest.mark.parametrize("mapped", MAPS.values(), ids=list(MAPS))


def named(specification: Specification, name: str) -> list:
    return [row for row in specification.rows if row.name == name]


def macs(model: ModelMap, **asked) -> int:
    return specify(model, **asked).totals.matrix_macs


# --- GPT-2 small, batch 1, length 1024: the published figures ---


def test_gpt2_parameters():
    block = [row for row in GPT2_SPEC.rows if row.block == "transformer.h.0"]
    of = {group: [row for row in block if row.group == group] for group in ("attention", "ffn", "norms")}
    assert GPT2.num_parameters == GPT2_SPEC.totals.parameters == 124_439_808
    assert named(GPT2_SPEC, "token embedding")[0].parameters == 38_597_376
    assert named(GPT2_SPEC, "position embedding")[0].parameters == 786_432
    assert sum(row.parameters - row.bias_parameters for row in of["attention"]) == 2_359_296
    assert sum(row.parameters for row in of["ffn"]) == 4_722_432
    assert sum(row.parameters for row in block) == 7_087_872
    assert sum(row.parameters for row in GPT2_SPEC.rows if row.block) == 85_054_464
    assert named(GPT2_SPEC, "final norm")[0].parameters == 1_536
    assert named(GPT2_SPEC, "lm_head")[0].parameters == 0
    assert sum(GPT2_SPEC.totals.parameter_shares.values()) == pytest.approx(1)


def test_gpt2_macs_and_flops():
    block = sum(row.macs for row in GPT2_SPEC.rows if row.block == "transformer.h.0")
    assert block == 1024 * (12 * 768**2 + 2 * 1024 * 768) == 8_858_370_048  # 8.86 G
    assert sum(row.macs for row in GPT2_SPEC.rows if row.block) == 12 * block == 106_300_440_576
    assert named(GPT2_SPEC, "lm_head")[0].macs == 39_523_713_024
    assert GPT2_SPEC.totals.matrix_macs == 145_824_153_600
    assert all(row.flops == 2 * row.macs for row in GPT2_SPEC.rows if row.macs)
    head = 39_523_713_024 / 145_824_153_600
    assert GPT2_SPEC.totals.compute_shares["head"] == pytest.approx(head, rel=1e-12)


def test_gpt2_memory_and_cache():
    assert GPT2_SPEC.memory_bytes == {
        "fp32": 497_759_232,
        "fp16": 248_879_616,
        "int8": 124_439_808,
        "int4": 62_219_904,
    }
    assert sum(row.weight_bytes for row in GPT2_SPEC.rows) == 497_759_232
    assert GPT2_SPEC.kv_cache_bytes["fp32"] == 2 * 12 * 1024 * 768 * 4 == 75_497_472  # 75.5 MB, not 288
    assert GPT2_SPEC.kv_cache_bytes["int8"] == 75_497_472 / 4


def test_gpt2_shapes_formulas_and_order():
    block = [row for row in GPT2_SPEC.rows if row.block == "transformer.h.11"]
    assert [row.name for row in block] == [
        *("norm ln_1", "QKV projection", "scores", "softmax", "attention x V", "output projection"),
        *("residual add", "norm ln_2", "FFN up", "activation gelu_tanh", "FFN down", "residual add"),
    ]
    assert block[1].formula == "B*L*d*3d = 1*1024*768*2304"
    assert (block[1].input_shape, block[1].output_shape) == ((1, 1024, 768), (1, 1024, 2304))
    assert block[2].output_shape == block[4].input_shape == (1, 12, 1024, 1024)
    outer = [row.name for row in GPT2_SPEC.rows if not row.block]
    assert outer == [
        *("tokenization", "token embedding", "position embedding", "embedding sum"),
        *("final norm", "lm_head"),
    ]
    assert [row.index for row in GPT2_SPEC.rows] == list(range(len(GPT2_SPEC.rows)))


def test_gpt2_bytes_of_one_row():
    row = named(GPT2_SPEC, "FFN up")[0]
    assert row.input_bytes == 1024 * 768 * 4 and row.output_bytes == 1024 * 3072 * 4
    assert row.weight_bytes == row.weight_traffic_bytes == (768 * 3072 + 3072) * 4
    moved = (1024 * 768 + 1024 * 3072 + 768 * 3072 + 3072) * 4
    assert row.arithmetic_intensity == pytest.approx(2 * 1024 * 768 * 3072 / moved, rel=1e-12)


# --- every kind of model ---


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_are_what_pytorch_counts(name):
    """Its counter sees every matrix product of the real modules; two kinds of them are none here."""
    model = build_tiny(FAMILIES[name].tiny_class, dict(FAMILIES[name].tiny))
    mapped = inspect(model)
    batch, source = 2, 13
    length = 7 if mapped.is_encoder_decoder else source
    ids = torch.randint(3, 60, (batch, source))
    if mapped.picture:
        length = mapped.context
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(pixel_values=torch.from_numpy(pictures_of(model.config, batch)))
        totals = specify(mapped, batch=batch, length=length).totals
        width = mapped.hidden_size  # keys, values and scores of a query of the model's own are no projections
        pooling = batch * (width**2 * (1 + 2 * length) + 2 * length * width) if mapped.picture.probe else 0
        assert counter.get_total_flops() == 2 * (totals.matrix_macs + pooling)
        assert totals.parameters == mapped.num_parameters
        return
    decoder = {"decoder_input_ids": ids[:, :length]} if mapped.is_encoder_decoder else {}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, **decoder)
    encoder = {"encoder_length": source} if mapped.is_encoder_decoder else {}
    specification = specify(mapped, batch=batch, length=length, **encoder)
    attentions = [item for block in mapped.blocks for item in block.attentions]
    # The angles of a rotation are constants here; the modules make them by a product each time.
    angles = sum(
        sum(counts.values())
        for path, counts in counter.get_flop_counts().items()
        if re.search(r"\.rotary_emb(_\w+|s\.\w+)?$", path)
    )
    # Its plain attention computes the keys outside of a window, which may lie on both sides, and masks them.
    seen = [
        (item.window or length) * (1 if item.is_causal else 2) - (not item.is_causal) for item in attentions
    ]
    masked = sum(
        2 * 2 * batch * item.num_heads * item.head_dim * length * max(0, length - keys)
        for item, keys in zip(attentions, seen, strict=True)
    )
    assert counter.get_total_flops() - 2 * specification.totals.matrix_macs == angles + masked
    left_out = mapped.num_parameters - mapped.at_inference.num_parameters  # what training alone runs
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert specification.totals.parameters == num_parameters - left_out


@every_map
@pytest.mark.parametrize("past", [0, 7])
def test_every_layer_norm_and_parameter_is_counted_once(mapped, past):
    past = past if mapped.blocks and mapped.blocks[-1].attentions[0].is_causal else 0
    specification = specify(mapped, batch=1, length=5, past=past)
    covered = [module for row in specification.rows for module in row.modules]
    assert all(covered.count(item.name) == 1 for item in (*mapped.layers, *mapped.norms))
    assert {item.name for item in (*mapped.embeddings, *mapped.unmapped)} <= set(covered)
    assert specification.totals.parameters == mapped.num_parameters
    assert specification.totals.weight_bytes == specification.memory_bytes["fp32"]
    assert not any("in no row" in note for note in specification.notes)


def test_ffn_sizes_of_both_kinds():
    standard = sum(row.parameters - row.bias_parameters for row in named(GPT2_SPEC, "FFN up")[:1]) * 2
    assert standard == 8 * 768**2 == 4_718_592
    square = specify(gemma_map(hidden=1152, ffn_width=4608), batch=1, length=1)
    gated = [row for row in square.rows if row.block_index == 0 and row.group == "ffn"]
    assert sum(row.parameters for row in gated) == 12 * 1152**2 == 15_925_248
    assert [row.name for row in gated] == [
        *("FFN gate", "FFN up", "activation gelu_tanh", "gating multiply", "FFN down")
    ]


@pytest.mark.parametrize(
    ("length", "past", "kept_by_a_window"), [(4096, 0, 512), (100, 0, 100), (1, 4095, 512), (1, 511, 512)]
)
def test_gemma_cache_and_window(length, past, kept_by_a_window):
    specification = specify(gemma_map(), batch=2, length=length, past=past)
    a_token = 2 * 1 * 256  # keys and values of the one key/value head
    total = 2 * a_token * (4 * (past + length) + 22 * kept_by_a_window)  # 4 global layers, 22 windows
    assert specification.kv_cache_bytes == {"fp32": 4 * total, "fp16": 2 * total, "int8": total}
    scores = named(specification, "scores")
    assert scores[0].macs == 2 * 4 * length * kept_by_a_window * 256
    assert scores[5].macs == 2 * 4 * length * (past + length) * 256
    # A query reads its window; all of them together read window - 1 + length distinct keys at most.
    distinct = min(511 + length, past + length)
    assert scores[0].input_bytes == 4 * 2 * 256 * (4 * length + distinct)


def test_gemma_as_published():
    specification = specify(gemma_map(), batch=1, length=4096)
    assert specification.totals.parameters == 999_885_952
    assert specification.kv_cache_bytes["fp32"] == 56_623_104
    assert len(gemma_map().layers) == 183
    block = [row.name for row in specification.rows if row.block_index == 0]
    assert block == [
        *("norm input_layernorm", "QKV projection", "query norm", "key norm", "rotary position", "scores"),
        *("softmax", "attention x V", "output projection", "norm post_attention_layernorm", "residual add"),
        *("norm pre_feedforward_layernorm", "FFN gate", "FFN up", "activation gelu_tanh", "gating multiply"),
        *("FFN down", "norm post_feedforward_layernorm", "residual add"),
    ]
    assert named(specification, "embedding scale") and not named(specification, "embedding sum")


def test_parallel_residual_and_score_extras():
    specification = specify(gpt2_map(residual=Residual.PARALLEL), batch=1, length=4)
    block = [row for row in specification.rows if row.block_index == 3]
    assert [row.name for row in block].count("residual add") == 1 and block[-1].name == "residual add"
    assert block[-1].flops == 2 * 4 * 768 and block[-1].input_bytes == 3 * 4 * 768 * 4
    softcapped = Attention(
        num_heads=12, num_kv_heads=12, head_dim=64, position=PositionKind.ALIBI, softcap=50.0
    )
    blocks = tuple(replace(block, attentions=(softcapped,)) for block in GPT2.blocks)
    specification = specify(replace(GPT2, blocks=blocks, final_softcap=30.0), batch=1, length=4)
    names = [row.name for row in specification.rows if row.block_index == 0]
    assert names[2:6] == ["scores", "attention softcap", "position bias", "softmax"]
    assert specification.rows[-1].name == "logit softcap"
    assert specification.rows[-1].output_shape == (1, 4, 50257)


def test_encoder_decoder():
    d, source, target = 64, 10, 3
    specification = specify(t5_map(), batch=2, length=target, encoder_length=source)
    encoder = 2 * (source * (4 * d * d + 2 * d * 128) + 2 * source * source * d)
    own = target * (4 * d * d + 2 * d * 128) + 2 * target * target * d
    cross = target * 2 * d * d + source * 2 * d * d + 2 * target * source * d
    assert specification.totals.matrix_macs == 2 * (encoder + 2 * (own + cross) + target * d * 100)
    assert specification.kv_cache_bytes["int8"] == 2 * 2 * (target + source) * d * 2
    names = [row.name for row in specification.rows]
    assert names.index("final norm (encoder)") < names.index("token embedding (decoder)")
    first = [row.name for row in specification.rows if row.block == "decoder.block.0"]
    assert first[:5] == ["norm layer_norm", "QKV projection", "scores", "position bias", "softmax"]
    assert first[8:12] == [
        *("norm layer_norm", "cross attention query projection"),
        *("cross attention key/value projection", "cross attention scores"),
    ]


def test_a_later_pass_of_a_decoder_finds_the_encoder_in_the_cache():
    specification = specify(t5_map(), batch=1, length=1, past=5, encoder_length=10, devices=[SERVER])
    d = 64
    own = 4 * d * d + 2 * d * 128 + 2 * 6 * d
    cross = 2 * d * d + 2 * 10 * d
    assert specification.totals.matrix_macs == 2 * (own + cross) + d * 100
    cached = [row for row in specification.rows if row.calls == 0]
    assert {row.stack for row in cached if row.name != "cross attention key/value projection"} == {"encoder"}
    assert all(row.moved_bytes == row.flops == 0 and row.fits[0].verdict == "-" for row in cached)


def test_a_shared_block_is_stored_once_and_computed_at_each_call():
    specification = specify(albert_map(), batch=1, length=128, devices=[SERVER])
    block = [row for row in specification.rows if row.block]
    weights = 12 * 768**2
    assert sum(row.parameters for row in block) == weights + 4 * 768 + 3072 + 768 + 4 * 768
    assert sum(row.macs for row in block) == 12 * 128 * (weights + 2 * 128 * 768)
    assert all(row.weight_traffic_bytes == 12 * row.weight_bytes for row in block)
    up = next(row for row in block if row.name == "FFN up")
    assert up.input_bytes == 12 * 128 * 768 * 4 and up.formula.startswith("12 calls of ")
    assert times_us(up, SERVER)[1]["dispatch"] == 12 * SERVER.dispatch_us
    assert [row.name for row in block][5:] == [
        *("residual add", "norm LayerNorm", "FFN up", "activation gelu_tanh", "FFN down"),
        *("residual add", "norm full_layer_layer_norm"),
    ]
    outer = [row.name for row in specification.rows if not row.block]
    assert outer == [
        *("tokenization", "token embedding", "position embedding", "token type embedding", "embedding sum"),
        *("embedding norm", "embedding_hidden_mapping_in", "dense", "head norm", "lm_head"),
    ]
    assert specification.kv_cache_bytes["fp32"] == 0  # it attends both ways: nothing to keep
    assert {estimate.phase for estimate in specification.estimates} == {"prefill"}


def test_an_unknown_family_is_costed_without_its_attention():
    specification = specify(unknown_map(), batch=3, length=5)
    assert specification.totals.matrix_macs == 3 * 5 * (8 * 16 + 16 * 8)
    assert any("attention scores and caches are not counted" in note for note in specification.notes)
    assert specification.rows[-1].name == "other parameters" and specification.rows[-1].parameters == 24


# --- quantized weights, advice, grouping, JSON, errors ---


def test_quantized_weights():
    bits = {layer.name: 8 for layer in GPT2.layers}
    specification = specify(GPT2, batch=1, length=1, past=1023, weight_bits=bits, devices=DEVICES)
    biases = 12 * (3 * 768 + 768 + 3072 + 768)
    full = biases + 25 * 2 * 768 + 1024 * 768  # biases, norms and positions stay as they are
    assert specification.totals.weight_bytes == (124_439_808 - full) + 4 * full
    head = named(specification, "lm_head")[0]
    assert head.weight_bytes == 0 and head.weight_traffic_bytes == 768 * 50257  # the table, held once
    assert named(specification, "token embedding")[0].weight_bytes == 768 * 50257
    dtypes = {fit.device: fit.dtype for fit in named(specification, "FFN up")[0].fits}
    assert set(dtypes.values()) == {"int8"}
    dtypes = {fit.device: fit.dtype for fit in named(GPT2_SPEC, "FFN up")[0].fits}
    assert dtypes["h100"] == dtypes["phone-npu"] == "fp16" and dtypes["laptop-cpu"] == "fp32"
    half = specify(GPT2, batch=1, length=1, weight_bits={"lm_head": 4}, devices=[SERVER])
    assert named(half, "lm_head")[0].weight_traffic_bytes == 768 * 50257 // 2
    assert "quantize" in named(GPT2_SPEC, "FFN up")[0].advice
    assert "quantize" not in named(specification, "FFN up")[0].advice


def test_advice():
    head = named(GPT2_SPEC, "lm_head")[0].advice
    assert head.startswith("compute only the last logits: 39.5 G MACs fewer")
    decode = specify(GPT2, batch=1, length=1, past=9)
    assert "last logits" not in named(decode, "lm_head")[0].advice
    assert named(decode, "lm_head")[0].advice == "quantize: 4.0x fewer bytes"
    assert "cache" in named(GPT2_SPEC, "QKV projection")[0].advice
    assert "cache" not in named(decode, "QKV projection")[0].advice
    assert "last logits" not in named(specify(albert_map(), batch=1, length=9), "lm_head")[0].advice
    assert named(GPT2_SPEC, "token embedding")[0].advice.startswith("tie: store one table")
    untied = model_map([linear("head", Role.LM_HEAD, 768, 50257)], list(GPT2.embeddings), [], hidden_size=768)
    advice = named(specify(untied, batch=1, length=2), "token embedding")[0].advice
    assert advice == "tie with the lm_head if trained so: 38.6 M parameters fewer"


@every_map
def test_groups_show_identical_blocks_once(mapped):
    specification = specify(mapped, batch=1, length=600, devices=[SERVER])
    groups = group_rows(specification)
    assert sum(group.count * len(group.rows) for group in groups) == len(specification.rows)
    expected = {
        "gpt2_map": ["blocks 0-11 (12x)"],
        "gemma_map": ["blocks 0-4, 6-10, 12-16, 18-22, 24-25 (22x)", "blocks 5, 11, 17, 23 (4x)"],
        "t5_map": ["encoder blocks 0-1 (2x)", "decoder blocks 0-1 (2x)"],
        "albert_map": ["block 0 (run 12 times)"],
        "unknown_map": [],
    }
    name = next(key for key, value in MAPS.items() if value is mapped)
    assert [group.label for group in groups if group.rows[0].block] == expected[name]


def test_json_holds_every_column():
    document = json.loads(json.dumps(to_json(GPT2_SPEC)))
    assert document["rows"][5]["arithmetic_intensity"] == GPT2_SPEC.rows[5].arithmetic_intensity > 0
    assert document["rows"][5]["fits"][0]["verdict"] and document["kv_cache_bytes"]["fp32"] == 75_497_472


@pytest.mark.parametrize(
    ("model", "asked", "where"),
    [
        ("gpt2_map", {"batch": 0}, "batch"),
        ("gpt2_map", {"length": -1}, "length"),
        ("gpt2_map", {"length": True}, "length"),
        ("gpt2_map", {"past": -1}, "past"),
        ("gpt2_map", {"encoder_length": 4}, "encoder_length"),
        ("t5_map", {"encoder_length": 0}, "encoder_length"),
        ("albert_map", {"past": 3}, "past"),
        ("gpt2_map", {"weight_bits": {"lm_heda": 8}}, "weight_bits"),
        ("gpt2_map", {"weight_bits": {"lm_head": 7}}, "weight_bits"),
    ],
)
def test_what_no_pass_can_be_is_refused(model, asked, where):
    with pytest.raises(InputError, match=f"^{where}: "):
        specify(MAPS[model], **{"batch": 1, "length": 4, **asked})


def test_notes_say_what_a_reader_must_know():
    assert any("causal mask is not credited" in note for note in GPT2_SPEC.notes)
    long = specify(GPT2, batch=1, length=2048)
    assert any("1024 positions, 2048" in note for note in long.notes)
    small = replace(SERVER, memory_gb=0.5)  # weights alone fit, weights and cache do not
    assert any(
        "exceed the memory of" in note for note in specify(GPT2, batch=1, length=1024, devices=[small]).notes
    )


@settings(max_examples=25)
@given(name=st.sampled_from(list(MAPS)), batch=st.integers(1, 64), length=st.integers(1, 900))
def test_macs_and_cache_are_linear_in_the_batch(name, batch, length):
    one, many = (specify(MAPS[name], batch=size, length=length) for size in (1, batch))
    assert many.totals.matrix_macs == batch * one.totals.matrix_macs
    assert many.kv_cache_bytes["int8"] == batch * one.kv_cache_bytes["int8"]
    assert many.totals.parameters == one.totals.parameters
    assert many.memory_bytes == one.memory_bytes


@settings(max_examples=25)
@given(length=st.integers(1, 700), step=st.integers(1, 50))
def test_a_prompt_in_two_passes_costs_as_much_as_its_projections_in_one(length, step):
    """Only scores differ: the full square of the whole against the smaller squares of the parts."""
    whole, first, second = (
        specify(GPT2, batch=1, length=size, past=past)
        for size, past in ((length + step, 0), (length, 0), (step, length))
    )
    unseen = 2 * 12 * 768 * length * step  # queries of the first part, keys of the second: masked
    parts = first.totals.matrix_macs + second.totals.matrix_macs
    assert whole.totals.matrix_macs - parts == unseen
    assert whole.kv_cache_bytes == second.kv_cache_bytes


# --- mixtures of experts, and models without a row in the families table ---

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
NARROW = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **NARROW, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
EXPERTS = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {"num_experts": 4, **NARROW, "shared_expert_intermediate_size": 40},
    "Qwen3MoeForCausalLM": {"num_experts": 4, **NARROW, "decoder_sparse_step": 2, "head_dim": 8},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2ForCausalLM": {**LATENT, "q_lora_rank": None},
    "DeepseekV3ForCausalLM": {**LATENT, "q_lora_rank": 16},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_the_experts_that_run_and_all_that_are_stored(name):
    """Torch counts the projections of the real module."""
    chosen = getattr(transformers, name)
    config = chosen.config_class(**{**SMALL, **EXPERTS[name]})
    config._experts_implementation = "eager"  # transformers 5: a grouped product is not counted by torch
    model = chosen(config).eval()
    mapped = inspect(model)
    spec = specify(mapped, batch=2, length=7)
    stored = sum(parameter.numel() for parameter in model.parameters())
    assert sum(row.parameters for row in spec.rows) == spec.totals.parameters == stored
    is_expert = {name: ".experts." in name for name, _ in model.named_parameters()}
    in_experts = sum(tensor.numel() for name, tensor in model.named_parameters() if is_expert[name])
    assert in_experts
    assert spec.totals.active_parameters == stored - in_experts // 2
    assert any(note.startswith("2 of 4 experts run for each token") for note in spec.notes)
    if name == "DeepseekV2ForCausalLM" and transformers.__version__.startswith("5"):
        return  # its attention in transformers 5.0 does not run
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.randint(3, 60, (2, 7)))
    counts = counter.get_flop_counts()["Global"]
    products = sum(flops for operator, flops in counts.items() if str(operator) in ("aten.mm", "aten.addmm"))
    assert 2 * sum(row.macs for row in spec.rows if row.modules) == products


def test_experts_without_a_number_of_active_ones_are_all_counted():
    mapped = replace(map_of("MixtralForCausalLM"), num_active_experts=None)
    spec = specify(mapped, batch=1, length=3)
    assert spec.totals.active_parameters == spec.totals.parameters
    assert any("all are counted, an upper bound" in note for note in spec.notes)


def map_of(name: str) -> ModelMap:
    chosen = getattr(transformers, name)
    with torch.device("meta"):
        return map_module(chosen(chosen.config_class(**{**SMALL, **EXPERTS[name]})), name=name)


@pytest.mark.parametrize("name", ["Bart", "MBart", "Marian", "Pegasus", "Blenderbot", "M2M100"])
def test_every_table_of_an_encoder_decoder_without_a_row_is_counted(name):
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    chosen = getattr(transformers, "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration")
    mapped = map_module(chosen(chosen.config_class(**sizes, **heads, decoder_start_token_id=2)), name=name)
    spec = specify(mapped, batch=1, length=3)
    assert spec.totals.parameters == mapped.num_parameters
    assert not any("are in no row" in note for note in spec.notes)
