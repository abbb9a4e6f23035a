"""Models that quantkit brings itself: transformers learns their configs and classes when this is imported.

One class a line; a checkpoint of one of them is then read by `AutoModelForCausalLM` like any other, and no
code of a checkpoint has to be trusted.
"""

from __future__ import annotations

from typing import Any

from quantkit.model.architectures.one_wide import OneWideForConditionalGeneration
from quantkit.model.architectures.reference import ReferenceForCausalLM
from quantkit.model.architectures.ws_ffn import WsFfnForCausalLM

OWN_MODELS: dict[str, Any] = {
    each.__name__: each for each in (ReferenceForCausalLM, WsFfnForCausalLM, OneWideForConditionalGeneration)
}
