"""Model maps written by hand for the cost tests: true shapes of published models, or small ones of a kind.

They owe nothing to the walk that maps real modules, so neither can hide the mistakes of the other.
"""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.model_map import (
    Activation,
    Attention,
    Block,
    Embedding,
    EmbeddingKind,
    FeedForward,
    FfnKind,
    Layer,
    ModelMap,
    Norm,
    NormKind,
    NormPlacement,
    PositionKind,
    Residual,
    Role,
    Rows,
    UnmappedParameter,
)

Q, K, V, OUT = Role.ATTENTION_QUERY, Role.ATTENTION_KEY, Role.ATTENTION_VALUE, Role.ATTENTION_OUT


def linear(
    name: str, role: Role, features_in: int, features_out: int, block: str | None = None, **more
) -> Layer:
    more = {"has_bias": False, "matrix": name, "stored_as": "linear", **more}
    rows = Rows(start=0, length=features_out, stride=features_out)
    shape = {"in_features": features_in, "out_features": features_out}
    return Layer(name=name, role=role, **shape, rows=rows, block=block, **more)


def projections(block: str, path: str, hidden: int, width: int, kv_width: int, **more) -> list[Layer]:
    """Query, key, value and output of one attention."""
    shapes = ((Q, hidden, width), (K, hidden, kv_width), (V, hidden, kv_width), (OUT, width, hidden))
    return [
        linear(f"{block}.{path}.{name}", *shape, block, **more)
        for name, shape in zip("qkvo", shapes, strict=True)
    ]


def table(name: str, rows: int, columns: int, kind: EmbeddingKind = EmbeddingKind.TOKEN, **more) -> Embedding:
    return Embedding(name=name, kind=kind, num_rows=rows, num_columns=columns, **more)


def model_map(layers: list[Layer], embeddings: list[Embedding], norms: list[Norm], **more) -> ModelMap:
    unmapped = more.pop("unmapped", ())
    counted = sum(item.num_new_parameters for item in (*layers, *embeddings))
    counted += sum(norm.num_parameters for norm in norms)
    facts = {
        "name": "test",
        "model_type": "test",
        "architecture": "Test",
        "family": "test",
        "vocab_size": None,
        "max_positions": None,
        "is_encoder_decoder": False,
        "has_tied_head": True,
        "embedding_scale": None,
        "head_scale": None,
        "final_softcap": None,
        "notes": (),
        "hidden_size": None,
        "blocks": (),
        "num_parameters": counted + sum(item.shape[0] for item in unmapped),
        **more,
    }
    return ModelMap(
        layers=tuple(layers), embeddings=tuple(embeddings), norms=tuple(norms), unmapped=unmapped, **facts
    )


def gpt2_map(residual: Residual = Residual.SEQUENTIAL) -> ModelMap:
    """GPT-2 small: the query, key and value of each block share the matrix `c_attn`."""
    d, layers, norms, blocks = 768, [], [], []
    layer_norm = {"kind": NormKind.LAYER_NORM, "features": d, "num_parameters": 2 * d}
    for index in range(12):
        block = f"transformer.h.{index}"
        c_attn = f"{block}.attn.c_attn"
        roles = {"query": Q, "key": K, "value": V}
        layers += [
            linear(f"{c_attn}[{part}]", role, d, d, block, matrix=c_attn, has_bias=True)
            for part, role in roles.items()
        ]
        layers.append(linear(f"{block}.attn.c_proj", OUT, d, d, block, has_bias=True))
        layers.append(linear(f"{block}.mlp.c_fc", Role.FFN_UP, d, 4 * d, block, has_bias=True))
        layers.append(linear(f"{block}.mlp.c_proj", Role.FFN_DOWN, 4 * d, d, block, has_bias=True))
        norms.append(Norm(name=f"{block}.ln_1", block=block, feeds=(c_attn,), **layer_norm))
        norms.append(Norm(name=f"{block}.ln_2", block=block, feeds=(f"{block}.mlp.c_fc",), **layer_norm))
        attention = Attention(num_heads=12, num_kv_heads=12, head_dim=64, position=PositionKind.LEARNED)
        ffn = FeedForward(kind=FfnKind.STANDARD, activation=Activation.GELU_TANH, hidden_features=4 * d)
        blocks.append(
            Block(
                name=block,
                stack="decoder",
                index=index,
                calls=1,
                attentions=(attention,),
                ffn=ffn,
                norm_kind=NormKind.LAYER_NORM,
                norm_placement=NormPlacement.PRE,
                residual=residual,
            )
        )
    layers.append(linear("lm_head", Role.LM_HEAD, d, 50257, tied_to="transformer.wte"))
    norms.append(Norm(name="transformer.ln_f", feeds=("lm_head",), **layer_norm))
    tables = [
        table("transformer.wte", 50257, d),
        table("transformer.wpe", 1024, d, EmbeddingKind.POSITION),
    ]
    return model_map(layers, tables, norms, blocks=tuple(blocks), hidden_size=d, max_positions=1024)


