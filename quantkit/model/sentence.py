"""Sentence embeddings: the modules that sentence-transformers runs behind an encoder, read from its files.

modules.json lists them in order: the transformer, a pooling over its tokens, and then any number of
projections and normalizations of the pooled vector.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quantkit.errors import InputError
from quantkit.files import MAX_JSON_BYTES, expect, read_json, read_text, reading, require_shallow

MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
POOLING_KEYS = {  # key of 1_Pooling/config.json -> pooling, in the order in which vectors are put together
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
FOLDER = re.compile(r"\w[\w.-]{0,99}")  # no path: its files are copied to the same place in the artifact
NORMALIZE: Literal["normalize"] = "normalize"
VECTOR = "sentence_embedding"  # the name of the pooled vector between modules
NEXT_STEP = "correct the file, or remove modules.json: the artifact then has outputs of tokens alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense:
    """A projection of the pooled vector."""

    name: str  # the folder of its files
    in_features: int
    out_features: int
    has_bias: bool
    activation: str  # of ACTIVATIONS

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of its weights."""
        bias = {f"{self.name}.linear.bias": (self.out_features,)} if self.has_bias else {}
        return {f"{self.name}.linear.weight": (self.out_features, self.in_features), **bias}


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceModel:
    """What turns the states of a text's tokens into one vector."""

    width: int | None  # of the token states, as the pooling's file has it
    poolings: tuple[str, ...]  # several are put side by side
    steps: tuple[Dense | Literal["normalize"], ...] = ()
    max_tokens: int | None = None  # longer texts are cut, special tokens included
    lowercases: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> text put before a text
    default_prompt: str | None = None  # name of the one that is used where none is named
    files: tuple[str, ...] = ()  # of the folder, for sentence-transformers to open the artifact

    @property
    def dense(self) -> tuple[Dense, ...]:
        return tuple(step for step in self.steps if isinstance(step, Dense))

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the weights of all projections."""
        return {name: shape for dense in self.dense for name, shape in dense.tensors.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """How texts are read, for the metadata of a graph."""
        return {
            "max_tokens": self.max_tokens,
            "lowercases": self.lowercases,
            "prompts": dict(self.prompts),
            "default_prompt": self.default_prompt,
        }


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """The modules behind an encoder; None for a folder that is not of a SentenceTransformer."""
    path = folder / MODULES_FILE
    settings = _read(folder / SETTINGS_FILE)
    if not path.exists() or settings.get("model_type") == "CrossEncoder":
        return None
    kinds, paths = _read_modules(path)
    if kinds[:2] != ("Transformer", "Pooling") or paths[0]:
        raise _fault(
            f"its modules are {', '.join(kinds) or 'none'}",
            path,
            allowed="Transformer with the path '', Pooling, and then Dense, Normalize or Dropout",
        )
    width, poolings, includes_prompt = _read_pooling(folder / paths[1] / "config.json")
    steps: list[Dense | Literal["normalize"]] = []
    for kind, name in zip(kinds[2:], paths[2:], strict=True):
        if kind == "Dense":
            steps.append(_read_dense(folder / name / "config.json"))
        elif kind == "Normalize":
            steps.append(NORMALIZE)
    texts = next((_read(file) for file in sorted(folder.glob("sentence_*_config.json"))), {})
    sentence = SentenceModel(
        width=width,
        poolings=poolings,
        steps=tuple(steps),
        max_tokens=_max_tokens(folder, texts),
        lowercases=bool(texts.get("do_lower_case")),
        prompts=_prompts(settings, folder / SETTINGS_FILE),
        default_prompt=expect(settings, "default_prompt_name", str, where=folder / SETTINGS_FILE),
        files=_files(folder, paths),
    )
    if sentence.default_prompt and sentence.default_prompt not in sentence.prompts:
        raise _fault(
            f"'default_prompt_name' is '{sentence.default_prompt}'",
            folder / SETTINGS_FILE,
            allowed=f"a name of its prompts: {', '.join(sentence.prompts) or 'there are none'}",
        )
    if not includes_prompt and any(sentence.prompts.values()):
        raise _fault(
            "'include_prompt' is false, and the model has prompts",
            folder / paths[1] / "config.json",
            allowed="pooling over the tokens of the prompt too",
        )
    return sentence


def cross_encoder_files(folder: Path | None, architecture: str) -> tuple[str, ...]:
    """The files by which sentence-transformers opens a reranker."""
    if folder is None or not architecture.endswith("ForSequenceClassification"):
        return ()
    return _files(folder, ()) if _read(folder / SETTINGS_FILE).get("model_type") == "CrossEncoder" else ()


def require_width(sentence: SentenceModel, hidden_size: int | None, where: str) -> None:
    """Refuse files whose vectors do not fit into each other."""
    if sentence.width not in (None, hidden_size):
        raise _fault(f"the pooling reads {sentence.width} values of a token", where, f"{hidden_size}")
    width = len(sentence.poolings) * (hidden_size or 0)
    for dense in sentence.dense:
        if dense.in_features != width:
            raise _fault(f"'{dense.name}' reads {dense.in_features} values", where, f"{width}")
        width = dense.out_features


def _fault(what: str, where: str | Path, allowed: str) -> InputError:
    return InputError(what, where=str(where), allowed=allowed, next_step=NEXT_STEP)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _read_modules(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the class name of each module, its folder)."""
    allowed = 'a list of objects with "type" and "path", as sentence-transformers writes it'
    with reading(path, "not a list of modules", allowed=allowed, next_step=NEXT_STEP):
        entries = json.loads(read_text(path, MAX_JSON_BYTES))
        require_shallow(entries)
        types, paths = (tuple(str(entry[key]) for entry in entries) for key in ("type", "path"))
    for name, folder in zip(types, paths, strict=True):
        kind = name.rpartition(".")[2]
        if not name.startswith("sentence_transformers.") or kind not in MODULES:
            raise _fault(
                f"the module '{name}'", path, f"those of sentence-transformers: {', '.join(MODULES)}"
            )
        if folder and not FOLDER.fullmatch(folder):
            raise _fault(f"the path '{folder[:80]}'", path, "a folder beside modules.json, such as 1_Pooling")
    return tuple(name.rpartition(".")[2] for name in types), paths


