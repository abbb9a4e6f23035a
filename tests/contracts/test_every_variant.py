"""Every pair of choices a decoder can be made of: told by structure, exported, and run beside torch.

The rows are a covering array: for any two choices each pair of values stands in at least one row, which the
first test counts. The oracles are the configurable model itself in torch, and for INT8 the checkpoint read
back into it.
"""

from __future__ import annotations

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from doubles import logits_of as logits_in_double
from doubles import make_subject
from exporting import NOTHING, build_tiny, error, export
from fake_quantize import fake_quantize
from stepping import one_by_one
from stored import open_checkpoint

from quantkit.errors import InputError
from quantkit.export.decoder import why_not
from quantkit.model.architectures.reference import ReferenceConfig, ReferenceForCausalLM
from quantkit.model.experts import with_separate_experts
from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect, map_module
from quantkit.model.load import build_on_meta, open_source
from quantkit.model.model_map import Role
from quantkit.model.unknown.observe import observe
from quantkit.model.unknown.probes import norm_kind_of
from quantkit.model.weights.torch_model import torch_model
from quantkit.plan.cost.specification import specify
from quantkit.plan.select import choose
from quantkit.quantization.transforms import TRANSFORMS
from quantkit.quantization.transforms.draft import opened
from quantkit.quantization.transforms.settings import TransformSettings
from quantkit.quantization.transforms.spaces import spaces_of
from quantkit.runtime.decoder import open_decoder

