"""A gated FFN with a parallel latent projection that only training runs, and a decoder built of it.

For x of [B, L, d_model]: h1 = x W1, h2 = x W3, output = (SiLU(h2) * h1) W2, as any SwiGLU FFN
(https://arxiv.org/abs/2002.05202). Beside it one linear d_ffn -> d_ffn turns h1 into n_head latents of
d_ffn / n_head. Its weight starts block-diagonal over the heads, so that they start out independent, and
is dense for the optimizer, so that they may drift; that also makes it one product and not n_head.
Two losses read the latents: their squared length, and InfoNCE over heads (https://arxiv.org/abs/1807.03748)
with each head's similarity to itself as the positive, which pushes different heads apart. The output never
reads them: without the losses, and outside of training, nothing of the latent path is computed.

The decoder around it takes attention, cache and saving from the reference. In training its `forward` with
labels gives each loss beside their sum. The auxiliary loss of each block is fetched after all blocks
have run, so a block still returns one tensor and the exporter finds an ordinary FFN.

Shapes: B batch, L length, F d_ffn, H n_head, Z = F / H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from quantkit.errors import InputError
from quantkit.model.architectures.reference import (
    ReferenceConfig,
    ReferenceForCausalLM,
    ReferenceModel,
    ReferencePreTrainedModel,
)

FIXED = {"ffn_kind": "gated", "hidden_act": "silu", "uses_bias": False}  # by the definition of wsFFN


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    d_model: int
    d_ffn: int
    n_head: int
    lambda_z: float = 1e-5
    lambda_c: float = 5e-3
    lambda_logits_z: float = 1e-4  # of the whole model's logits; the FFN itself has none
    tau: float = 0.07
    use_aux_loss: bool = True

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ffn", "n_head"):
            if getattr(self, name) < 1:
                raise InputError(f"{getattr(self, name)} is no size", where=name, allowed="1 or more")
        if self.d_ffn % self.n_head:
            near = [h for h in range(1, self.d_ffn + 1) if self.d_ffn % h == 0]
            near = sorted(sorted(near, key=lambda h: abs(h - self.n_head))[:4])
            raise InputError(
                f"d_ffn {self.d_ffn} does not divide into n_head {self.n_head} latent heads",
                where="wsFFN",
                allowed=f"n_head {', '.join(map(str, near))}, or any other divisor of d_ffn",
                next_step="change one; config.json has them as intermediate_size and num_latent_heads",
            )
        if not self.tau > 0:
            raise InputError(f"{self.tau} is no temperature", where="tau", allowed="a number above 0")

    @property
    def z_dim(self) -> int:
        return self.d_ffn // self.n_head


class BlockDiagonalStart(nn.Linear):
    """A dense linear whose weight starts as `num_blocks` blocks on the diagonal and zero elsewhere."""

    def __init__(self, features: int, num_blocks: int) -> None:
        super().__init__(features, features, bias=False)
        self.num_blocks = num_blocks
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Each diagonal block starts as a linear of its size; all other weights are exact zeros."""
        width = self.in_features // self.num_blocks
        self.weight.zero_()
        for start in range(0, self.in_features, width):
            self.weight[start : start + width, start : start + width].uniform_(-(width**-0.5), width**-0.5)


class wsFFN(nn.Module):
    """The FFN: `forward(x)` returns (output, auxiliary loss or None)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.w1 = nn.Linear(config.d_model, config.d_ffn, bias=False)
        self.w3 = nn.Linear(config.d_model, config.d_ffn, bias=False)
        self.w2 = nn.Linear(config.d_ffn, config.d_model, bias=False)
        self.latent = BlockDiagonalStart(config.d_ffn, config.n_head)
        self.activation = nn.SiLU()

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output, L_Z + L_C); outside of training the loss is None and the latent path is not computed."""
        h1_BLF = self.w1(x_BLD)
        output = self.w2(self.activation(self.w3(x_BLD)) * h1_BLF)
        if not (self.training and self.config.use_aux_loss):
            return output, None
        return output, auxiliary_loss(self.heads(h1_BLF), self.config)

    def heads(self, h1_BLF: Tensor) -> Tensor:
        z_BLF: Tensor = self.latent(h1_BLF)
        return z_BLF.reshape(*z_BLF.shape[:-1], self.config.n_head, self.config.z_dim)

    def latents(self, x_BLD: Tensor) -> Tensor:
        """The latents of x, in training or not."""
        return self.heads(self.w1(x_BLD))


