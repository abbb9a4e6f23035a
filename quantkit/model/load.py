"""From a name or a folder to a model on the meta device: no weights, no code from a checkpoint.

A source is the embedded model (`demo`), a local folder, a well-known name whose config ships with
quantkit, or a Hub name. Remote code runs only with `trust_remote_code`.

Each `assets/configs/NAME.json` is the published config of a well-known model, cut down to the fields that
describe its structure and spelled for transformers 4.57, which 5.x reads too. A new name is a new file; Hub
names of the same structure are listed in ALIASES. An instruct model counts as the same structure even where
its end-of-text ids differ, since neither shapes nor costs depend on them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ2SEQ
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from quantkit.errors import InputError, did_you_mean
from quantkit.files import expect, read_json, reading
from quantkit.model.architectures.register import OWN_MODELS
from quantkit.model.config import (
    FIRST_MAJOR_WITH_ROPE_PARAMETERS,
    QUANTIZATION_FIELDS,
    quantization_of,
    spelled_for,
    without_fetching,
)
from quantkit.model.experts import with_separate_experts
from quantkit.model.gguf.folder import gguf_folder, gguf_in, gguf_note
from quantkit.model.hub import hub_is_reachable
from quantkit.model.language_model import has_language_model, language_model
from quantkit.model.sentence import MODULES_FILE, SentenceModel, read_sentence_model
from quantkit.model.weights.scales import described, why_not_read

DEMO_NAME = "demo"
DEQUANTIZED = "results are compared with it, dequantized, and do not show what its own quantization lost"
HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
TRANSFORMERS_MAJOR = int(transformers.__version__.split(".")[0])
MAX_MODULES = 200_000  # DeepSeek-V3 has 100,000
MAX_COUNTS = {"layer": 1024, "layers": 1024, "experts": 4096, "labels": 1 << 17}  # by the last word of a key
CONFIGS = resources.files("quantkit") / "assets" / "configs"
# Hub name, in lower case -> built-in name.
ALIASES: dict[str, str] = {
    "albert/albert-base-v2": "albert-base-v2",
    "distilbert/distilbert-base-uncased": "distilbert-base-uncased",
    "eleutherai/pythia-160m": "pythia-160m",
    "eleutherai/pythia-160m-deduped": "pythia-160m",
    "facebook/opt-125m": "opt-125m",
    "facebookai/roberta-base": "roberta-base",
    "google-bert/bert-base-uncased": "bert-base-uncased",
    "google-t5/t5-small": "t5-small",
    "google/gemma-2-2b": "gemma-2-2b",
    "google/gemma-2b": "gemma-2b",
    "google/gemma-3-1b-it": "gemma-3-1b",
    "google/gemma-3-1b-pt": "gemma-3-1b",
    "google/gemma-3-270m": "gemma-3-270m",
    "google/gemma-3-270m-it": "gemma-3-270m",
    "meta-llama/llama-2-70b-hf": "llama-2-70b",
    "meta-llama/llama-2-7b-hf": "llama-2-7b",
    "meta-llama/llama-3.2-1b": "llama-3.2-1b",
    "meta-llama/llama-3.2-1b-instruct": "llama-3.2-1b",
    "microsoft/phi-3-mini-4k-instruct": "phi-3-mini",
    "mistralai/mistral-7b-v0.1": "mistral-7b",
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-large": "gpt2-large",
    "openai-community/gpt2-medium": "gpt2-medium",
    "openai-community/gpt2-xl": "gpt2-xl",
    "qwen/qwen2.5-0.5b": "qwen2.5-0.5b",
    "qwen/qwen3-0.6b": "qwen3-0.6b",
}
_transformers_logging: Any = transformers.logging
_transformers_logging.set_verbosity_error()  # advice to users of transformers does not apply here


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    name: str
    kind: Literal["demo", "folder", "known", "hub"]
    config: Mapping[str, Any]
    folder: Path | None  # where config, tokenizer and weights lie
    quantization: Mapping[str, Any] = field(default_factory=dict)  # how the weights are stored
    file: Path | None = None  # that holds the weights, where it is a GGUF file
    is_plain: bool = True  # transformers may open the folder as it is
    uses_remote_code: bool = False
    notes: tuple[str, ...] = ()
    sentence: SentenceModel | None = None  # of a folder of sentence-transformers
    has_pooler: bool = True  # False: the checkpoint is of a class with a head, whose base has no pooler


def open_source(name: str | Path, *, trust_remote_code: bool = False) -> Source:
    """The source behind a name; a local folder goes before a well-known name, and that before the Hub."""
    name = str(name)
    if name == DEMO_NAME:
        folder = Path(str(resources.files("quantkit") / "assets" / "demo"))
        return Source(name=name, kind="demo", config=_read_config(folder), folder=folder)
    path = Path(name).expanduser()
    if (path.is_file() or path.is_dir()) and (gguf := gguf_in(path)) is not None:
        return _gguf_source(gguf)
    if path.is_file():
        path = path.parent
    if path.is_dir():
        source = Source(name=path.resolve().name, kind="folder", config=_read_config(path), folder=path)
        return with_sentence(_cleaned(_check_remote_code(source, trust_remote_code)))
    if (config := known_config(name)) is not None:
        return Source(name=name, kind="known", config=config, folder=None)
    if not HUB_NAME.match(name):
        raise InputError(
            "no such folder, and not a model name",
            where=name,
            allowed="a folder with config.json, 'demo', a well-known name, or a Hub name",
            next_step="check the path",
        )
    source = Source(name=name, kind="hub", config=_read_config(_fetch_config(name)), folder=None)
    return _cleaned(_check_remote_code(source, trust_remote_code))


def _gguf_source(path: Path) -> Source:
    folder = gguf_folder(path)
    name = path.resolve().stem
    notes = (f"{gguf_note(path)}: {DEQUANTIZED}",)
    source = Source(
        name=name, kind="folder", config=_read_config(folder), folder=folder, notes=notes, file=path
    )
    return replace(_cleaned(source), is_plain=False)


def known_names() -> tuple[str, ...]:
    """The built-in names, sorted: one per config file."""
    files = (Path(entry.name) for entry in CONFIGS.iterdir())
    return tuple(sorted(file.stem for file in files if file.suffix == ".json"))


def known_config(name: str) -> dict[str, Any] | None:
    """The config behind a built-in or a Hub name, in any case; None for a name that is neither.

    Every call reads the file again, so that a caller may change the returned dict.
    """
    lowered = name.lower()
    built_in = ALIASES.get(lowered, lowered)
    if built_in not in known_names():  # also keeps a path such as "../x" from reaching the file system
        return None
    config: dict[str, Any] = json.loads((CONFIGS / f"{built_in}.json").read_text(encoding="utf-8"))
    return config


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if (folder / "adapter_config.json").exists():  # transformers would fetch the base model that it names
        raise InputError(
            "the folder holds an adapter of another model (adapter_config.json)",
            where=str(folder),
            allowed="a checkpoint with all of its weights",
            next_step="merge it: peft's model.merge_and_unload().save_pretrained('NEW_FOLDER')",
        )
    if not path.exists():
        raise InputError(
            "the folder has no config.json",
            where=str(folder),
            allowed="a folder as written by save_pretrained",
            next_step="point to the folder that holds config.json beside the weights",
        )
    config = read_json(path, next_step="copy or download the file again")
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            'the config names no "model_type"',
            where=str(path),
            allowed="a transformers config with a model_type such as 'gpt2'",
            next_step="add the model_type or save the model again with save_pretrained",
        )
    expect(config, "architectures", list, where=path)
    return config


def _check_remote_code(source: Source, trust_remote_code: bool) -> Source:
    """Refuse the code of a checkpoint, unless it is trusted or transformers has a class of its own."""
    if "auto_map" not in source.config:
        return source
    model_type = source.config["model_type"]
    if trust_remote_code:
        note = "remote code was used, as --trust-remote-code asks"
        return replace(source, uses_remote_code=True, notes=(note,))
    if model_type in CONFIG_MAPPING:
        note = "the checkpoint brings code of its own; it was refused, transformers' own class was used"
        return replace(source, notes=(note,))
    raise InputError(
        f"the model type '{model_type}' needs code that ships with the checkpoint, and that is not run",
        where=source.name,
        allowed="model types that transformers knows",
        next_step="read that code, then pass --trust-remote-code; it will be recorded",
    )


def _cleaned(source: Source) -> Source:
    """The source with a config that fetches nothing, of the language model alone where there are others."""
    quantization = quantization_of(source.config)
    if source.uses_remote_code:
        return replace(source, quantization=quantization)
    config = without_fetching(source.config)
    has_code = source.folder is not None and (source.folder / "custom_generate").exists()
    is_plain = config == source.config and not quantization and not has_code
    config = {key: value for key, value in config.items() if key not in QUANTIZATION_FIELDS}
    source = replace(source, config=config, quantization=quantization, is_plain=is_plain)
    if why_not_read(quantization) is None and quantization:
        note = f"the original is quantized ({described(quantization)}): {DEQUANTIZED}"
        source = replace(source, notes=(*source.notes, note))
    return _with_answers(_language_model_of(source))


def _with_answers(source: Source) -> Source:
    """The source with the class that predicts tokens, where the named one is an encoder-decoder without head.

    Published BART and T5 name their base class, and the head is the embedding's table.
    """
    model_type = source.config["model_type"]
    cls, with_head = named_class(source), SEQ2SEQ.get(model_type)
    if cls is None or with_head is None or cls.__name__ != MODEL_MAPPING_NAMES.get(model_type):
        return source
    note = f"{cls.__name__} predicts no tokens: {with_head} was taken"
    config = {**source.config, "architectures": [with_head]}
    return replace(source, config=config, notes=(*source.notes, note))


def with_sentence(source: Source) -> Source:
    """The source with the pooling in its folder, which reads the states of the class without a head."""
    sentence = read_sentence_model(source.folder) if source.folder else None
    if sentence is None:
        return source
    cls, base = named_class(source), MODEL_MAPPING_NAMES.get(source.config["model_type"])
    if cls is None or not re.search("For(MaskedLM|PreTraining)$", cls.__name__):
        return replace(source, sentence=sentence)
    note = f"the head of {cls.__name__} was left out: {MODULES_FILE} names a pooling behind {base}"
    config = {**source.config, "architectures": [base]}
    return replace(source, config=config, sentence=sentence, has_pooler=False, notes=(*source.notes, note))


def _language_model_of(source: Source) -> Source:
    model_type = source.config["model_type"]
    if model_type not in CONFIG_MAPPING or not has_language_model(model_type, source.config):
        return source
    whole = make_config(source)
    if getattr(whole, "text_config", None) is None:
        return source
    decides = whole if TRANSFORMERS_MAJOR >= FIRST_MAJOR_WITH_ROPE_PARAMETERS else whole.text_config
    tied = bool(getattr(decides, "tie_word_embeddings", True))
    config = without_fetching(language_model(whole, tied=tied, where=source.name))
    note = f"{model_type} is a multimodal model: its language model, {config['model_type']}, was taken alone"
    return replace(source, config=config, is_plain=False, notes=(*source.notes, note))


def _fetch_config(name: str) -> Path:
    """The config alone, from the Hub or its local cache."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # Without a network the library retries for half a minute; its cache answers at once.
        offline = not hub_is_reachable(constants.ENDPOINT)
        return Path(hf_hub_download(name, "config.json", local_files_only=offline)).parent
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise InputError(
            f"no folder, no built-in model, and the Hub gave nothing ({type(error).__name__})",
            where=name,
            allowed=f"built-in: {DEMO_NAME}, {', '.join(known_names())}",
            next_step=did_you_mean(name, (DEMO_NAME, *known_names()))
            or (
                "(1) give a local folder with config.json, (2) use a built-in name, or (3) connect to "
                f"the network and check the name ('hf download {name}' elsewhere makes a folder to copy)"
            ),
        ) from error


