"""Hooks on the inputs of a torch model's linear modules.

A convolution of patches multiplies each patch, so patches are what a watcher sees of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


def first_input(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor that a linear module multiplies; of a convolution its patches, [B, patches, inputs]."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    if isinstance(module, nn.Conv2d):
        kernel, stride = module.kernel_size, module.stride
        return functional.unfold(x, (kernel[0], kernel[1]), stride=(stride[0], stride[1])).transpose(1, 2)
    return x


@contextmanager
def watching_inputs(modules: Mapping[str, nn.Module], watch: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `watch(name, input)` whenever one of these modules is called."""

    def hook_of(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: watch(name, first_input(module, args, kwargs))

    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(hook_of(name), with_kwargs=True)
            stack.callback(handle.remove)
        yield
