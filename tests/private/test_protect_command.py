"""The whole way by commands: protect, serve in one process, generate in another, and every refusal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time

import pytest
from exporting import build_tiny

from quantkit.cli.protect import protect
from quantkit.errors import InputError
from quantkit.model.families import FAMILIES
from quantkit.pipeline.quantize import quantize
from quantkit.recipe import check_recipe

pytestmark = pytest.mark.once

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
COMMAND = [sys.executable, "-m", "quantkit.cli"]
PROMPT = "In the beginning"


def run(*arguments, code=0, **options):
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
        **options,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    if code:
        assert done.stderr.count("\n") == 1, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A protected demo, and the same in one piece; per channel, so that both say exactly the same."""
    folder = tmp_path_factory.mktemp("protected")
    options = ["--scheme", "int8_channel", "--min-dim", "1"]
    said = run("protect", "demo", "--key", folder / "my.key", "-o", folder / "out", *options)
    recipe = {"model": "demo", "scheme": "int8_channel", "select": {"min_dim": 1}}
    recipe["measure"] = {"accuracy": False, "latency": False, "memory": False}
    quantize(recipe=check_recipe(recipe, where="test"), output=folder / "whole")
    (folder / "said.txt").write_text(said, encoding="utf-8")
    return folder


@contextlib.contextmanager
def serving(folder, *options):
    """(address, process) of a host in a process of its own."""
    command = [*COMMAND, "serve-host", str(folder), "--port", "0", "--threads", "1", *map(str, options)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, (line, process.stderr.read() if process.poll() is not None else "")
        yield found[0], process
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert err == ""
    assert out == "", "nothing is logged"


def test_two_processes_say_what_one_says(place):
    key = json.loads((place / "my.key").read_text())["key"]
    options = ["--max-new-tokens", "12", "--threads", "1"]
    whole = run("generate", place / "whole", PROMPT, "The king", "--json", *options)
    client = place / "out" / "client"
    with serving(place / "out" / "host") as (url, _):
        token_file = place / "out" / "host.token"
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        made = run("generate", client, "--host", url, PROMPT, "The king", "--json", *options)
        assert json.loads(made) == json.loads(whole)
        streamed = run("generate", client, "--host", url, PROMPT, *options)
        assert streamed == PROMPT + json.loads(whole)[0]["text"] + "\n"
        wrong = place / "wrong.token"
        if not wrong.exists():
            wrong.write_text("x" * 30)
        wrong.chmod(0o600)
        said = run("generate", client, "--host", url, "--token-file", wrong, "a", code=2)
        assert "wrong token" in said
        wrong.chmod(0o644)
        assert "others may read" in run("generate", client, "--host", url, "--token-file", wrong, "a", code=2)
        port = url.rsplit(":", 1)[1]
        assert "the port is taken" in run("serve-host", place / "out" / "host", "--port", port, code=2)
        for text in (made, streamed, said, (place / "said.txt").read_text()):
            assert key not in text
            assert token_file.read_text().strip() not in text
    said = run("generate", client, "--host", url, "a", code=2)
    assert "Connection refused" in said


def test_sides_are_not_mistaken_for_each_other(place):
    host, client = place / "out" / "host", place / "out" / "client"
    assert "says nothing alone" in run("generate", client, "a", code=2)
    assert "says nothing alone" in run("generate", host, "a", code=2)
    assert "give" in run("generate", host, "--host", "http://127.0.0.1:9", "a", code=2)
    assert "this is the client side" in run("serve-host", client, code=2)
    assert "no side of a protected model" in run("serve-host", place / "whole", code=2)
    assert stat.S_IMODE(client.stat().st_mode) == 0o700


def test_the_key_is_in_nothing_but_its_file(place):
    document = json.loads((place / "my.key").read_text())
    assert stat.S_IMODE((place / "my.key").stat().st_mode) == 0o600
    for path in sorted((place / "out").rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            assert bytes.fromhex(document["key"]) not in content, path
            assert document["key"].encode() not in content, path
            assert b"my.key" not in content, path


REFUSED = {
    "another model's key": ({"model": "gpt2"}, "the key is for another model"),
    "an encoder": ({"model": "bert", "key": "new.key"}, "fused decoder"),
    "a mixture": ({"model": "mixtral", "key": "new.key"}, "choose among experts"),
    "no residual": ({"permute": "ffn"}, "without 'residual'"),
    "an unknown space": ({"permute": "residual,x"}, "'x'; allowed: residual"),
    "four bits": ({"scheme": "int4_block32"}, "allowed: schemes int8_block16"),
    "fixed ranges": ({"scheme": "int8_static8"}, "allowed: schemes int8_block16"),
    "an unknown scheme": ({"scheme": "int3"}, "scheme"),
    "a key inside": ({"key": "out/client/a.key"}, "the key would lie inside the output"),
    "nowhere": ({"output": None}, "nowhere to write to"),
    "an older output": ({"output": "older"}, "pass --force"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_protect_refuses(case, place, tmp_path):
    changes, reason = REFUSED[case]
    for name, row in (("gpt2", "gpt2"), ("bert", "bert"), ("mixtral", "mixtral")):
        if changes.get("model") == name:
            build_tiny(FAMILIES[row].tiny_class, dict(FAMILIES[row].tiny)).save_pretrained(tmp_path / name)
            changes = {**changes, "model": str(tmp_path / name)}
    given = {
        "model": "demo",
        "output": tmp_path / "out",
        "min_dim": "1",
        "permute": "residual",
        "as_json": True,
        **changes,
    }
    if changes.get("output") == "older":
        given["output"] = place / "out"
    given["key"] = tmp_path / changes["key"] if "key" in changes else place / "my.key"
    with pytest.raises(InputError, match=reason) as raised:
        protect(**given)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "new.key").exists(), "no key is made for what is refused"


def test_a_host_needs_neither_torch_nor_transformers(place):
    code = (
        "import sys\nfrom pathlib import Path\nimport quantkit.cli.serve_host\n"
        "from quantkit.private.host import model, server\n"
        f"model.open_host(Path({str(place / 'out' / 'host')!r}), threads=1)\n"
        "print({'torch', 'transformers', 'onnx', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_both_sides_name_the_extra_that_is_missing(place):
    """Without the package that carries the messages."""
    code = "import sys; sys.modules['websockets'] = None; from quantkit.cli import main; sys.exit(main())"
    host, client = place / "out" / "host", place / "out" / "client"
    for arguments in (["serve-host", host], ["generate", client, "--host", "http://127.0.0.1:9", "a"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "pip install 'quantkit-onnx[private]'" in done.stderr


def test_a_damaged_host_is_one_line(place, tmp_path):
    folder = tmp_path / "host"
    folder.mkdir()
    for path in (place / "out" / "host").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    model = folder / "model.onnx"
    model.write_bytes(model.read_bytes()[:5000])
    assert "model.onnx" in run("serve-host", folder, "--port", "0", code=2)
    model.unlink()
    assert "model.onnx is missing" in run("serve-host", folder, "--port", "0", code=2)
    (folder / "manifest.json").write_text('{"kind": "host"}')
    assert "manifest is damaged" in run("serve-host", folder, "--port", "0", code=2)


def test_a_client_that_is_killed_frees_its_cache(place):
    """One place at the host: a second client finds it free, though the first never said goodbye."""
    options = ["--token-file", place / "out" / "host.token"]
    with serving(place / "out" / "host", "--max-clients", "1") as (url, _):
        command = [*COMMAND, "generate", str(place / "out" / "client"), "--host", url, *map(str, options)]
        first = subprocess.Popen(
            [*command, "--max-new-tokens", "400", "--threads", "1", PROMPT],
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        assert first.stdout.read(5)
        first.kill()
        first.wait()
        time.sleep(0.3)
        client = place / "out" / "client"
        assert PROMPT in run("generate", client, "--host", url, PROMPT, "--max-new-tokens", "2", *options)
