"""Opening the weights of whatever the user named: a folder's, the Hub's, or seeded random ones.

A tensor is found under its canonical name, under the name without the prefix of the model with a head, or
behind one; and a shared tensor under any name that shares it, since a checkpoint stores it only once.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.model.families.decoders import family_of
from quantkit.model.load import DEMO_NAME, Source, build_on_meta, hub_is_reachable, model_class
from quantkit.model.model_map import ModelMap
from quantkit.model.names import checkpoint_name
from quantkit.model.weights.tensors import RandomTensors, TensorSource, open_tensors

WEIGHT_PATTERNS = ["*.safetensors", "*.json", "*.txt", "tokenizer.model", "*.jinja"]
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "generation_config.json",
)
Logits = Callable[[NDArray[np.int64]], NDArray[np.float32]]
AnswerLogits = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


def with_weights(source: Source, *, random_weights: bool) -> Source:
    """The same source with a folder that holds weights, fetched if it must be."""
    if random_weights or source.folder is not None:
        return source
    return dataclasses.replace(source, folder=_fetch(source.name))


def _fetch(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        offline = not hub_is_reachable(constants.ENDPOINT)
        return Path(snapshot_download(name, allow_patterns=WEIGHT_PATTERNS, local_files_only=offline))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise InputError(
            f"its weights are not here, and the Hub gave none ({type(error).__name__})",
            where=name,
            allowed=f"a local folder with safetensors, '{DEMO_NAME}', or a Hub name",
            next_step=(
                f"'hf download {name} --local-dir FOLDER' where there is a network, then give that folder; "
                "or pass --random-weights to measure size and speed alone"
            ),
        ) from error


def open_weights(source: Source, model_map: ModelMap, *, random_weights: bool, seed: int = 0) -> TensorSource:
    """Where the weights come from; no weight is read yet."""
    row = family_of(model_map.model_type)
    tensors = {
        checkpoint_name(name, row[1] if row else None): tensor
        for name, tensor in build_on_meta(source).state_dict(keep_vars=True).items()
    }
    if random_weights:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return RandomTensors(
            shapes=shapes,
            seed=seed,
            gain_offset=model_map.norm_gain_offset,
            num_values=model_map.num_parameters,
        )
    assert source.folder is not None
    return open_tensors(source.folder, aliases=_aliases(tensors))


def _aliases(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, tuple[str, ...]]:
    """Other names of the same tensor: a checkpoint stores a shared one under any of them."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    return {
        name: tuple(other for other in names if other != name)
        for names in groups.values()
        if len(names) > 1
        for name in names
    }


def config_for_artifact(source: Source) -> dict[str, Any]:
    """The config as clients of the artifact read it; code that came with a checkpoint is left behind."""
    return {key: value for key, value in source.config.items() if key != "auto_map"}


def tokenizer_files(source: Source) -> tuple[Path, ...]:
    """The files of the tokenizer and of text generation that lie beside the weights."""
    if source.folder is None:
        return ()
    found = (source.folder / name for name in TOKENIZER_FILES)
    return tuple(path for path in found if path.is_file())


def make_fast_tokenizer(source: Source, folder: Path) -> bool:
    """Write tokenizer.json for a checkpoint that has only the older files; False where that cannot be."""
    if source.folder is None or not any(
        path.name != "generation_config.json" for path in tokenizer_files(source)
    ):
        return False
    try:
        loader: Any = transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(str(source.folder), use_fast=True)
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    except Exception:  # many libraries read tokenizers, and any may be absent; the model works without one
        return False
    return True


def reference_logits(source: Source) -> Logits:
    """The original in transformers, float32, as a function of token ids: the independent reference."""
    model, options = _reference(source)

    def logits(ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            outputs = model(input_ids=torch.from_numpy(ids), **options)
        made = outputs.logits if "logits" in outputs else outputs[0]  # a model without a head: its states
        values: NDArray[np.float32] = made.float().numpy()
        return values

    return logits


def reference_answer_logits(source: Source) -> AnswerLogits:
    """The original of an encoder and its decoder, as a function of what each of them reads."""
    model, options = _reference(source)

    def logits(encoder_ids: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.float32]:
        with torch.inference_mode():
            outputs = model(
                input_ids=torch.from_numpy(encoder_ids), decoder_input_ids=torch.from_numpy(ids), **options
            )
        values: NDArray[np.float32] = outputs.logits.float().numpy()
        return values

    return logits


def original(source: Source) -> Any:
    """The model as it lies in the folder, in float32 and evaluation mode."""
    return _reference(source)[0]


def new_cache() -> Any:
    """An empty cache of a decoder that reads an encoder."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def _reference(source: Source) -> tuple[Any, dict[str, Any]]:
    """(the original module, options of its call)."""
    assert source.folder is not None
    reference_class = next(
        (
            found
            for name in source.config.get("architectures") or ()
            if (found := model_class(str(name))) is not None
        ),
        transformers.AutoModelForCausalLM,
    )
    # The fused kernel that transformers 4.57 takes otherwise leaves out Gemma 2's cap on attention scores.
    capped = {"attn_implementation": "eager"} if source.config.get("attn_logit_softcapping") else {}
    model = reference_class.from_pretrained(
        str(source.folder), dtype=torch.float32, use_safetensors=True, **capped
    )
    model.eval()
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    return model, {"use_cache": False} if takes_cache else {}
