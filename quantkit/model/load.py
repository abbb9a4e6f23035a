"""From what a user types to a model on the meta device: no weights, no code from a checkpoint, no guess.

A source is the embedded model (`demo`), a local folder, a well-known name whose config ships with
quantkit, or a Hub name. Remote code never runs unless it was asked for, and pickles are refused.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantkit.errors import InputError
from quantkit.model.architectures.register import OWN_MODELS
from quantkit.model.config import spelled_for
from quantkit.model.known import known_config, known_names

DEMO_NAME = "demo"
HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
TRANSFORMERS_MAJOR = int(transformers.__version__.split(".")[0])
_transformers_logging: Any = transformers.logging
_transformers_logging.set_verbosity_error()  # its advice to users of transformers would only confuse ours


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A model before anything is built."""

    name: str
    kind: Literal["demo", "folder", "known", "hub"]
    config: Mapping[str, Any]
    folder: Path | None  # where config, tokenizer and weights lie
    uses_remote_code: bool = False
    notes: tuple[str, ...] = ()


def open_source(name: str, *, trust_remote_code: bool = False) -> Source:
    """Find what the user named; a local folder goes before a well-known name, and that before the Hub."""
    if name == DEMO_NAME:
        folder = Path(str(resources.files("quantkit") / "assets" / "demo"))
        return Source(name=name, kind="demo", config=_read_config(folder), folder=folder)
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent
    if path.is_dir():
        return _check_remote_code(
            Source(name=path.resolve().name, kind="folder", config=_read_config(path), folder=path),
            trust_remote_code,
        )
    config = known_config(name)
    if config is not None:
        return Source(name=name, kind="known", config=config, folder=None)
    if not HUB_NAME.match(name):
        raise InputError(
            "no such folder, and not a model name",
            where=name,
            allowed="a folder with config.json, 'demo', a well-known name, or a Hub name",
            next_step="check the path",
        )
    folder = _fetch_config(name)
    source = Source(name=name, kind="hub", config=_read_config(folder), folder=None)
    return _check_remote_code(source, trust_remote_code)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise InputError(
            "the folder has no config.json",
            where=str(folder),
            allowed="a folder as written by save_pretrained",
            next_step="point to the folder that holds config.json beside the weights",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"not readable as JSON ({error})", where=str(path), next_step="copy or download the file again"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError(
            'the config names no "model_type"',
            where=str(path),
            allowed="a transformers config with a model_type such as 'gpt2'",
            next_step="add the model_type or save the model again with save_pretrained",
        )
    return config


def _check_remote_code(source: Source, trust_remote_code: bool) -> Source:
    """Refuse code that ships with a checkpoint, unless asked for or not needed."""
    if "auto_map" not in source.config:
        return source
    model_type = source.config["model_type"]
    if trust_remote_code:
        note = "remote code was used, as --trust-remote-code asks"
        return _replace(source, uses_remote_code=True, notes=(*source.notes, note))
    if model_type in CONFIG_MAPPING:
        note = "the checkpoint brings code of its own; it was refused, transformers' own class was used"
        return _replace(source, notes=(*source.notes, note))
    raise InputError(
        f"the model type '{model_type}' needs code that ships with the checkpoint, and that is not run",
        where=source.name,
        allowed="model types that transformers knows",
        next_step="read that code, then pass --trust-remote-code; it will be recorded",
    )


def _replace(source: Source, *, uses_remote_code: bool = False, notes: tuple[str, ...]) -> Source:
    return Source(
        name=source.name,
        kind=source.kind,
        config=source.config,
        folder=source.folder,
        uses_remote_code=uses_remote_code,
        notes=notes,
    )


def _fetch_config(name: str) -> Path:
    """The config alone, from the Hub or its local cache."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # Without a network the library would retry aloud for half a minute; the cache answers at once.
        offline = not hub_is_reachable(constants.ENDPOINT)
        return Path(hf_hub_download(name, "config.json", local_files_only=offline)).parent
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise InputError(
            f"no folder, no built-in model, and the Hub gave nothing ({type(error).__name__})",
            where=name,
            allowed=f"built-in: {DEMO_NAME}, {', '.join(known_names())}",
            next_step=(
                "(1) give a local folder with config.json, (2) use a built-in name, or (3) connect to "
                f"the network and check the name ('hf download {name}' elsewhere makes a folder to copy)"
            ),
        ) from error


def hub_is_reachable(endpoint: str) -> bool:
    """Whether a connection can be tried at all; behind a proxy only the request itself can tell."""
    address = urlsplit(endpoint)
    if getproxies().get(address.scheme):
        return True
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=5):
            return True
    except OSError:
        return False


def build_on_meta(source: Source) -> nn.Module:
    """The model's modules with shapes and no storage; a 70B model takes seconds and no memory."""
    config = make_config(source)
    try:
        with torch.device("meta"):
            return make_model(source, config)
    except InputError:
        raise
    except Exception as error:  # any fault here comes from values in the user's config
        raise InputError(
            f"transformers {transformers.__version__} cannot build it ({type(error).__name__}: {error})",
            where=source.name,
            next_step="correct config.json: its sizes, or the field named above",
        ) from error


def make_config(source: Source) -> Any:
    """The config object of the source, as transformers builds it."""
    model_type = source.config["model_type"]
    if source.uses_remote_code:
        location = str(source.folder) if source.folder else source.name
        return transformers.AutoConfig.from_pretrained(location, trust_remote_code=True)
    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"transformers {transformers.__version__} does not know the model type '{model_type}'",
            where=source.name,
            next_step="check the spelling, or install a newer transformers",
        )
    fields = {
        key: value
        for key, value in spelled_for(source.config, TRANSFORMERS_MAJOR).items()
        if key not in ("model_type", "auto_map")
    }
    try:
        return CONFIG_MAPPING[model_type].from_dict(fields)
    except InputError:
        raise
    except Exception as error:  # as above: the values are the user's
        raise InputError(
            f"transformers refuses the config ({type(error).__name__}: {error})",
            where=source.name,
            next_step="correct the named field in config.json",
        ) from error


def model_class(architecture: str) -> Any:
    """The class of a model by its name: one of quantkit's own, or one that transformers exports."""
    found = OWN_MODELS.get(architecture) or getattr(transformers, architecture, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def make_model(source: Source, config: Any) -> nn.Module:
    """The class that the config names, else the first auto class that fits."""
    if not source.uses_remote_code:
        for architecture in source.config.get("architectures") or ():
            found = model_class(str(architecture))
            if found is not None:
                return found._from_config(config)  # type: ignore[no-any-return]
    auto_classes: tuple[Any, ...] = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModel,
    )
    for auto_class in auto_classes[:-1]:
        try:
            model: nn.Module = auto_class.from_config(config, trust_remote_code=source.uses_remote_code)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
        else:
            return model
    fallback: nn.Module = auto_classes[-1].from_config(config, trust_remote_code=source.uses_remote_code)
    return fallback
