"""One contract over every row of the families table, against the real transformers modules.

The map says what a row's facts imply; the tracing oracle says what the modules do. They must agree on
every module, role, norm, mask and position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from examples import pictures_of, reads_pictures
from torch import nn
from tracing import Event, Trace, build_tiny, linears_of, roles_by_flow, run

from quantkit.model.families import FAMILIES
from quantkit.model.inspect import map_module
from quantkit.model.model_map import ATTENTION_ROLES, ROUTING_ROLES, Block, ModelMap, Norm, PositionKind, Role
from quantkit.model.names import checkpoint_name

LENGTH, ENCODER_LENGTH = 13, 17
CASES = [
    pytest.param(name, index, id=f"{name}-{index}" if index else name)
    for name, row in FAMILIES.items()
    for index in range(1 + len(row.variants))
]


@dataclass
class Subject:
    """One tiny model, its map, and a clean forward pass."""

    family: str
    model: nn.Module
    map: ModelMap
    inputs: dict
    trace: Trace
    live: dict[str, str]  # checkpoint name -> module name

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(self.live.get(name, name))

    def calls(self, name: str) -> list:
        return self.trace.module_calls.get(self.live.get(name, name), [])


SUBJECTS: dict[tuple[str, int], Subject] = {}


def make_subject(family: str, variant: int) -> Subject:
    if (family, variant) not in SUBJECTS:
        row = FAMILIES[family]
        changes = row.variants[variant - 1] if variant else {}
        model = build_tiny(row.tiny_class, {**row.tiny, **changes})
        inputs = make_inputs(model)
        SUBJECTS[family, variant] = Subject(
            family=family,
            model=model,
            map=map_module(model, name=family),
            inputs=inputs,
            trace=run(model, inputs),
            live={checkpoint_name(path, row): path for path, _ in model.named_modules()},
        )
    return SUBJECTS[family, variant]


def make_inputs(model: nn.Module, *, repeat: bool = False) -> dict:
    if reads_pictures(model):
        pictures = torch.from_numpy(pictures_of(model.config, 1, dtype=np.float64))
        return {"pixel_values": torch.ones_like(pictures) if repeat else pictures}
    generator = torch.Generator().manual_seed(1)
    is_pair = model.config.is_encoder_decoder
    length = ENCODER_LENGTH if is_pair else LENGTH
    tokens = torch.randint(5, 60, (1, length), generator=generator)
    inputs = {"input_ids": torch.full_like(tokens, 7) if repeat else tokens}
    if is_pair:
        decoder_tokens = torch.randint(5, 60, (1, LENGTH), generator=generator)
        inputs["decoder_input_ids"] = torch.full_like(decoder_tokens, 7) if repeat else decoder_tokens
    return inputs


def channels_of(layer) -> list[int]:
    rows = layer.rows
    return [rows.start + run_ * rows.stride + i for run_ in range(rows.count) for i in range(rows.length)]


@pytest.mark.parametrize(("family", "variant"), CASES)
class TestEveryFamily:
    def test_it_is_this_family(self, family, variant):
        subject = make_subject(family, variant)
        assert subject.map.family == family
        assert subject.map.model_type in FAMILIES[family].model_types

    def test_every_linear_is_mapped_once(self, family, variant):
        subject = make_subject(family, variant)
        expected = set(linears_of(subject.model))
        assert {subject.live.get(name, name) for name in subject.map.matrices} == expected
        assert {entry.name for entry in subject.map.unmapped} <= subject.map.placed
        assert not [note for note in subject.map.notes if "no role" in note]
        for matrix in subject.map.matrices:
            layers = [layer for layer in subject.map.layers if layer.matrix == matrix]
            covered = sorted(channel for layer in layers for channel in channels_of(layer))
            assert covered == list(range(len(covered)))
            weight = subject.module(matrix).weight
            assert weight.numel() == sum(layer.num_weights for layer in layers)
            assert all(
                (getattr(subject.module(matrix), "bias", None) is not None) == layer.has_bias
                for layer in layers
            )

    def test_every_role_is_what_the_values_do(self, family, variant):
        subject = make_subject(family, variant)
        projections = {
            layer.name: (subject.live.get(layer.matrix, layer.matrix), channels_of(layer))
            for layer in subject.map.layers
            if not subject.map.head_reads_one_token
            or layer.block  # a classifier's output looks like a head's
        }
        observed = roles_by_flow(subject.model, subject.inputs, projections)
        # What training alone runs reaches nothing here; its own tests look at it in training.
        expected = {layer.name: layer.role if layer.calls else Role.OTHER for layer in subject.map.layers}
        routing = {name for name, role in expected.items() if role in ROUTING_ROLES}
        for name in projections.keys() - routing - unchosen(subject):
            assert observed[name] == expected[name].value, name

    def test_cross_attention_reads_the_encoder(self, family, variant):
        subject = make_subject(family, variant)
        for layer in subject.map.layers:
            if layer.role in (Role.ATTENTION_KEY, Role.ATTENTION_VALUE):
                in_decoder = "decoder." in layer.block
                num_read = subject.calls(layer.matrix)[0][0].shape[1]
                is_long = num_read == ENCODER_LENGTH
                assert layer.is_cross_attention == (in_decoder and is_long and subject.map.is_encoder_decoder)

    def test_parameters_add_up(self, family, variant):
        subject = make_subject(family, variant)
        parts = [*subject.map.layers, *subject.map.embeddings]
        mapped = sum(part.num_new_parameters for part in parts)
        mapped += sum(norm.num_parameters for norm in subject.map.norms)
        mapped += sum(math.prod(entry.shape) for entry in subject.map.unmapped)
        assert mapped == subject.map.num_parameters == sum(p.numel() for p in subject.model.parameters())

    def test_ties_share_storage(self, family, variant):
        subject = make_subject(family, variant)
        for layer in subject.map.layers:
            pointer = subject.module(layer.matrix).weight.data_ptr()
            tables = {e.name: subject.module(e.name).weight.data_ptr() for e in subject.map.embeddings}
            shared = [name for name, table in tables.items() if table == pointer]
            assert shared == ([layer.tied_to] if layer.tied_to else [])

    def test_calls_are_counted(self, family, variant):
        subject = make_subject(family, variant)
        for entry in (*subject.map.layers, *subject.map.norms):
            name = getattr(entry, "matrix", entry.name)
            # Rows of distances depend on weights alone, and the same projections turn them once.
            expected = len([given for given, _ in subject.calls(name) if not is_of_distances(subject, given)])
            if isinstance(entry, Norm) and entry.place == "distance":
                expected = 1
            if name in unchosen(subject) or "head.attention." in name:  # torch reads its weight by itself
                continue
            if isinstance(entry, Norm) and name.endswith(("q_norm", "k_norm")):
                expected = 1
            assert entry.calls == expected, name
        depth = sum(block.calls for block in subject.map.blocks)
        config = subject.model.config
        assert depth == config.num_hidden_layers * (config.inner_group_num if family == "albert" else 1) + (
            getattr(config, "num_decoder_layers", getattr(config, "decoder_layers", 0))
            if subject.map.is_encoder_decoder
            else 0
        )

    def test_norms_feed_what_they_say(self, family, variant):
        subject = make_subject(family, variant)
        others = {layer.matrix for layer in subject.map.layers if layer.role is Role.OTHER}
        for norm in subject.map.norms:
            outputs = [output.flatten() for _, output in subject.calls(norm.name)]
            observed = {
                matrix
                for matrix in subject.map.matrices
                for given, _ in subject.calls(matrix)
                if any(equal_up_to(subject, matrix, given.flatten(), output) for output in outputs)
            }
            experts = {layer.matrix for layer in subject.map.layers if layer.expert is not None}
            assert set(norm.feeds) - experts <= observed, norm.name
            for matrix in set(norm.feeds) & experts:
                rows = {
                    tuple(row) for output in outputs for row in output.reshape(-1, norm.features).tolist()
                }
                given = [row for given, _ in subject.calls(matrix) for row in given.tolist()]
                assert rows.issuperset(map(tuple, given)), matrix
            assert observed - set(norm.feeds) <= others, norm.name

    def test_norm_kind_and_gain(self, family, variant):
        subject = make_subject(family, variant)
        offset = FAMILIES[family].norm_gain_offset
        for norm in subject.map.norms:
            module = subject.module(norm.name)
            x = torch.randn(3, norm.features, dtype=torch.float64)
            is_blind_to_mean = torch.allclose(module(x), module(x + 5.0), atol=1e-6)
            assert is_blind_to_mean == (norm.kind == "layer_norm"), norm.name
            if not norm.num_parameters:
                assert not list(module.parameters()), norm.name
                continue
            kept = module.weight.detach().clone()
            with torch.no_grad():
                module.weight.zero_()
                flat = (module(x) - module(x * 0)).abs().max().item() < 1e-12
                module.weight.copy_(kept)
            assert flat == (offset == 0.0), norm.name

    def test_placement(self, family, variant):
        subject = make_subject(family, variant)
        by_name = {norm.name: norm for norm in subject.map.norms}
        for block in subject.map.blocks:
            layers = [layer for layer in subject.map.layers if layer.block == block.name]
            query = next(layer for layer in layers if layer.role is Role.ATTENTION_QUERY)
            out = next(layer for layer in layers if layer.role is Role.ATTENTION_OUT)
            read = subject.calls(query.matrix)[0][0]
            own = [n for n in by_name.values() if n.block == block.name]
            if family == "modernbert" and block.index == 0:  # it reads what the embedding's norm gives
                own += [n for n in by_name.values() if n.place == "embedding"]
            is_pre = any(
                torch.equal(subject.calls(n.name)[0][1], read) for n in own if same(subject, n, read)
            )
            written = subject.calls(out.matrix)[0][1]
            is_sandwich = any(
                torch.equal(g, written)
                for n in own
                for g, _ in subject.calls(n.name)[:1]
                if g.shape == written.shape
            )
            expected = {
                "pre": (True, False),
                "post": (False, False),
                "output": (False, True),
                "sandwich": (True, True),
            }
            assert (is_pre, is_sandwich) == expected[block.norm_placement.value], block.name

    def test_residual_structure(self, family, variant):
        subject = make_subject(family, variant)
        for block in subject.map.blocks:
            layers = [layer for layer in subject.map.layers if layer.block == block.name]
            out = next(layer for layer in layers if layer.role is Role.ATTENTION_OUT)
            role = Role.ROUTER if block.mixture else Role.FFN_UP
            up = next((layer for layer in layers if layer.role is role), None)
            if up is None:  # attention alone, or the FFN of another block
                assert block.ffn is None
                continue
            name = subject.live.get(out.matrix, out.matrix)
            poisoned = run(subject.model, subject.inputs, poison=(name, channels_of(out)))
            name = subject.live.get(up.matrix, up.matrix)
            reaches = torch.isnan(poisoned.module_calls[name][0][0]).any().item()
            assert reaches == (block.residual == "sequential")

    def test_ffn_computes_what_it_is_called(self, family, variant):
        subject = make_subject(family, variant)
        for block, expert in ffns_of(subject):
            layers = {
                layer.role: layer
                for layer in subject.map.layers
                if layer.block == block.name and layer.expert == expert
            }
            values = {
                role: output_of(subject, layers[role])
                for role in (Role.FFN_GATE, Role.FFN_UP)
                if role in layers
            }
            if block.ffn is None:
                assert not values
                continue
            curve = CURVES[block.ffn.activation.value]
            up = values[Role.FFN_UP]
            expected = curve(values[Role.FFN_GATE]) * up if block.ffn.kind == "gated" else curve(up)
            observed = subject.calls(layers[Role.FFN_DOWN].matrix)[0][0].numpy()
            np.testing.assert_allclose(observed.reshape(expected.shape), expected, rtol=1e-9, atol=1e-9)
            is_shared = block.mixture and expert is None
            assert is_shared or block.ffn.hidden_features == observed.shape[-1]

    def test_attention_shape_mask_and_softcap(self, family, variant):
        subject = make_subject(family, variant)
        if subject.map.blocks[0].calls > 1:
            pytest.skip("a shared block has one attention record for all of its calls")
        for attention, (scores, softmax, _) in attentions_of(subject):
            left = scores.inputs[0]
            assert left.shape[-1] == attention.head_dim
            assert left.reshape(-1, *left.shape[-2:]).shape[0] == attention.num_heads
            probabilities = softmax.output.reshape(-1, *softmax.output.shape[-2:])[0]
            num_queries, num_keys = probabilities.shape
            rows, columns = np.indices((num_queries, num_keys))
            visible = np.ones((num_queries, num_keys), dtype=bool)
            if attention.is_causal:
                visible &= columns <= rows
            if attention.window:
                visible &= (rows - columns if attention.is_causal else abs(rows - columns)) < attention.window
            assert ((probabilities.numpy() > 1e-30) == visible).all()
            raw = scores.output.reshape(softmax.inputs[0].shape)
            masked = softmax.inputs[0][..., torch.from_numpy(visible)]
            if attention.softcap:
                assert masked.abs().max() <= attention.softcap
                assert (raw.abs().max() > 0).item()

    def test_kv_heads(self, family, variant):
        subject = make_subject(family, variant)
        for block in subject.map.blocks:
            for layer in subject.map.layers:
                if layer.block == block.name and layer.role in (Role.ATTENTION_KEY, Role.ATTENTION_VALUE):
                    attention = next(a for a in block.attentions if a.is_cross == layer.is_cross_attention)
                    assert layer.out_features == attention.num_kv_heads * attention.head_dim

    def test_positions(self, family, variant):
        subject = make_subject(family, variant)
        repeated = run(subject.model, make_inputs(subject.model, repeat=True))
        stray = Subject(family, subject.model, subject.map, {}, repeated, subject.live)
        block = subject.map.blocks[0]
        attention, (scores, softmax, _) = attentions_of(stray)[0]
        query = next(layer for layer in subject.map.layers if layer.role is Role.ATTENTION_QUERY)
        read = stray.calls(query.matrix)[0][0][0]
        input_varies = varies(read)
        left = scores.inputs[0].reshape(-1, *scores.inputs[0].shape[-2:])[0]
        bias = softmax.inputs[0].reshape(-1, *softmax.inputs[0].shape[-2:])[0][-1]
        observed = observe_position(input_varies, varies(left), bias)
        assert attention.position is observed, block.name
        if observed is PositionKind.ROPE:
            assert ((left - left[:1]).abs().max(dim=0).values > 1e-9).sum().item() == attention.rotary_dim
        has_table = any(e.kind == "position" for e in subject.map.embeddings)
        assert (has_table or subject.map.picture is not None) == (attention.position is PositionKind.LEARNED)

    def test_query_key_norm(self, family, variant):
        subject = make_subject(family, variant)
        attention, (scores, _, _) = attentions_of(subject)[0]
        query = next(layer for layer in subject.map.layers if layer.role is Role.ATTENTION_QUERY)
        projected = output_of(subject, query)[0, 0].reshape(attention.num_heads, attention.head_dim)
        if attention.clip:
            projected = projected.clip(-attention.clip, attention.clip)
        used = scores.inputs[0].reshape(attention.num_heads, -1, attention.head_dim)[:, 0].numpy()
        ratio = used / projected  # position 0 is not rotated: a plain query differs by one scale at most
        is_plain = np.ptp(ratio) < 1e-6 * abs(ratio).max()  # some classes rotate in float32
        assert is_plain != attention.has_query_key_norm

    def test_embedding_scale_and_offset(self, family, variant):
        subject = make_subject(family, variant)
        row = FAMILIES[family]
        for table in subject.map.embeddings:
            if table.kind == "position":
                first = subject.trace.module_calls[table.name][0][1].reshape(-1, table.num_columns)[0]
                weight = subject.module(table.name).weight
                assert torch.equal(first, weight[subject.map.position_offset])
                assert subject.map.context == table.num_rows - subject.map.position_offset
        if subject.map.picture:
            first = next(norm for norm in subject.map.norms if norm.block)
            assert subject.map.context == subject.calls(first.name)[0][0].shape[1]
        if row.scales_embedding is True or row.embedding_multiplier:
            tokens = subject.inputs["input_ids"]
            name = subject.map.embeddings[0].name
            plain = subject.module(name).weight[tokens]
            first_norm = next(norm for norm in subject.map.norms if norm.block and norm.feeds)
            given = subject.calls(first_norm.name)[0][0]
            field = row.embedding_multiplier
            factor = getattr(subject.model.config, field) if field else math.sqrt(subject.map.hidden_size)
            assert subject.map.embedding_scale == pytest.approx(factor)
            torch.testing.assert_close(given, plain * subject.map.embedding_scale, rtol=1e-6, atol=1e-6)
        elif row.scales_embedding:  # by the config, and positions are added
            tables = {e.kind: e.name for e in subject.map.embeddings if "decoder." not in e.name}
            tokens = subject.inputs["input_ids"]
            plain = subject.module(tables["token"]).weight[tokens]
            rows = slice(row.position_offset, row.position_offset + tokens.shape[1])
            norms = [n.name for n in subject.map.norms if n.place in ("embedding", "before_attention")]
            embedding = [name for name in norms if name.endswith("layernorm_embedding")]
            first = (embedding or norms or [subject.map.layers[0].matrix])[0]
            factor = math.sqrt(subject.map.hidden_size) if subject.model.config.scale_embedding else None
            assert subject.map.embedding_scale == factor
            expected = plain * (factor or 1) + subject.module(tables["position"]).weight[rows]
            torch.testing.assert_close(subject.calls(first)[0][0], expected, rtol=1e-6, atol=1e-6)
        else:
            assert subject.map.embedding_scale is None


def unchosen(subject: Subject) -> set[str]:
    """Projections of experts that no token chose."""
    experts = (layer for layer in subject.map.layers if layer.expert is not None)
    return {layer.name for layer in experts if not subject.calls(layer.matrix)}


def ffns_of(subject: Subject) -> list[tuple[Block, int | None]]:
    """Each block with each of its experts that some token chose; None for an FFN of all tokens."""
    missing = unchosen(subject)
    layers = [layer for layer in subject.map.layers if layer.name not in missing]
    downs = [layer for layer in layers if layer.role is Role.FFN_DOWN]
    return [
        (block, expert)
        for block in subject.map.blocks
        for expert in {layer.expert for layer in downs if layer.block == block.name} or {None}
    ]


def equal_up_to(subject: Subject, matrix: str, given: torch.Tensor, output: torch.Tensor) -> bool:
    """Equal bit for bit, but for the scale that the map says a head's input is given."""
    is_head = any(layer.matrix == matrix and layer.role is Role.LM_HEAD for layer in subject.map.layers)
    scale = subject.map.head_scale if is_head and subject.map.head_scale else 1.0
    if given.shape != output.shape:
        return False
    return torch.equal(given, output) if scale == 1.0 else torch.allclose(given, output * scale, rtol=1e-12)