def gemma_map(hidden: int = 1152, ffn_width: int = 6912) -> ModelMap:
    """Gemma 3 1B: grouped queries, a window of 512 on five layers of six, norms on both sides."""
    layers, norms, blocks = [], [], []
    for index in range(26):
        block = f"model.layers.{index}"
        own = projections(block, "self_attn", hidden, 4 * 256, 256)
        gate, up, down = (f"{block}.mlp.{name}_proj" for name in ("gate", "up", "down"))
        layers += [*own, linear(gate, Role.FFN_GATE, hidden, ffn_width, block)]
        layers.append(linear(up, Role.FFN_UP, hidden, ffn_width, block))
        layers.append(linear(down, Role.FFN_DOWN, ffn_width, hidden, block))
        readers = {
            "self_attn.q_norm": (),
            "self_attn.k_norm": (),
            "input_layernorm": tuple(layer.name for layer in own[:3]),
            "post_attention_layernorm": (),
            "pre_feedforward_layernorm": (gate, up),
            "post_feedforward_layernorm": (),
        }
        for name, feeds in readers.items():
            size = 256 if "self_attn" in name else hidden
            shape = {"kind": NormKind.RMS_NORM, "features": size, "num_parameters": size}
            norms.append(Norm(name=f"{block}.{name}", block=block, feeds=feeds, **shape))
        attention = Attention(
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            position=PositionKind.ROPE,
            window=None if index % 6 == 5 else 512,
            has_query_key_norm=True,
        )
        ffn = FeedForward(kind=FfnKind.GATED, activation=Activation.GELU_TANH, hidden_features=ffn_width)
        blocks.append(
            Block(
                name=block,
                stack="decoder",
                index=index,
                calls=1,
                attentions=(attention,),
                ffn=ffn,
                norm_kind=NormKind.RMS_NORM,
                norm_placement=NormPlacement.SANDWICH,
                residual=Residual.SEQUENTIAL,
            )
        )
    layers.append(linear("lm_head", Role.LM_HEAD, hidden, 262144, tied_to="model.embed_tokens"))
    shape = {"kind": NormKind.RMS_NORM, "features": hidden, "num_parameters": hidden}
    norms.append(Norm(name="model.norm", feeds=("lm_head",), **shape))
    tables = [table("model.embed_tokens", 262144, hidden)]
    more = {"embedding_scale": hidden**0.5, "hidden_size": hidden}
    return model_map(layers, tables, norms, blocks=tuple(blocks), **more)


def t5_map() -> ModelMap:
    """T5: an encoder, a decoder with cross attention, one table for both, one bias table in each."""
    d, layers, norms, blocks = 64, [], [], []
    rms = {"kind": NormKind.RMS_NORM, "features": d, "num_parameters": d}
    tables = [table("shared", 100, d)]
    for stack in ("encoder", "decoder"):
        tables.append(table(f"{stack}.block.0.relative_attention_bias", 32, 4, EmbeddingKind.OTHER))
        for index in range(2):
            block = f"{stack}.block.{index}"
            own = projections(block, "layer.0", d, d, d)
            cross = projections(block, "layer.1", d, d, d, is_cross_attention=True) * (stack == "decoder")
            up = linear(f"{block}.ffn.wi", Role.FFN_UP, d, 128, block)
            layers += [*own, *cross, up, linear(f"{block}.ffn.wo", Role.FFN_DOWN, 128, d, block)]
            readers = [own[:3], cross[:1], [up]] if cross else [own[:3], [up]]
            norms += [
                Norm(
                    name=f"{block}.{place}.layer_norm", block=block, feeds=tuple(r.name for r in feeds), **rms
                )
                for place, feeds in enumerate(readers)
            ]
            shape = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
            attentions = [
                Attention(position=PositionKind.RELATIVE, is_causal=stack == "decoder", **shape),
                Attention(position=PositionKind.NONE, is_causal=False, is_cross=True, **shape),
            ]
            blocks.append(
                Block(
                    name=block,
                    stack=stack,
                    index=index,
                    calls=1,
                    attentions=tuple(attentions if cross else attentions[:1]),
                    ffn=FeedForward(kind=FfnKind.STANDARD, activation=Activation.RELU, hidden_features=128),
                    norm_kind=NormKind.RMS_NORM,
                    norm_placement=NormPlacement.PRE,
                    residual=Residual.SEQUENTIAL,
                )
            )
        norms.append(Norm(name=f"{stack}.final_layer_norm", **rms))
    layers.append(linear("lm_head", Role.LM_HEAD, d, 100, tied_to="shared"))
    return model_map(
        layers,
        tables,
        norms,
        blocks=tuple(reversed(blocks)),
        is_encoder_decoder=True,
        hidden_size=d,
        head_scale=d**-0.5,
    )


