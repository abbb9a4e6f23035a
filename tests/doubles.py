"""Models in float64 throughout, so that equality can be asked for to nine digits and more.

Transformers computes norms and softmax in float32 whatever the type of the weights. `InDouble` turns those
conversions around while it is active; nothing else of the real modules is touched.
"""

from __future__ import annotations

import inspect as python_inspect
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from examples import pictures_of, reads_pictures
from exporting import build_tiny
from torch.overrides import TorchFunctionMode

from quantkit.model.families import FAMILIES
from quantkit.model.inspect import inspect_source
from quantkit.model.load import Source, model_class, open_source
from quantkit.model.model_map import ModelMap
from quantkit.model.weights.open import open_weights
from quantkit.model.weights.tensors import TensorSource

CASES = [(name, index) for name, row in FAMILIES.items() for index in range(1 + len(row.variants))]
LENGTH = 13


class InDouble(TorchFunctionMode):
    """What is float64 stays float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Subject:
    """One tiny model on disk: its map, its tensors, and what it computes."""

    source: Source
    map: ModelMap
    tensors: TensorSource
    logits: np.ndarray


SUBJECTS: dict[tuple[str, int], Subject] = {}


def subject(family: str, variant: int, folder: Path) -> Subject:
    """The model of a row of the families table, made once."""
    if (family, variant) not in SUBJECTS:
        row = FAMILIES[family]
        changes = row.variants[variant - 1] if variant else {}
        SUBJECTS[family, variant] = make_subject(row.tiny_class, {**row.tiny, **changes}, folder)
    return SUBJECTS[family, variant]


def make_subject(tiny_class: str, sizes: dict, folder: Path, dtype: torch.dtype = torch.float32) -> Subject:
    model = build_tiny(tiny_class, sizes, spread=0.2, dtype=dtype)
    model.save_pretrained(folder)
    source = open_source(str(folder))
    model_map = inspect_source(source)
    before = torch.get_default_dtype()
    # Transformers 5 makes the rotary tables of GPT-J and CodeGen in it.
    torch.set_default_dtype(torch.float64)
    try:
        loaded = model_class(tiny_class).from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
    finally:
        torch.set_default_dtype(before)
    return Subject(
        source=source,
        map=model_map,
        tensors=open_weights(source, model_map, random_weights=False),
        logits=logits_of(loaded.eval()),
    )


def logits_of(model: torch.nn.Module) -> np.ndarray:
    """Logits of two rows in float64."""
    if reads_pictures(model):
        pictures = pictures_of(model.config, 2, dtype=np.float64)
        with torch.inference_mode(), InDouble():
            return model(pixel_values=torch.from_numpy(pictures))[0].numpy()
    random = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(5, 60, (2, LENGTH), generator=random)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(5, 60, (2, LENGTH - 4), generator=random)
    if "use_cache" in python_inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    with torch.inference_mode(), InDouble():
        outputs = model(**inputs)
        made = outputs.logits if "logits" in outputs else outputs[0]
    assert made.dtype is torch.float64
    return made.numpy()
