"""Conversations as the text that a model was trained on: its chat template, rendered by Jinja.

A template comes with the checkpoint, so it is rendered in Jinja's sandbox: it reads what it is given, and no
attribute of Python. The names that templates may use are those of transformers
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quantkit.errors import InputError
from quantkit.files import read_json, read_text, reading

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
MAX_BYTES = 1 << 20  # the longest published template has 20 KB
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
Message = Mapping[str, str]  # "role": system, user or assistant; "content"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    path: Path
    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation up to the beginning of the next answer, special tokens included."""
        with reading(self.path, "the chat template does not take this conversation"):
            template = _environment().from_string(self.source)
            rendered: str = template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        return rendered


def conversation(prompt: str, system: str | None = None) -> list[Message]:
    """The first turn of a user."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def open_chat_template(folder: Path) -> ChatTemplate:
    """The template beside the tokenizer, or the one in its config, where older checkpoints have it."""
    config_path, path = folder / CONFIG_FILE, folder / TEMPLATE_FILE
    config = read_json(config_path) if config_path.exists() else {}
    source = read_text(path, MAX_BYTES) if path.exists() else _default(config.get("chat_template"))
    if not isinstance(source, str):
        raise InputError(
            "the model has no chat template",
            where=str(folder),
            allowed=f"{TEMPLATE_FILE}, or 'chat_template' in {CONFIG_FILE}",
            next_step="leave --chat out to continue a text, or copy the template of the model's chat version",
        )
    return ChatTemplate(
        path=path if path.exists() else config_path,
        source=source,
        special_tokens={key: text for key in SPECIAL_TOKENS if (text := _content(config.get(key)))},
    )


def _default(template: Any) -> Any:
    """The template called "default" of several."""
    if not isinstance(template, list):
        return template
    named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    return named.get("default")


def _content(token: Any) -> str:
    """The text of a special token, which may be an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _environment() -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    return environment


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def check_messages(messages: Iterable[Message]) -> list[Message]:
    """Messages with a role and a text each."""
    checked = list(messages)
    for message in checked:
        if {*message} != {"role", "content"} or not all(isinstance(part, str) for part in message.values()):
            raise InputError(
                f"{message!r}", where="messages", allowed='{"role": "user", "content": "..."} with texts'
            )
    return checked