CHOICES = {
    "ffn_kind": ("standard", "gated"),
    "hidden_act": ("relu", "gelu", "gelu_pytorch_tanh", "silu"),
    "norm_kind": ("layer_norm", "rms_norm"),
    "norm_placement": ("pre", "post", "sandwich"),
    "uses_bias": (False, True),
}
CURVES = {"relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
IDS = np.random.default_rng(0).integers(1, 60, (2, 14))
PROMPT, PADDING = 9, 4


def pairs_of(row):
    """The pairs of choices that one row holds."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def covering_rows(choices):
    """Rows that hold every pair of values, each the one that adds the most."""
    every = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    missing = set().union(*map(pairs_of, every))
    rows = []
    while missing:
        rows.append(max(every, key=lambda row: len(pairs_of(row) & missing)))
        missing -= pairs_of(rows[-1])
    return rows


ROWS = covering_rows(CHOICES)
ON_EVERY_ROW = pytest.mark.parametrize(
    "row", [pytest.param(row, id="-".join(str(value) for value in row.values())) for row in ROWS]
)


def build(row, **changes):
    return build_tiny("ReferenceForCausalLM", {**SIZES, **row, **changes})


def logits_of(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()


@pytest.mark.once
def test_every_pair_of_choices_is_covered():
    wanted = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(sorted(CHOICES), 2)
        for first in CHOICES[one]
        for second in CHOICES[other]
    }
    assert set().union(*map(pairs_of, ROWS)) == wanted
    assert len(ROWS) <= 16, "far fewer than the 96 combinations"


@ON_EVERY_ROW
def test_it_is_named_by_what_it_does(row):
    """The map, the forward pass and the config say the same; without the family's row the pass still does."""
    model = build(row)
    model_map = map_module(model, name="variant")
    for block in model_map.blocks:
        assert block.ffn.kind == row["ffn_kind"]
        assert block.ffn.activation == CURVES[row["hidden_act"]]
        assert block.ffn.hidden_features == SIZES["intermediate_size"]
        assert (block.norm_kind, block.norm_placement) == (row["norm_kind"], row["norm_placement"])
    assert {norm.kind for norm in model_map.norms} == {row["norm_kind"]}
    for seen in (observe(model), observe(copy.deepcopy(model).to("meta"))):
        assert [each.kind for each in seen] == [row["ffn_kind"]] * 2
        assert [each.activation for each in seen] == [CURVES[row["hidden_act"]]] * 2
        assert [each.norm_kind for each in seen] == [row["norm_kind"]] * 2
        assert [each.placement for each in seen] == [row["norm_placement"]] * 2
        assert [each.down for each in seen] == [f"model.layers.{index}.mlp.down_proj" for index in (0, 1)]
    stranger = type("Stranger", (ReferenceForCausalLM,), {})(model.config).eval()
    stranger.config = copy.deepcopy(model.config)
    stranger.config.model_type = "nobody_knows"
    unknown = map_module(stranger, name="stranger")
    assert unknown.family is None
    name = f"2 x {row['ffn_kind']} FFN {model_map.blocks[0].ffn.display_name} 96"
    assert f"a forward pass shows {name}, {row['norm_placement']} {row['norm_kind']}" in unknown.notes
    assert {norm.kind for norm in unknown.norms} == {row["norm_kind"]}


@pytest.mark.once
@ON_EVERY_ROW
def test_it_is_planned_and_costed(row):
    model = build(row)
    model_map = map_module(model, name="variant")
    per_block = 4 + (3 if row["ffn_kind"] == "gated" else 2)
    plan = choose(model_map, min_dim=1)
    assert plan.projections.quantized == plan.projections.total == 2 * per_block + 1
    assert plan.formula.agrees
    rows = specify(model_map, batch=1, length=8).rows
    assert sum(each.parameters for each in rows) == sum(p.numel() for p in model.parameters())
    ffn = sum(each.macs for each in rows if each.group == "ffn")
    assert ffn == 2 * 8 * (per_block - 4) * 64 * 96


@ON_EVERY_ROW
def test_the_fused_graph_is_the_model(row, tmp_path):
    model = build(row)
    model.save_pretrained(tmp_path / "model")
    assert why_not(map_module(model, name="variant")) is None
    export(tmp_path / "model", tmp_path / "out", min_dim=NOTHING)
    decoder = open_decoder(tmp_path / "out", threads=1)
    wanted = logits_of(model, IDS)
    mask = np.ones_like(IDS)
    mask[1, :PADDING] = 0
    alone = logits_of(model, IDS[1:, PADDING:])[0]
    padded, decoded = decoder.logits(IDS, mask), one_by_one(decoder, IDS, mask, prompt=PROMPT)
    for made, expected in (
        (decoder.logits(IDS), wanted),
        (one_by_one(decoder, IDS, prompt=PROMPT), wanted[:, PROMPT - 1 :]),
        (padded[0], wanted[0]),
        (padded[1, PADDING:], alone),
        (decoded[1], alone[PROMPT - 1 - PADDING :]),
    ):
        assert error(made, expected).relative < 1e-5
        assert error(made, expected).absolute < 1e-4


@pytest.mark.once
@ON_EVERY_ROW
def test_the_integer_graph_is_the_checkpoint(row, tmp_path):
    model = build(row)
    model.save_pretrained(tmp_path / "model")
    exported = export(tmp_path / "model", tmp_path / "out")
    layers = {layer.name for layer in map_module(model, name="variant").layers}
    assert set(exported.placement.projections) == layers
    made = open_decoder(tmp_path / "out", threads=1).logits(IDS)
    checkpoint = open_checkpoint(tmp_path / "out" / "weights.safetensors")
    original = logits_of(model, IDS)
    fake = logits_of(fake_quantize(copy.deepcopy(model), checkpoint), IDS)
    assert error(made, fake).relative < 2e-2
    assert np.abs(made - fake).mean() < 0.5 * np.abs(made - original).mean() + 1e-6
    assert 1e-4 < error(made, original).relative < 0.1, "the quantization shows, and is small"


@pytest.mark.once
@ON_EVERY_ROW
def test_every_change_that_its_spaces_permit_is_exact(row, tmp_path):
    """In float64: permutations, scales where curves and norms let them through, rotations."""
    given = make_subject("ReferenceForCausalLM", {**SIZES, **row}, tmp_path)
    permitted = {space.name: space for space in spaces_of(given.map)}
    is_rotated = "orthogonal" in permitted["residual"].permits
    assert is_rotated == (row["norm_placement"] == "pre")
    scales = row["ffn_kind"] == "gated" or row["hidden_act"] == "relu"
    assert ("diagonal" in permitted["model.layers.0.ffn_hidden"].permits) == scales
    names = ["permutation", "smoothquant", *(["hadamard"] if is_rotated else [])]
    for name in names:
        random = np.random.default_rng(3)
        statistics = {layer.matrix: random.uniform(0.1, 9.0, layer.in_features) for layer in given.map.layers}
        model_map, tensors = TRANSFORMS[name].apply(
            given.map,
            opened(given.map, given.tensors, np.float64),
            TransformSettings(seed=1, statistics=statistics),
        )
        changed = logits_in_double(torch_model(given.source, model_map, tensors, torch.float64))
        assert error(changed, given.logits).relative < 1e-9, name


@pytest.mark.parametrize("placement", CHOICES["norm_placement"])
def test_blocks_without_an_ffn_go_the_whole_way(placement, tmp_path):
    model = build({"ffn_kind": "none", "norm_placement": placement})
    model_map = map_module(model, name="attention alone")
    assert [block.ffn for block in model_map.blocks] == [None, None]
    assert observe(model) == ()
    plan = choose(model_map, min_dim=1)
    assert plan.projections.total == 2 * 4 + 1
    assert plan.formula.agrees
    assert not [each for each in specify(model_map, batch=1, length=8).rows if each.group == "ffn"]
    model.save_pretrained(tmp_path / "model")
    wanted = logits_of(model, IDS)
    for scheme, min_dim, bound in (("int8_block32", NOTHING, 1e-5), ("int8_block32", 1, 0.1)):
        export(tmp_path / "model", tmp_path / str(min_dim), scheme=scheme, min_dim=min_dim)
        decoder = open_decoder(tmp_path / str(min_dim), threads=1)
        assert error(decoder.logits(IDS), wanted).relative < bound
        assert error(one_by_one(decoder, IDS, prompt=PROMPT), wanted[:, PROMPT - 1 :]).relative < bound


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_what_a_forward_pass_shows(family):
    """Kind, activation, norm and placement of every family are seen without reading one name."""
    row = FAMILIES[family]
    for sizes in (dict(row.tiny), *({**row.tiny, **variant} for variant in row.variants)):
        model = with_separate_experts(build_tiny(row.tiny_class, sizes))
        model_map = map_module(model, name=family)
        blocks = [block for block in model_map.blocks if block.ffn]
        calls = {layer.block: layer.calls for layer in model_map.layers if layer.role is Role.FFN_DOWN}
        wanted = [
            (block.ffn.kind, block.ffn.activation, block.norm_kind, block.norm_placement, calls[block.name])
            for block in blocks
        ]
        seen = [
            (each.kind, each.activation, each.norm_kind, each.placement, each.calls)
            for each in observe(model)
        ]
        if model_map.num_experts:  # each expert that was chosen is seen
            assert set(seen) == set(wanted)
            continue
        num_pooling = int(bool(model_map.picture and model_map.picture.probe))  # an FFN behind the blocks
        assert seen[: len(seen) - num_pooling] == wanted


STRANGERS = {
    "gpt_neo": ("standard", "gelu_tanh", "layer_norm", "pre"),
    "mpt": ("standard", "gelu", "layer_norm", "pre"),
    "diffllama": ("gated", "silu", "rms_norm", "pre"),
    "persimmon": ("standard", "relu_squared", "layer_norm", "pre"),
    "ernie": ("standard", "gelu", "layer_norm", "post"),
}


@pytest.mark.parametrize("model_type", STRANGERS)
def test_a_family_without_a_row_is_told_too(model_type, tmp_path):
    """Of architectures that no table knows, from their configs alone and without a weight."""
    sizes = {**SIZES, "bos_token_id": 1, "eos_token_id": 2, "embedding_size": 64}
    sizes |= {"num_layers": 2, "attention_types": [[["global"], 2]]}  # of GPT-Neo
    (tmp_path / "config.json").write_text(
        json.dumps({**sizes, "model_type": model_type, "num_hidden_layers": 2})
    )
    seen = observe(build_on_meta(open_source(str(tmp_path))))
    found = {(each.kind, each.activation, each.norm_kind, each.placement) for each in seen}
    assert found == {STRANGERS[model_type]}
    assert len(seen) == 2
    notes = inspect(str(tmp_path)).notes
    assert [note for note in notes if note.startswith(f"a forward pass shows 2 x {seen[0].kind} FFN")]


@pytest.mark.once
def test_a_name_misleads_nobody():
    """A norm by another name is known by what it ignores, and a look-alike that is no norm is none."""

    class Quiet(torch.nn.Module):
        def __init__(self, *, centres):
            super().__init__()
            self.gain, self.centres = torch.nn.Parameter(torch.ones(8)), centres

        def forward(self, x):
            x = x - x.mean(-1, keepdim=True) if self.centres else x
            return self.gain * x / x.pow(2).mean(-1, keepdim=True).sqrt()

    class RmsNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.weight * x

    assert norm_kind_of(Quiet(centres=True)) == "layer_norm"
    assert norm_kind_of(Quiet(centres=False)) == "rms_norm"
    assert norm_kind_of(RmsNorm()) is None


@pytest.mark.once
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ffn_kind": "wide"}, "standard, gated"),
        ({"hidden_act": "mish"}, "relu, gelu"),
        ({"norm_placement": "none"}, "pre, post, sandwich"),
        ({"num_attention_heads": 3}, "hidden_size"),
        ({"num_key_value_heads": 3}, "divisor"),
        ({"intermediate_size": 0}, "1 or more"),
    ],
)
def test_what_means_nothing_is_refused_in_one_line(changes, told):
    with pytest.raises(InputError, match=told) as refused:
        ReferenceConfig(**{**SIZES, **changes})
    assert "\n" not in str(refused.value)
