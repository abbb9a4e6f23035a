"""Chat templates beside transformers' rendering, refusals, and the command with --chat."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys

import pytest
from commands import quantkit as command
from commands import refused
from transformers import AutoTokenizer

import quantkit
from quantkit.errors import InputError
from quantkit.model.load import open_source
from quantkit.pipeline.package import pack
from quantkit.runtime.chat import conversation, open_chat_template

pytestmark = pytest.mark.once
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LINES = """{{ bos_token }}
{%- if tools is not none and tools is defined %}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{%- set ns = namespace(count=0) %}
    {%- for message in messages %}
    {%- if message.role == "system" %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
[{{ ns.count }}] {{ message.role | upper }}: {{ message.content | trim }}{{ eos_token }}
    {{- message | tojson }}
    {%- endfor %}
{{- strftime_now("%Y") }}
"""
NO_SYSTEM = """{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}<model>"""
DIALOGUES = [
    conversation("Hello <b> & \"you\" é 'ÿ'"),
    conversation("  spaces  ", "Answer briefly.\n"),
    [*conversation("one"), {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}],
]


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(open_source("demo").folder, tmp_path / "model")


def give(folder, template):
    """The template as a file of its own, as new checkpoints have it."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def keep_in_config(folder, template):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))


@pytest.mark.parametrize("place", [give, keep_in_config])
@pytest.mark.parametrize("template", [CHATML, LINES], ids=["chatml", "lines"])
@pytest.mark.parametrize("messages", DIALOGUES, ids=["one", "system", "turns"])
def test_a_template_gives_what_transformers_gives(template, messages, place, folder):
    place(folder, template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert open_chat_template(folder).render(messages) == wanted


def test_the_default_of_several_templates(folder):
    keep_in_config(
        folder, [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ 1 + 1 }}"}]
    )
    assert open_chat_template(folder).render(conversation("a")) == "2"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NO_SYSTEM, "no system role"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(1000000000) %}a{% endfor %}", "OverflowError"),
    ],
)
def test_a_template_that_refuses_or_attacks_is_one_line(template, words, folder):
    give(folder, template)
    with pytest.raises(InputError, match="the chat template does not take this conversation") as caught:
        open_chat_template(folder).render(conversation("a", "b"))
    assert words in str(caught.value)
    assert "chat_template.jinja" in str(caught.value)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    source = shutil.copytree(open_source("demo").folder, folder / "model")
    give(source, "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }}\n{% endfor %}a:")
    off = {"accuracy": False, "latency": False, "memory": False}
    return quantkit.quantize(str(source), output=folder / "out", **off).folder


def test_the_answer_is_the_continuation_of_the_rendered_turns(artifact):
    model = quantkit.load(artifact)
    wanted = model.generate("s: Be brief\nu: The king\na:", max_new_tokens=12)
    answer = model.chat(conversation("The king", "Be brief"), max_new_tokens=12)
    assert answer == wanted
    asked = ("The king", "--chat", "--system", "Be brief", "--max-new-tokens", "12")
    assert command("generate", str(artifact), *asked).stdout == wanted + "\n"
    assert json.loads(command("generate", str(artifact), *asked, "--json").stdout)[0]["text"] == wanted
    assert model.chat("The king", max_new_tokens=4) == model.generate("u: The king\na:", max_new_tokens=4)
    with pytest.raises(InputError, match="messages"):
        model.chat([{"role": "user"}])


def test_a_package_chats_too(artifact, tmp_path):
    """With its template, special tokens and renderer; an artifact without a template has none of them."""
    packed = pack(artifact, tmp_path / "packed").path
    wanted = quantkit.load(artifact).chat(conversation("The king", "Be brief"), max_new_tokens=12)
    asked = ("The king", "--chat", "--system", "Be brief", "--max-new-tokens", "12")
    for options in (asked, (*asked, "--json")):
        ran = run_package(packed, *options)
        assert ran.returncode == 0, ran.stderr
        assert (json.loads(ran.stdout)["text"] if "--json" in options else ran.stdout[:-1]) == wanted
    (packed / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
    ran = run_package(packed, *asked, "--no-check")
    assert ran.returncode == 1 and "no system here" in ran.stderr and "Traceback" not in ran.stderr
    off = {"accuracy": False, "latency": False, "memory": False}
    plain = pack(quantkit.quantize("demo", output=tmp_path / "plain", **off).folder, tmp_path / "bare")
    assert not {"chat.py", "chat_template.jinja", "tokenizer_config.json"} & {*plain.files}


def run_package(folder, *arguments):
    command = [sys.executable, "-E", "-s", "-B", str(folder / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", check=False)


def test_standard_input_is_a_prompt_or_a_turn(artifact, monkeypatch):
    options = ("--max-new-tokens", "6")
    given = command("generate", str(artifact), "The king", *options).stdout
    monkeypatch.setattr("sys.stdin", io.StringIO("The king\n"))
    assert command("generate", str(artifact), "-", *options).stdout == given
    turn = command("generate", str(artifact), "The king", "--chat", *options).stdout
    monkeypatch.setattr("sys.stdin", io.StringIO("The king\n"))
    assert command("generate", str(artifact), "--chat", *options).stdout == turn


def test_a_dialogue_remembers_its_turns(artifact, monkeypatch):
    typed = iter(["The king", "And then", ""])
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    said = command("generate", str(artifact), "--chat", "--max-new-tokens", "6")
    assert said.returncode == 0, said.stderr
    model = quantkit.load(artifact)
    turns = conversation("The king")
    first = model.chat(turns, max_new_tokens=6)
    turns = [*turns, {"role": "assistant", "content": first.strip()}, *conversation("And then")]
    assert said.stdout == f"{first}\n{model.chat(turns, max_new_tokens=6)}\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_wrong_use_is_one_line(artifact):
    assert "no chat template" in refused("generate", "demo", "The king", "--chat")
    assert "--system" in refused("generate", str(artifact), "a", "--system", "b")
    assert "PROMPTS: no prompt" in refused("generate", str(artifact))
    assert "read once" in refused("generate", str(artifact), "-", "-")
