"""The function of a small module, found by calling it; its class name is not trusted.

An activation is identified by its values on a grid. A norm is identified by its invariances: both kinds
ignore the scale of their input, LayerNorm alone ignores a shift. Modules may be on the meta device: a copy
is filled and run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - as torch spells it
from torch import Tensor, nn

from quantkit.model.model_map import Activation, NormKind

CURVES: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.SILU: F.silu,
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
}
CLOSE = 1e-5  # exact GELU and its tanh form differ by 5e-4 at most
SPREAD = 7.0


def curve_of(function: Callable[[Tensor], Tensor] | None) -> Activation:
    """The non-linearity that a module or a function computes; OTHER for an unknown one."""
    if function is None or (isinstance(function, nn.Module) and any(True for _ in function.parameters())):
        return Activation.OTHER
    x = torch.linspace(-6.0, 6.0, 97, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            y = function(x.clone())
    except Exception:  # code of any model may ask for other inputs
        return Activation.OTHER
    if not torch.is_tensor(y) or y.shape != x.shape:
        return Activation.OTHER
    return next(
        (kind for kind, curve in CURVES.items() if (y.double() - curve(x)).abs().max() < CLOSE),
        Activation.OTHER,
    )


def norm_kind_of(module: nn.Module) -> NormKind | None:
    """LayerNorm or RMSNorm by its invariances; None for a module that is no norm over the last axis."""
    parameters = list(module.parameters())
    sizes = [tuple(parameter.shape) for parameter in parameters] or [getattr(module, "normalized_shape", ())]
    if any(len(size) != 1 for size in sizes) or list(module.children()):
        return None
    try:
        norm = copy.deepcopy(module).to_empty(device="cpu").double().eval()
        random = torch.Generator().manual_seed(0)
        with torch.no_grad(), torch.device("cpu"):
            for parameter in norm.parameters():
                parameter.copy_(1 + torch.rand(parameter.shape, generator=random, dtype=torch.float64))
            x = SPREAD * torch.randn(4, *sizes[0], generator=random, dtype=torch.float64)
            plain, scaled, shifted = norm(x), norm(3 * x), norm(x + SPREAD)
            is_norm = torch.allclose(plain, scaled, rtol=1e-3, atol=1e-3) and not torch.allclose(plain, x)
            ignores_mean = torch.allclose(plain, shifted, rtol=1e-3, atol=1e-3)
    except Exception:  # as above
        return None
    if not is_norm:
        return None
    return NormKind.LAYER_NORM if ignores_mean else NormKind.RMS_NORM
