"""Modules of a torch model by their checkpoint names, and hooks on their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from quantkit.model.families.decoders import family_of
from quantkit.model.names import checkpoint_name


def named_modules(module: nn.Module, model_type: str) -> dict[str, nn.Module]:
    """Every module by its name in checkpoints; a shared module is listed under each of its names."""
    row = family_of(model_type)
    family = row[1] if row else None
    return {
        checkpoint_name(path, family): child for path, child in module.named_modules(remove_duplicate=False)
    }


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