def auxiliary_loss(z_BLHZ: Tensor, config: Config) -> Tensor:
    z_BLHZ = _at_least_float32(z_BLHZ)
    return length_loss(z_BLHZ, config.lambda_z) + contrastive_loss(z_BLHZ, config.lambda_c, config.tau)


def length_loss(z_BLHZ: Tensor, lambda_z: float) -> Tensor:
    """L_Z: lambda_z times the mean over B*L*H rows of ||z||^2."""
    return lambda_z * z_BLHZ.square().sum(-1).mean()


def contrastive_loss(z_BLHZ: Tensor, lambda_c: float, tau: float) -> Tensor:
    """L_C: InfoNCE of the B*H sequence means, each one's similarity to itself as the positive."""
    rows_NZ = z_BLHZ.mean(dim=1).flatten(0, 1)
    scores_NN = cosine_similarities(rows_NZ) / tau
    return lambda_c * (scores_NN.logsumexp(dim=1) - scores_NN.diagonal()).mean()


def cosine_similarities(rows_NZ: Tensor) -> Tensor:
    unit_NZ = functional.normalize(rows_NZ, dim=-1)
    return unit_NZ @ unit_NZ.T


def logits_z_loss(logits: Tensor, lambda_logits_z: float) -> Tensor:
    """lambda_logits_z times mean(logsumexp(logits)^2) of detached logits: reported, without a gradient."""
    return lambda_logits_z * _at_least_float32(logits.detach()).logsumexp(dim=-1).square().mean()


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


class WsFfnConfig(ReferenceConfig):
    """The fields of the reference and of wsFFN; `num_latent_heads` is its n_head."""

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
    """wsFFN inside a block: returns the output alone and keeps the loss until `fetch_loss`."""

    loss: Tensor | None = None

    def forward(self, x_BLD: Tensor) -> Tensor:  # type: ignore[override]
        output, self.loss = super().forward(x_BLD)
        return output

    def fetch_loss(self) -> Tensor | None:
        """The loss of the last pass, returned once: a kept loss would keep the autograd graph alive."""
        loss, self.loss = self.loss, None
        return loss


class WsFfnPreTrainedModel(ReferencePreTrainedModel):  # type: ignore[no-untyped-call]
    """Keeps the block-diagonal start of latent weights, which transformers would initialise anew."""

    config_class = WsFfnConfig  # type: ignore[assignment]

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, BlockDiagonalStart):
            super()._init_weights(module)  # type: ignore[no-untyped-call]
        elif not getattr(module.weight, "_is_hf_initialized", False):  # transformers 5 marks what it loaded
            module.start()


class WsFfnModel(WsFfnPreTrainedModel, ReferenceModel):  # type: ignore[no-untyped-call]
    def __init__(self, config: WsFfnConfig) -> None:
        ReferenceModel.__init__(self, config, lambda whole: BlockFfn(ffn_config(whole)))

    def ffns(self) -> list[BlockFfn]:
        return [module for module in self.modules() if isinstance(module, BlockFfn)]


@dataclass
class WsFfnOutput(CausalLMOutputWithPast):
    """Output of a causal language model with its losses by name: total, main, wsffn_aux, z."""

    losses: dict[str, Tensor] | None = None


class WsFfnForCausalLM(WsFfnPreTrainedModel, ReferenceForCausalLM):  # type: ignore[misc, no-untyped-call]
    def __init__(self, config: WsFfnConfig) -> None:
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
        """The reference's signature, which generation inspects; `total` sums all losses."""
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
        """The losses of a pass by name; wsffn_aux is summed over blocks."""
        zero = main.new_zeros(())
        wsffn_aux = torch.stack(aux).sum() if aux else zero
        z = logits_z_loss(logits, self.config.lambda_logits_z) if aux else zero
        return {"total": main + wsffn_aux + z, "main": main, "wsffn_aux": wsffn_aux, "z": z}

    def latents(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """The latents of every block, [B, L, n_head, z_dim] each."""
        latents: list[Tensor] = []

        def keep(ffn: BlockFfn, args: tuple[Tensor], _: Tensor) -> None:
            latents.append(ffn.latents(args[0]))

        handles = [ffn.register_forward_hook(keep) for ffn in self.model.ffns()]
        try:
            self.model(input_ids, attention_mask)
        finally:
            for handle in handles:
                handle.remove()
        return latents


AutoConfig.register(WsFfnConfig.model_type, WsFfnConfig)
AutoModelForCausalLM.register(WsFfnConfig, WsFfnForCausalLM)
