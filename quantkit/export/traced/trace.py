"""Float ONNX files of architectures that are not emitted directly, traced by optimum.

The exporter is kept quiet, away from the network, and away from code that a checkpoint brings, unless the
recipe trusts it; `lower.py` puts integer operators into the files.

quantkit's own encoder-decoders are traced without optimum, as three files: the encoder runs once, the
decoder's first step makes keys and values from its output, and each later step reads them. Their inputs and
outputs have the names of optimum's exports.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.model.load import open_source
from quantkit.model.reference import new_cache, reference_model

OPSET = 18  # the newest that the tracing exporter writes without converting
TASKS: dict[str, str] = {  # how a class name ends -> what optimum calls its task
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "MTModel": "text2text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "Model": "feature-extraction",
}
OWN_ENCODER_DECODERS = ("OneWideForConditionalGeneration",)  # traced without optimum
WITH_PAST = ("text-generation", "text2text-generation")
SUPPORTED = "below 4.58 for optimum-onnx 0.1"
INSTALL = "pip install 'quantkit-onnx[trace]'"
BATCH, LENGTH, ANSWER, PAST = 2, 5, 3, 4  # of the example that is traced; every size but the last two is free
DECODER, ENCODER = "decoder", "encoder"


def trace(
    folder: Path, out_dir: Path, *, model_type: str, architecture: str, trust_remote_code: bool = False
) -> tuple[Path, ...]:
    """The files of the model in `folder`, with a cache where it generates text.

    The model is loaded here and not by optimum, so that it is the reference that accuracy is compared with.
    """
    is_own = architecture in OWN_ENCODER_DECODERS
    task = "" if is_own else _supported_task(folder, model_type, architecture)
    source = open_source(str(folder), trust_remote_code=trust_remote_code)
    if is_own:
        with _quiet():
            return trace_parts(reference_model(source), out_dir, opset=OPSET)
    with _quiet():
        from optimum.exporters.onnx import onnx_export_from_model

        model = reference_model(source)
        if task.startswith("text-generation"):
            _require_full_precision(model, folder)
        model.config.use_cache = task.endswith("-with-past")
        model.config._name_or_path = str(out_dir)  # where optimum looks for a tokenizer: a name means the Hub
        try:
            onnx_export_from_model(
                model,
                out_dir,
                task=task,
                opset=OPSET,
                do_validation=False,  # the lowered file is compared with the original instead
                no_post_process=True,  # else it would fold two decoders into one file with branches
            )
        except Exception as error:  # the exporter runs the model's own code, which may raise anything
            raise InputError(
                f"the tracing exporter failed ({type(error).__name__}: {str(error)[:300]})",
                where=str(folder),
                next_step="use a model of a family that is emitted directly, or report this architecture",
            ) from error
    return tuple(sorted(out_dir.glob("*.onnx")))


class _Roundings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator gives numbers in half precision."""

    occurred = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.occurred |= isinstance(result, Tensor) and result.dtype in (torch.bfloat16, torch.float16)
        return result


def _require_full_precision(model: Any, folder: Path) -> None:
    """Refuse a float32 decoder that rounds to half precision on its way: the exporter leaves that out."""
    with torch.inference_mode(), _Roundings() as roundings:  # type: ignore[no-untyped-call]
        model(torch.tensor([[1, 2]]))
    if roundings.occurred:
        raise InputError(
            f"{type(model).__name__} rounds to bfloat16 or float16 within, which no traced graph would do",
            where=str(folder),
            next_step="use a model of a family that is emitted directly; Falcon is, without 'alibi'",
        )


def why_not_trace() -> str | None:
    """Why nothing can be traced in this environment, or None."""
    try:
        with _quiet():
            import optimum.exporters.onnx.model_configs  # noqa: F401
    except ImportError as error:
        return " ".join(str(error).split())[:200]
    return None


def require_traceable(folder: Path, model_type: str, architecture: str) -> None:
    """Refuse an architecture that is not traced."""
    if architecture not in OWN_ENCODER_DECODERS:
        _supported_task(folder, model_type, architecture)


def _supported_task(folder: Path, model_type: str, architecture: str) -> str:
    reason = why_not_trace()
    if reason:
        raise InputError(
            f"{architecture} goes through optimum's ONNX exporter, which cannot be imported ({reason})",
            where=str(folder),
            allowed=f"optimum-onnx, beside a transformers that it supports ({SUPPORTED})",
            next_step=f"{INSTALL}, in an environment of its own if this one needs a newer transformers",
        )
    with _quiet():
        from optimum.exporters.onnx import model_configs  # noqa: F401 - fills the table of tasks
        from optimum.exporters.tasks import TasksManager

        try:
            tasks = TasksManager.get_supported_tasks_for_model_type(
                model_type, "onnx", library_name="transformers"
            )
        except KeyError:
            tasks = {}
    base = next((task for end, task in TASKS.items() if architecture.endswith(end)), None)
    candidates = [f"{base}-with-past", base] if base in WITH_PAST else [base]
    task = next((task for task in candidates if task in tasks), None)
    if task is None:
        raise InputError(
            f"optimum cannot trace {architecture} of model type '{model_type}', and no family that is "
            "written directly has it",
            where=str(folder),
            allowed=f"{', '.join(sorted(tasks)) or 'model types that optimum-onnx knows'}, and the families "
            f"{', '.join(FAMILIES)}",
            next_step="use a model of one of these families",
        )
    return task


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporter's advice, which is for its own users, off the terminal."""
    before: Any = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Encoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        encoded: Tensor = self.encoder(input_ids, attention_mask)[0]
        return encoded