def same(subject: Subject, norm: Norm, read: torch.Tensor) -> bool:
    calls = subject.calls(norm.name)
    return bool(calls) and calls[0][1].shape == read.shape


def output_of(subject: Subject, layer) -> np.ndarray:
    return subject.calls(layer.matrix)[0][1][..., channels_of(layer)].numpy()


def varies(rows: torch.Tensor) -> bool:
    return bool((rows - rows[:1]).abs().max() > 1e-9)


def observe_position(input_varies: bool, query_varies: bool, last_row: torch.Tensor) -> PositionKind:
    """What kind of positions these are, when every token is the same."""
    if input_varies:
        return PositionKind.LEARNED
    if query_varies:
        return PositionKind.ROPE
    steps = last_row[1:] - last_row[:-1]
    if last_row.std() < 1e-9:
        return PositionKind.NONE
    return PositionKind.ALIBI if steps.std() < 1e-9 else PositionKind.RELATIVE


def is_of_distances(subject: Subject, given: torch.Tensor) -> bool:
    scores = subject.map.distance_scores
    return scores is not None and given.shape[-2] == 2 * scores.reach


def scores_before(events: list[Event], softmax: int) -> Event:
    """The last product of queries and keys; scores of distances have as many columns as their table rows."""
    wanted = events[softmax].inputs[0].numel()
    return next(e for e in reversed(events[:softmax]) if e.kind == "matmul" and e.output.numel() == wanted)


