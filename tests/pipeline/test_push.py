"""`push` with the Hub's real client, against a stand-in of its HTTP API on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import ModelCard

import quantkit

pytestmark = pytest.mark.once


class Hub(BaseHTTPRequestHandler):
    """Repositories, small files in the commit, large ones through LFS."""

    def log_message(self, *_):
        pass

    def answer(self, document, code=200):
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self):
        self.answer({"sha": "0" * 40, "id": "me/small", "siblings": []})

    def do_PUT(self):
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self):
        body, address = self.body(), f"http://127.0.0.1:{self.server.server_port}"
        if self.headers.get("Authorization") != "Bearer hf_right":
            self.answer({"error": "wrong token"}, 401)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{address}/me/small"})
        elif self.path.startswith("/api/models/me/small/preupload"):
            files = json.loads(body)["files"]
            modes = [("lfs" if each["path"].endswith(".onnx") else "regular", each["path"]) for each in files]
            self.answer({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for m, p in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{address}/large/{each['oid']}", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self.server.commit = [json.loads(line) for line in body.splitlines()]
            self.answer({"commitUrl": f"{address}/me/small/commit/1", "commitOid": "1" * 40})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        else:
            self.answer({}, 404)


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.created, server.large, server.commit = [], {}, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("push") / "artifact"
    quantkit.quantize("demo", output=folder, accuracy=False, latency=False, memory=False)
    return folder


def push(hub, folder, *arguments, **environment):
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "hf_right",
    }
    command = [sys.executable, "-m", "quantkit.cli", "push", str(folder), *arguments]
    return subprocess.run(
        command, env={**os.environ, **settings, **environment}, capture_output=True, text=True, check=False
    )


def test_every_file_of_the_manifest_and_the_card_arrive(artifact, hub):
    done = push(hub, artifact, "me/small", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"pushed: http://127.0.0.1:{hub.server_port}/me/small\n"
    assert hub.created[0]["private"] is True
    (header, *entries) = hub.commit
    small = {
        entry["value"]["path"]: base64.b64decode(entry["value"]["content"])
        for entry in entries
        if entry["key"] == "file"
    }
    large = {entry["value"]["path"]: entry["value"]["oid"] for entry in entries if entry["key"] == "lfsFile"}
    listed = {*json.loads((artifact / "manifest.json").read_text())["files"], "manifest.json", "README.md"}
    assert {*small, *large} == listed
    assert header["value"]["summary"] == "Quantized with quantkit"
    assert all(content == (artifact / name).read_bytes() for name, content in small.items())
    (graph,) = hub.large.values()
    assert graph == (artifact / "model.onnx").read_bytes()
    assert large == {"model.onnx": hashlib.sha256(graph).hexdigest()}


def test_what_the_hub_refuses_is_one_line(artifact, hub):
    for repository, environment in (("me/small", {"HF_TOKEN": "hf_wrong"}), ("no//name", {})):
        done = push(hub, artifact, repository, **environment)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
        assert repository in done.stderr and "'hf auth login'" in done.stderr
    done = push(hub, artifact, "me/small", HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "is not reachable" in done.stderr
    assert hub.commit == []


def test_a_damaged_artifact_does_not_leave(artifact, hub, tmp_path):
    import shutil

    folder = shutil.copytree(artifact, tmp_path / "damaged")
    (folder / "config.json").write_text("{}")
    done = push(hub, folder, "me/small")
    assert done.returncode == 2 and "config.json differs from the manifest" in done.stderr
    assert hub.created == []


def test_the_card_is_one_that_the_hub_reads_and_people_may_change(artifact):
    card = ModelCard.load(artifact / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.base_model is None  # the demo is not on the Hub
    assert {"onnx", "quantized", "int8_block32"} <= set(card.data.tags)
    assert "37 of 37 projections" in card.text and "genai" in card.text
    with (artifact / "README.md").open("a") as file:
        file.write("\nOurs.\n")
    assert quantkit.load(artifact).report.model == "demo"
