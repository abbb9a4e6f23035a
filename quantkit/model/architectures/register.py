"""Quantkit's own models: importing this module registers their configs and classes with transformers.

Their checkpoints then load with the auto classes of transformers, without remote code.
"""

from __future__ import annotations

from typing import Any

from quantkit.model.architectures.one_wide import OneWideForConditionalGeneration
from quantkit.model.architectures.reference import ReferenceForCausalLM
from quantkit.model.architectures.ws_ffn import WsFfnForCausalLM

OWN_MODELS: dict[str, Any] = {
    cls.__name__: cls for cls in (ReferenceForCausalLM, WsFfnForCausalLM, OneWideForConditionalGeneration)
}