def build_on_meta(source: Source) -> nn.Module:
    """The modules with shapes and without storage; a 70B model takes seconds and no memory."""
    config = make_config(source)
    fault = f"transformers {transformers.__version__} cannot build it"
    next_step = "correct config.json: its sizes, or the field named above; or install another transformers"
    with reading(source.name, fault, next_step=next_step), _bounded_modules(source.name):
        try:
            with torch.device("meta"):
                return make_model(source, config)
        except NotImplementedError:  # the class reads a buffer while it is built, as transformers 4's Apertus
            with parameters_without_storage():
                return make_model(source, config).to("meta")


@contextmanager
def parameters_without_storage() -> Iterator[None]:
    """Modules built inside have real buffers and parameters without storage."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(self, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextmanager
def _bounded_modules(where: str) -> Iterator[None]:
    """Stop a model that would take minutes and gigabytes to build from its modules alone."""
    count = itertools.count(1)

    def require_few(*_: object) -> None:
        if next(count) > MAX_MODULES:
            raise InputError(
                f"the config asks for more than {MAX_MODULES:,} modules",
                where=where,
                next_step="correct config.json: its number of layers or of experts",
            )

    hook = register_module_module_registration_hook(require_few)
    try:
        yield
    finally:
        hook.remove()


def require_counts(config: Mapping[str, Any], where: str) -> None:
    """Refuse numbers of layers, experts or labels for which transformers would build lists without end."""
    for key, value in config.items():
        if isinstance(value, dict):
            require_counts(value, where)
        largest = MAX_COUNTS.get(str(key).rpartition("_")[2])  # labels have numbers as keys
        if largest and isinstance(value, int) and value > largest:
            raise InputError(f"'{key}' is {value}", where=where, allowed=f"up to {largest:,}")


def make_config(source: Source) -> Any:
    model_type = source.config["model_type"]
    if source.uses_remote_code:
        location = str(source.folder) if source.folder else source.name
        return transformers.AutoConfig.from_pretrained(location, trust_remote_code=True)
    config_class = _config_class(source)
    if config_class is None:
        raise InputError(
            f"transformers {transformers.__version__} does not know the model type '{model_type}'",
            where=source.name,
            next_step="check the spelling, or install a newer transformers",
        )
    require_counts(source.config, source.name)
    next_step = "correct the named field in config.json"
    with reading(source.name, "transformers refuses the config", next_step=next_step):
        fields = {
            key: value
            for key, value in spelled_for(source.config, TRANSFORMERS_MAJOR).items()
            if key not in ("model_type", "auto_map")
        }
        return config_class.from_dict(fields)


def _config_class(source: Source) -> Any:
    """The class of the config; the auto classes do not list all towers, whose own classes name it."""
    model_type = source.config["model_type"]
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    own = getattr(named_class(source), "config_class", None)
    return own if getattr(own, "model_type", None) == model_type else None


def model_class(architecture: str) -> Any:
    """The class of a model by its name: one of quantkit's own, or one that transformers exports."""
    named = OWN_MODELS.get(architecture) or getattr(transformers, architecture, None)
    return named if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel) else None


