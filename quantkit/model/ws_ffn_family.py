"""The row of the decoder with wsFFN: the reference's, and a projection that training alone runs."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.family_own import READ_NEXT, REFERENCE
from quantkit.model.family_records import ByConfig, Family
from quantkit.model.family_spellings import DOWN, GATE, LLAMA_ATTENTION, LLAMA_TINY, READ_BY_ATTENTION, UP
from quantkit.records import Role

READ_BY_WS_FFN = ("mlp.w3", "mlp.w1")

WS_FFN: Family = replace(
    REFERENCE,
    model_types=("ws_ffn",),
    stacks=(
        replace(
            REFERENCE.stacks[0],
            projections={
                **LLAMA_ATTENTION,
                "mlp.w3": (GATE,),
                "mlp.w1": (UP,),
                "mlp.latent": (Role.FFN_LATENT,),
                "mlp.w2": (DOWN,),
            },
            training_only={"mlp.latent": "num_latent_heads"},
            norms=ByConfig(
                key="norm_placement",
                absent="pre",
                values={
                    "pre": {"attention_norm": READ_BY_ATTENTION, "ffn_norm": READ_BY_WS_FFN},
                    "post": {"attention_norm": READ_BY_WS_FFN, "ffn_norm": READ_NEXT},
                    "sandwich": {
                        "attention_norm": READ_BY_ATTENTION,
                        "attention_output_norm": (),
                        "ffn_norm": READ_BY_WS_FFN,
                        "ffn_output_norm": (),
                    },
                },
            ),
            activation="mlp.activation",
        ),
    ),
    tiny_class="WsFfnForCausalLM",
    tiny={**LLAMA_TINY, "num_latent_heads": 4},
    variants=(
        {"norm_placement": "post", "norm_kind": "layer_norm", "tie_word_embeddings": True},
        {"norm_placement": "sandwich", "num_latent_heads": 3},
    ),
)