def attentions_of(subject: Subject) -> list[tuple]:
    """(record, (scores, softmax, context)) of each attention, in the order in which they ran."""
    events: list[Event] = [e for e in subject.trace.events if e.kind in ("matmul", "softmax")]
    triples = [
        (scores_before(events, i), events[i], events[i + 1])
        for i, event in enumerate(events)
        if event.kind == "softmax" and event.inputs[0].dim() > 2  # a router's has two dimensions
    ]
    records = [attention for block in subject.map.blocks for attention in block.attentions * block.calls]
    assert len(records) == len(triples)
    return list(zip(records, triples, strict=True))


CURVES = {
    "relu": lambda x: np.maximum(x, 0.0),
    "relu_squared": lambda x: np.maximum(x, 0.0) ** 2,
    "gelu": lambda x: 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1.0 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
}


def test_the_oracle_can_fail():
    """A row with two roles swapped must not pass: the oracle sees the difference."""
    subject = make_subject("llama", 0)
    layers = {layer.role: layer for layer in subject.map.layers}
    swapped = {
        "gate": (layers[Role.FFN_UP].matrix, channels_of(layers[Role.FFN_UP])),
        "up": (layers[Role.FFN_GATE].matrix, channels_of(layers[Role.FFN_GATE])),
        "down": (layers[Role.FFN_DOWN].matrix, channels_of(layers[Role.FFN_DOWN])),
    }
    observed = roles_by_flow(subject.model, subject.inputs, swapped)
    assert observed["gate"] == "ffn_up"
    assert observed["up"] == "ffn_gate"
    assert all(role in {r.value for r in (*ATTENTION_ROLES, *Role)} for role in observed.values())