def named_class(source: Source) -> Any:
    """The first known class that the config's `architectures` names, or None."""
    classes = (model_class(str(name)) for name in source.config.get("architectures") or ())
    return next((cls for cls in classes if cls is not None), None)


def make_model(source: Source, config: Any) -> nn.Module:
    """The class that the config names, else the first auto class that fits; no weight is initialised."""
    with _without_initialisation():
        if source.uses_remote_code:
            return _make_model(source, config)
        with without_hub_kernels():
            return with_separate_experts(_make_model(source, config))


@contextmanager
def _without_initialisation() -> Iterator[None]:
    """Some initialisers of transformers 4 fail on norms without weights, and no weight has storage yet."""
    cls: Any = transformers.PreTrainedModel
    original = cls.initialize_weights
    cls.initialize_weights = lambda self: None
    try:
        yield
    finally:
        cls.initialize_weights = original


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Keeps Mamba of transformers 4 from running code of the Hub where the package `kernels` is installed."""
    imports: Any = transformers.utils.import_utils
    before = getattr(imports, "_kernels_available", None)
    if before is not None:
        imports._kernels_available = False
    try:
        yield
    finally:
        if before is not None:
            imports._kernels_available = before


def _make_model(source: Source, config: Any) -> nn.Module:
    if not source.uses_remote_code and (cls := named_class(source)) is not None:
        takes_pooler = "add_pooling_layer" in signature(cls.__init__).parameters
        options = {"add_pooling_layer": False} if takes_pooler and not source.has_pooler else {}
        return cls._from_config(config, **options)  # type: ignore[no-any-return]
    auto_classes: tuple[Any, ...] = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
    )
    for auto_class in auto_classes:
        try:
            model: nn.Module = auto_class.from_config(config, trust_remote_code=source.uses_remote_code)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
        else:
            return model
    last_class: Any = transformers.AutoModel
    return last_class.from_config(config, trust_remote_code=source.uses_remote_code)  # type: ignore[no-any-return]