class _First(nn.Module):
    """The first step, which makes the caches."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.lm_head, self.depth = model.model.decoder, model.lm_head, _depth(model)

    def forward(self, mask: Tensor, input_ids: Tensor, encoded: Tensor) -> tuple[Tensor, ...]:
        cache = new_cache()
        logits = self.lm_head(self.decoder(input_ids, encoded, mask, cache))
        return logits, *_held(cache, self.depth, (DECODER, ENCODER))


class _Later(nn.Module):
    """A later step, which reads the caches."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder, self.lm_head, self.depth = model.model.decoder, model.lm_head, _depth(model)

    def forward(self, mask: Tensor, input_ids: Tensor, *held: Tensor) -> tuple[Tensor, ...]:
        cache = new_cache()
        for index in range(self.depth):
            key, value, cross_key, cross_value = held[4 * index : 4 * index + 4]
            cache.self_attention_cache.update(key, value, index)
            cache.cross_attention_cache.update(cross_key, cross_value, index)
            cache.is_updated[index] = True
        logits = self.lm_head(self.decoder(input_ids, None, mask, cache))
        return logits, *_held(cache, self.depth, (DECODER,))


def _depth(model: Any) -> int:
    return len(model.model.decoder.layers)


def _held(cache: Any, depth: int, parts: Sequence[str]) -> tuple[Tensor, ...]:
    """Keys and values layer by layer, in the order of `_names`."""
    halves = {DECODER: cache.self_attention_cache, ENCODER: cache.cross_attention_cache}
    layers = (halves[part].layers[index] for index in range(depth) for part in parts)
    return tuple(tensor for layer in layers for tensor in (layer.keys, layer.values))


def _names(start: str, depth: int, parts: Sequence[str]) -> list[str]:
    return [
        f"{start}.{index}.{part}.{kind}"
        for index in range(depth)
        for part in parts
        for kind in ("key", "value")
    ]


def trace_parts(model: Any, out_dir: Path, *, opset: int) -> tuple[Path, ...]:
    """Write encoder_model.onnx, decoder_model.onnx and decoder_with_past_model.onnx.

    For models with a plain encoder and a decoder of `decoder(ids, encoded, encoder_mask, cache)`.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    depth, sizes = _depth(model), model.config
    ids = torch.ones((BATCH, LENGTH), dtype=torch.int64)
    answer, mask = torch.ones((BATCH, ANSWER), dtype=torch.int64), torch.ones_like(ids)
    encoded = torch.zeros((BATCH, LENGTH, sizes.hidden_size))
    heads, width = sizes.num_key_value_heads, sizes.hidden_size // sizes.num_attention_heads
    shapes = [(BATCH, heads, length, width) for length in (PAST, PAST, LENGTH, LENGTH)] * depth
    text, answered = {0: "batch", 1: "encoder_sequence"}, {0: "batch", 1: "sequence"}
    caches = {
        name: {0: "batch", 2: f"{'past' if f'.{DECODER}.' in name else 'encoder'}_sequence"}
        for name in _names("past_key_values", depth, (DECODER, ENCODER))
    }
    first = _names("present", depth, (DECODER, ENCODER))
    later = _names("present", depth, (DECODER,))
    grown = {name: {0: "batch", 2: f"{name.split('.')[2]}_total"} for name in first}
    parts: dict[str, tuple[nn.Module, tuple[Tensor, ...], list[str], list[str], dict[str, Any]]] = {
        "encoder_model": (
            _Encoder(model),
            (ids, mask),
            ["input_ids", "attention_mask"],
            ["last_hidden_state"],
            {"input_ids": text, "attention_mask": text, "last_hidden_state": text},
        ),
        "decoder_model": (
            _First(model),
            (mask, answer, encoded),
            ["encoder_attention_mask", "input_ids", "encoder_hidden_states"],
            ["logits", *first],
            {"encoder_attention_mask": text, "input_ids": answered, "encoder_hidden_states": text}
            | {"logits": answered, **grown},
        ),
        "decoder_with_past_model": (
            _Later(model),
            (mask, answer, *(torch.zeros(shape) for shape in shapes)),
            ["encoder_attention_mask", "input_ids", *caches],
            ["logits", *later],
            {"encoder_attention_mask": text, "input_ids": answered, "logits": answered}
            | caches
            | {name: grown[name] for name in later},
        ),
    }
    for name, (module, example, inputs, outputs, axes) in parts.items():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module.eval(),
                example,
                str(out_dir / f"{name}.onnx"),
                input_names=inputs,
                output_names=outputs,
                dynamic_axes=axes,
                opset_version=opset,
                dynamo=False,
            )
    return tuple(out_dir / f"{name}.onnx" for name in parts)
