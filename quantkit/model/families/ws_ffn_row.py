"""The row of the decoder with wsFFN: the reference's, and a projection that training alone runs."""

from __future__ import annotations

from dataclasses import replace

from quantkit.model.families.own import REFERENCE, norms_with
from quantkit.model.families.schema import Family
from quantkit.model.families.spellings import DOWN, GATE, LLAMA_ATTENTION, LLAMA_TINY, UP
from quantkit.model.model_map import Role

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
            norms=norms_with(("mlp.w3", "mlp.w1")),
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
