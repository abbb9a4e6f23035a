"""Hooks on the inputs of a torch model's linear modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor that a linear module multiplies."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


@contextmanager
def watching_inputs(modules: Mapping[str, nn.Module], watch: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `watch(name, input)` whenever one of these modules is called."""

    def hook_of(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: watch(name, first_input(args, kwargs))

    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(hook_of(name), with_kwargs=True)
            stack.callback(handle.remove)
        yield
