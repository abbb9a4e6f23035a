"""A complete decoder whose blocks hold wsFFN; attention, cache and saving come from the reference.

In training `forward` with labels gives the three losses beside their sum. The auxiliary loss of each block is
fetched after the blocks have run, so a block still hands on one value and exporting sees an ordinary FFN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from quantkit.errors import InputError
from quantkit.model.architectures.reference import (
    ReferenceConfig,
    ReferenceForCausalLM,
    ReferenceModel,
    ReferencePreTrainedModel,
)
from quantkit.model.architectures.ws_ffn import BlockDiagonalStart, Config, logits_z_loss, wsFFN

FIXED = {"ffn_kind": "gated", "hidden_act": "silu", "uses_bias": False}  # what wsFFN is


class WsFfnConfig(ReferenceConfig):
    """The reference's fields, and those of wsFFN; `num_latent_heads` is its n_head."""

    model_type = "ws_ffn"

    def __init__(
        self,
        num_latent_heads: int = 4,
        lambda_z: float = 1e-5,
        lambda_c: float = 5e-3,
        lambda_logits_z: float = 1e-4,
        tau: float = 0.07,
        use_aux_loss: bool = True,
        **kwargs: Any,
    ) -> None:
        """Sizes that no wsFFN can have are refused here, before anything is built."""
        self.num_latent_heads = num_latent_heads
        self.lambda_z = lambda_z
        self.lambda_c = lambda_c
        self.lambda_logits_z = lambda_logits_z
        self.tau = tau
        self.use_aux_loss = use_aux_loss
        for name, value in FIXED.items():
            if kwargs.setdefault(name, value) != value:
                raise InputError(
                    f"{name} is {kwargs[name]!r}", where="WsFfnConfig", allowed=f"{value!r}, which wsFFN is"
                )
        super().__init__(**kwargs)
        ffn_config(self)


def ffn_config(config: WsFfnConfig) -> Config:
    """The part of the config that one FFN reads."""
    return Config(
        d_model=config.hidden_size,
        d_ffn=config.intermediate_size,
        n_head=config.num_latent_heads,
        lambda_z=config.lambda_z,
        lambda_c=config.lambda_c,
        lambda_logits_z=config.lambda_logits_z,
        tau=config.tau,
        use_aux_loss=config.use_aux_loss,
    )


class BlockFfn(wsFFN):
    """wsFFN as a block calls it: one value comes out, and the loss waits until the model fetches it."""

    loss: Tensor | None = None

    def forward(self, x_BLD: Tensor) -> Tensor:  # type: ignore[override]
        """The output alone."""
        output, self.loss = super().forward(x_BLD)
        return output

    def fetch_loss(self) -> Tensor | None:
        """The loss of the last pass, once: keeping it would keep that pass's whole graph."""
        loss, self.loss = self.loss, None
        return loss


class WsFfnPreTrainedModel(ReferencePreTrainedModel):  # type: ignore[no-untyped-call]
    """The latent's start must survive the initialisation that transformers does for every linear."""

    config_class = WsFfnConfig  # type: ignore[assignment]

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, BlockDiagonalStart):
            super()._init_weights(module)  # type: ignore[no-untyped-call]
        elif not getattr(module.weight, "_is_hf_initialized", False):  # transformers 5 marks what it loaded
            module.start()


class WsFfnModel(WsFfnPreTrainedModel, ReferenceModel):  # type: ignore[no-untyped-call]
    """The blocks, without a head."""

    def __init__(self, config: WsFfnConfig) -> None:
        """One wsFFN for each block."""
        ReferenceModel.__init__(self, config, lambda whole: BlockFfn(ffn_config(whole)))

    def ffns(self) -> list[BlockFfn]:
        """The FFN of every block, in order."""
        return [module for module in self.modules() if isinstance(module, BlockFfn)]


@dataclass
class WsFfnOutput(CausalLMOutputWithPast):
    """What a causal language model gives, and its losses by name: total, main, wsffn_aux, z."""

    losses: dict[str, Tensor] | None = None


class WsFfnForCausalLM(WsFfnPreTrainedModel, ReferenceForCausalLM):  # type: ignore[misc, no-untyped-call]
    """The model with its head."""

    def __init__(self, config: WsFfnConfig) -> None:
        """As the reference, around another base model."""
        ReferencePreTrainedModel.__init__(self, config)
        self.model = WsFfnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> WsFfnOutput:
        """As the reference, whose names generation looks for; `total` is `main` where nothing else trains."""
        output: Any = super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            labels,
            use_cache,
            logits_to_keep,
        )
        aux = [loss for ffn in self.model.ffns() if (loss := ffn.fetch_loss()) is not None]
        losses = None if output.loss is None else self.losses(output.loss, output.logits, aux)
        return WsFfnOutput(
            loss=losses["total"] if losses else None,  # type: ignore[arg-type]
            losses=losses,
            logits=output.logits,
            past_key_values=output.past_key_values,
        )

    def losses(self, main: Tensor, logits: Tensor, aux: list[Tensor]) -> dict[str, Tensor]:
        """Each loss of a pass; that of the FFNs is their sum over blocks."""
        zero = main.new_zeros(())
        wsffn_aux = torch.stack(aux).sum() if aux else zero
        z = logits_z_loss(logits, self.config.lambda_logits_z) if aux else zero
        return {"total": main + wsffn_aux + z, "main": main, "wsffn_aux": wsffn_aux, "z": z}

    def latents(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """What the latent path of every block computes from this text, [B, L, n_head, z_dim] each."""
        found: list[Tensor] = []

        def keep(ffn: BlockFfn, args: tuple[Tensor], _: Tensor) -> None:
            found.append(ffn.latents(args[0]))

        handles = [ffn.register_forward_hook(keep) for ffn in self.model.ffns()]
        try:
            self.model(input_ids, attention_mask)
        finally:
            for handle in handles:
                handle.remove()
        return found


AutoConfig.register(WsFfnConfig.model_type, WsFfnConfig)
AutoModelForCausalLM.register(WsFfnConfig, WsFfnForCausalLM)