MODULES = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")


def _read_pooling(path: Path) -> tuple[int | None, tuple[str, ...], bool]:
    """(values of a token, poolings, whether a prompt's tokens are pooled too)."""
    config = read_json(path, next_step=NEXT_STEP)
    width = expect(config, "word_embedding_dimension", int, where=path)
    width = expect(config, "embedding_dimension", int, where=path) or width
    named = config.get("pooling_mode")
    modes = tuple(named) if isinstance(named, list) else (named,) if named is not None else None
    flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
    unknown = [key for key, value in flags.items() if key not in POOLING_KEYS or not isinstance(value, bool)]
    unknown += [str(mode) for mode in modes or () if mode not in POOLING_KEYS.values()]
    if unknown:
        raise _fault(f"'{unknown[0]}' is no known pooling", path, ", ".join(POOLING_KEYS.values()))
    chosen = tuple(mode for key, mode in POOLING_KEYS.items() if flags.get(key))
    if modes is not None and chosen and set(modes) != set(chosen):
        raise _fault(
            f"'pooling_mode' is {named!r}, and the flags say {', '.join(chosen)}", path, "one of them"
        )
    poolings = modes if modes is not None else chosen if flags else ("mean",)
    if not poolings:
        raise _fault("no pooling is chosen", path, ", ".join(POOLING_KEYS.values()))
    return width, poolings, config.get("include_prompt") is not False


def _read_dense(path: Path) -> Dense:
    config = read_json(path, next_step=NEXT_STEP)
    sizes = [expect(config, key, int, where=path) for key in ("in_features", "out_features")]
    if not all(size and size > 0 for size in sizes):
        raise _fault("'in_features' and 'out_features' are needed", path, "whole numbers from 1 up")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, VECTOR):
            raise _fault(f"'{key}' is {config[key]!r}", path, VECTOR)
    function = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh")
    activation = function.rpartition(".")[2]
    if not function.startswith("torch.nn.") or activation not in ACTIVATIONS:
        raise _fault(f"the activation '{function}'", path, f"torch.nn's {', '.join(ACTIVATIONS)}")
    has_bias = expect(config, "bias", bool, where=path)
    return Dense(
        name=path.parent.name,
        in_features=sizes[0] or 0,
        out_features=sizes[1] or 0,
        has_bias=has_bias is not False,
        activation=activation,
    )


def _max_tokens(folder: Path, texts: dict[str, Any]) -> int | None:
    """Where texts are cut, unless the model has fewer positions."""
    tokenizer = _read(folder / "tokenizer_config.json")
    limits = (texts.get("max_seq_length"), tokenizer.get("model_max_length"))
    return next((limit for limit in limits if type(limit) is int and 0 < limit < 1 << 31), None)


def _prompts(settings: dict[str, Any], path: Path) -> dict[str, str]:
    prompts = expect(settings, "prompts", dict, where=path) or {}
    wrong = [name for name, prompt in prompts.items() if not isinstance(prompt, str | None)]
    if wrong:
        raise _fault(f"the prompt '{wrong[0]}' is {prompts[wrong[0]]!r}", path, "a text")
    return {name: prompt for name, prompt in prompts.items() if prompt is not None}


def _files(folder: Path, paths: tuple[str, ...]) -> tuple[str, ...]:
    """The files by which sentence-transformers opens a folder, those of its transformer left out."""
    names = [MODULES_FILE, SETTINGS_FILE, *(file.name for file in folder.glob("sentence_*_config.json"))]
    names += [f"{path}/{name}" for path in paths if path for name in ("config.json", "model.safetensors")]
    return tuple(sorted({name for name in names if (folder / name).is_file()}))
