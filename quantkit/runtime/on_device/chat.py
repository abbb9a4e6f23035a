"""A conversation as the text that the model was trained on: its chat template, rendered by Jinja.

A template comes with the checkpoint, so it is rendered in Jinja's sandbox: it reads what it is given, and no
attribute of Python. The names that templates may use are those of transformers
(https://huggingface.co/docs/transformers/chat_templating_writing). Packages have this file too: it needs
jinja2 alone.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
Message = Mapping[str, str]  # "role": system, user or assistant; "content"


def conversation(prompt: str, system: str | None = None) -> list[Message]:
    """The first turn of a user."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def template_in(config: Mapping[str, Any]) -> str | None:
    """The template in a tokenizer's config, as older checkpoints have it; of several the "default"."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def special_tokens_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens, each of which may be an object."""
    tokens = {key: config.get(key) for key in SPECIAL_TOKENS}
    texts = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    return {key: text for key, text in texts.items() if text and isinstance(text, str)}


def render(source: str, special_tokens: Mapping[str, str], messages: Sequence[Message]) -> str:
    """The conversation up to the beginning of the next answer, special tokens included."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    rendered: str = environment.from_string(source).render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=True,
        tools=None,
        documents=None,
        **special_tokens,
    )
    return rendered


def rendered_here(folder: Path, prompt: str, system: str | None) -> str:
    """A user's first turn by the template in a package."""
    path, config_path = folder / TEMPLATE_FILE, folder / CONFIG_FILE
    try:
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
        source = path.read_text(encoding="utf-8") if path.exists() else template_in(config)
        if source is None:
            sys.exit("the model has no chat template; leave --chat out to continue a text")
        return render(source, special_tokens_in(config), conversation(prompt, system))
    except ImportError:
        sys.exit("--chat needs jinja2: pip install jinja2")
    except Exception as error:  # a template may raise anything
        sys.exit(f"the chat template does not take this conversation ({type(error).__name__}: {error})")


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
