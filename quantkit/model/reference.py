"""The reference: the float32 model in transformers, which quantized models are compared with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from quantkit.model.examples import inputs_of
from quantkit.model.families import family_of
from quantkit.model.load import Source, build_on_meta, make_config, named_class, without_hub_kernels
from quantkit.model.names import checkpoint_name
from quantkit.model.sentence import Dense
from quantkit.model.weights.open import open_tensors

Logits = Callable[[NDArray[Any]], NDArray[np.float32]]
AnswerLogits = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


def reference_model(source: Source) -> Any:
    """The model of the folder in float32 and evaluation mode."""
    assert source.folder is not None
    cls = named_class(source) or transformers.AutoModelForCausalLM
    with without_hub_kernels():
        if not source.is_plain:
            model = _rebuilt(source)
        else:
            model = cls.from_pretrained(
                str(source.folder),
                dtype=torch.float32,
                use_safetensors=True,
                # Fused attention of transformers 4.57 leaves out Gemma 2's cap and GPT-2's scale by layer.
                attn_implementation="eager",
            )
    return model.eval()


def _rebuilt(source: Source) -> Any:
    """The model from its cleaned config and its weights as quantkit reads them."""
    module = build_on_meta(source)
    tensors = open_tensors(source, module)
    family = family_of(source.config["model_type"])
    names = {path: checkpoint_name(path, family) for path in module.state_dict()}
    state = {
        path: torch.from_numpy(tensors.read(name)).reshape(tensors.shape(name))
        for path, name in names.items()
        if tensors.has(name)
    }
    cls: Any = type(module)
    return cls.from_pretrained(
        None,
        config=make_config(source),
        state_dict=state,
        dtype=torch.float32,
        attn_implementation="eager",
    )


def reference_logits(source: Source) -> Logits:
    """The reference as a function of token ids."""
    return logits_of(reference_model(source))


def logits_of(model: Any) -> Logits:
    """The first output of a model, of token ids or of pictures."""
    run = _output_of(model)
    return lambda examples: run(inputs_of(examples))


def reference_pair_logits(source: Source) -> AnswerLogits:
    """The reference as a function of token ids and token types, where it has types."""
    model = reference_model(source)
    run, has_types = _output_of(model), "token_type_ids" in inspect.signature(model.forward).parameters
    return lambda ids, types: run(_tensors(input_ids=ids, **({"token_type_ids": types} if has_types else {})))


def reference_vectors(source: Source) -> Logits:
    """The reference as a function of the token ids of one text, [1, T], to its sentence embedding, [1, D]."""
    sentence, states = source.sentence, reference_logits(source)
    assert sentence is not None
    tensors = open_tensors(source, build_on_meta(source)) if sentence.dense else None

    def vector(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        states_TD = torch.from_numpy(states(ids)[0]).double()
        x = torch.cat([POOLED[pooling](states_TD) for pooling in sentence.poolings])
        for step in sentence.steps:
            if isinstance(step, Dense):
                assert tensors is not None
                parameters = [torch.from_numpy(tensors.read(name)).double() for name in step.tensors]
                x = getattr(torch.nn, step.activation)()(torch.nn.functional.linear(x, *parameters))
            else:
                x = torch.nn.functional.normalize(x, dim=0)
        values: NDArray[np.float32] = x.float().numpy()[None]
        return values

    return vector


def _mean_by_place(states_TD: torch.Tensor) -> torch.Tensor:
    places_T = torch.arange(1, len(states_TD) + 1, dtype=states_TD.dtype)
    return places_T @ states_TD / places_T.sum()


POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda states_TD: states_TD[0],
    "max": lambda states_TD: states_TD.amax(0),
    "mean": lambda states_TD: states_TD.mean(0),
    "mean_sqrt_len_tokens": lambda states_TD: states_TD.sum(0) / len(states_TD) ** 0.5,
    "weightedmean": _mean_by_place,
    "lasttoken": lambda states_TD: states_TD[-1],
}


def reference_answer_logits(source: Source) -> AnswerLogits:
    """An encoder-decoder reference as a function of encoder ids and decoder ids."""
    return answer_logits_of(reference_model(source))


def answer_logits_of(model: Any) -> AnswerLogits:
    run = _output_of(model)
    return lambda encoder_ids, ids: run(_tensors(input_ids=encoder_ids, decoder_input_ids=ids))


def reference_output(source: Source, name: str) -> Logits:
    """One output of the reference, by its name in transformers."""
    run = _output_of(reference_model(source), name)
    return lambda examples: run(inputs_of(examples))


def _tensors(**ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in ids.items()}


def _output_of(model: Any, name: str = "logits") -> Callable[[dict[str, torch.Tensor]], NDArray[np.float32]]:
    """An output of a model; the first one where it has none of that name."""
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    options = {"use_cache": False} if has_cache else {}

    def run(inputs: dict[str, torch.Tensor]) -> NDArray[np.float32]:
        with torch.inference_mode():
            outputs = model(**inputs, **options)
        output = outputs[name] if name in outputs else outputs[0]  # no head: the last hidden states
        values: NDArray[np.float32] = output.float().numpy()
        return values

    return run


def new_cache() -> Any:
    """An empty KV cache of an encoder-decoder model."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache())
