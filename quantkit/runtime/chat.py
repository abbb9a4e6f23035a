"""The chat template of an artifact; `on_device/chat.py` renders it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import InputError
from quantkit.files import read_json, read_text, reading
from quantkit.runtime.on_device.chat import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    Message,
    conversation,
    render,
    special_tokens_in,
    template_in,
)

__all__ = [
    "CONFIG_FILE", "TEMPLATE_FILE", "ChatTemplate", "Message", "check_messages", "conversation",
    "has_chat_template", "open_chat_template",
]  # fmt: skip

MAX_BYTES = 1 << 20  # the longest published template has 20 KB


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    path: Path
    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation up to the beginning of the next answer, special tokens included."""
        with reading(self.path, "the chat template does not take this conversation"):
            return render(self.source, self.special_tokens, messages)


def has_chat_template(folder: Path) -> bool:
    config = folder / CONFIG_FILE
    if (folder / TEMPLATE_FILE).exists():
        return True
    return config.exists() and template_in(read_json(config)) is not None


def open_chat_template(folder: Path) -> ChatTemplate:
    """The template beside the tokenizer, or the one in its config, where older checkpoints have it."""
    config_path, path = folder / CONFIG_FILE, folder / TEMPLATE_FILE
    config = read_json(config_path) if config_path.exists() else {}
    source = read_text(path, MAX_BYTES) if path.exists() else template_in(config)
    if source is None:
        raise InputError(
            "the model has no chat template",
            where=str(folder),
            allowed=f"{TEMPLATE_FILE}, or 'chat_template' in {CONFIG_FILE}",
            next_step="leave --chat out to continue a text, or copy the template of the model's chat version",
        )
    return ChatTemplate(
        path=path if path.exists() else config_path,
        source=source,
        special_tokens=special_tokens_in(config),
    )


def check_messages(messages: Iterable[Message]) -> list[Message]:
    """Messages with a role and a text each."""
    checked = list(messages)
    for message in checked:
        if {*message} != {"role", "content"} or not all(isinstance(part, str) for part in message.values()):
            raise InputError(
                f"{message!r}", where="messages", allowed='{"role": "user", "content": "..."} with texts'
            )
    return checked