def albert_map() -> ModelMap:
    """ALBERT: one post-norm block that runs 12 times, narrow embeddings, a projection before the head."""
    d, block = 768, "albert.encoder.layer"
    shared = {"block": block, "calls": 12}
    own = [replace(layer, calls=12) for layer in projections(block, "attention", d, d, d, has_bias=True)]
    up = linear(f"{block}.ffn", Role.FFN_UP, d, 3072, has_bias=True, **shared)
    down = linear(f"{block}.ffn_output", Role.FFN_DOWN, 3072, d, has_bias=True, **shared)
    layers = [
        linear("albert.encoder.embedding_hidden_mapping_in", Role.OTHER, 128, d, has_bias=True),
        *(*own, up, down),
        linear("predictions.dense", Role.OTHER, d, 128, has_bias=True),
        linear(
            "predictions.decoder", Role.LM_HEAD, 128, 30000, has_bias=True, tied_to="albert.word_embeddings"
        ),
    ]
    wide = {"kind": NormKind.LAYER_NORM, "features": d, "num_parameters": 2 * d, **shared}
    narrow = {"kind": NormKind.LAYER_NORM, "features": 128, "num_parameters": 256}
    norms = [
        Norm(name="albert.embeddings.LayerNorm", feeds=(layers[0].name,), **narrow),
        Norm(name=f"{block}.full_layer_layer_norm", feeds=tuple(layer.name for layer in own[:3]), **wide),
        Norm(name=f"{block}.attention.LayerNorm", feeds=(up.name,), **wide),
        Norm(name="predictions.LayerNorm", feeds=("predictions.decoder",), **narrow),
    ]
    tables = [
        table("albert.token_type_embeddings", 2, 128, EmbeddingKind.TOKEN_TYPE),
        table("albert.word_embeddings", 30000, 128),
        table("albert.position_embeddings", 512, 128, EmbeddingKind.POSITION),
    ]
    attention = Attention(
        num_heads=12, num_kv_heads=12, head_dim=64, position=PositionKind.LEARNED, is_causal=False
    )
    only = Block(
        name=block,
        stack="encoder",
        index=0,
        calls=12,
        attentions=(attention,),
        ffn=FeedForward(kind=FfnKind.STANDARD, activation=Activation.GELU_TANH, hidden_features=3072),
        norm_kind=NormKind.LAYER_NORM,
        norm_placement=NormPlacement.POST,
        residual=Residual.SEQUENTIAL,
    )
    return model_map(layers, tables, norms, blocks=(only,), hidden_size=d)


def unknown_map() -> ModelMap:
    """An architecture without a family: projections, a table, a norm and a loose parameter."""
    layers = [linear("a", Role.OTHER, 8, 16, has_bias=True), linear("b", Role.OTHER, 16, 8)]
    norm = Norm(name="norm", kind=NormKind.LAYER_NORM, features=8, num_parameters=16)
    loose = (UnmappedParameter(name="token", shape=(24,)),)
    return model_map(layers, [table("embed", 50, 8)], [norm], unmapped=loose, family=None)


MAPS = {f.__name__: f() for f in (gpt2_map, gemma_map, t5_map, albert_map, unknown_map)}
