"""TABLE: every parser of files and messages that others wrote, with its seed and its entry point."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mutations
import numpy as np
from hypothesis.strategies import SearchStrategy

CORPUS = Path(__file__).parent / "corpus"
Entry = Callable[[Path, Path], object]  # (folder of the case, the mutated file in it)


@dataclass(frozen=True)
class Parser:
    folder: str  # of the corpus, copied for the cases; empty: a single file
    file: str  # that is mutated
    contents: Callable[[bytes], SearchStrategy[bytes]]
    entry: Entry
    seed: bytes | None = None  # where the corpus holds no such file


def read_recipe(folder: Path, file: Path) -> None:
    from quantkit.recipe import dump_recipe, load_recipe

    dump_recipe(load_recipe(file))


def read_config(folder: Path, file: Path) -> None:
    from quantkit.model.inspect import inspect_source
    from quantkit.model.load import open_source
    from quantkit.pipeline.inspect import specification
    from quantkit.plan.select import choose
    from quantkit.report.costs import specification_page
    from quantkit.report.inspection import inspection_json, inspection_page
    from quantkit.report.tables import to_markdown

    model_map = inspect_source(open_source(folder))
    plan = choose(model_map, min_dim=8)
    to_markdown(inspection_page(model_map, plan))
    json.dumps(inspection_json(model_map, plan))
    to_markdown(specification_page(specification(model_map, plan)))


@cache
def _module() -> Any:
    from quantkit.model.load import build_on_meta, open_source

    return build_on_meta(open_source(CORPUS / "model"))


def read_weights(folder: Path, file: Path) -> None:
    from quantkit.model.load import open_source
    from quantkit.model.weights.open import header_notes, open_tensors, tensors_by_name

    source, module = open_source(folder), _module()
    header_notes(source, module)
    tensors = open_tensors(source, module)
    for name in tensors_by_name(module):
        tensors.read(name)


def read_gguf(folder: Path, file: Path) -> None:
    from quantkit.model.load import build_on_meta, open_source
    from quantkit.model.weights.open import header_notes, open_tensors, tensors_by_name

    source = open_source(file)
    module = build_on_meta(source)
    header_notes(source, module)
    tensors = open_tensors(source, module)
    for name in tensors_by_name(module):
        if tensors.has(name):
            tensors.read(name)


def read_modules(folder: Path, file: Path) -> None:
    from quantkit.model.sentence import read_sentence_model

    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    read_sentence_model(folder)


def read_pooling(folder: Path, file: Path) -> None:
    from quantkit.model.sentence import read_sentence_model

    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_bytes(MODULES)
    (folder / "1_Pooling" / "config.json").write_bytes(file.read_bytes())
    read_sentence_model(folder)


def read_pictures_settings(folder: Path, file: Path) -> None:
    from quantkit.runtime.pictures import PREPROCESSOR_FILE, read_preprocessing

    assert file.name == PREPROCESSOR_FILE
    read_preprocessing(folder)


def read_tokenizer(folder: Path, file: Path) -> None:
    from quantkit.runtime.tokenizer import open_text

    text = open_text(folder)
    text.decode(text.encode("w3 w4 other"))


def read_token_files(folder: Path, file: Path) -> None:
    from quantkit.evaluation.lm_eval.special_tokens import read_special_tokens
    from quantkit.runtime.tokenizer import open_text

    read_special_tokens(folder, open_text(folder))


def read_start_tokens(folder: Path, file: Path) -> None:
    from quantkit.runtime.tokenizer import read_stop_ids
    from quantkit.runtime.traced import read_start_ids

    np.array(sorted(read_stop_ids(folder)), np.int64)
    np.array(read_start_ids(folder), np.int64)


def read_chat(folder: Path, file: Path) -> None:
    from quantkit.runtime.chat import conversation, open_chat_template

    open_chat_template(folder).render(conversation("What is it?", "Be brief"))


def read_calibration(folder: Path, file: Path) -> None:
    from quantkit.quantization.calibration.tokens import calibration_tokens

    calibration_tokens(
        encode=lambda text: [len(word) % 61 for word in text.split()],
        vocab_size=61, source=file, num_windows=4, length=8,
    )  # fmt: skip


def read_manifest(folder: Path, file: Path) -> None:
    from quantkit.pipeline.package import pack
    from quantkit.runtime.manifest import target_of

    target_of(folder)
    pack(folder, folder.parent / "package", force=True)


def read_report(folder: Path, file: Path) -> None:
    from quantkit.pipeline.compare import compare
    from quantkit.report.comparison import comparison_page
    from quantkit.report.quantization import quantization_page
    from quantkit.report.stored import read_document, read_report, showing
    from quantkit.report.tables import to_markdown

    with showing(folder):
        to_markdown(quantization_page(read_document(folder)))
    to_markdown(comparison_page(compare([CORPUS / "artifact", folder])))
    read_report(folder)


def open_stored(folder: Path, file: Path) -> None:
    """An artifact whose config, recipe or graph was changed: opened, and run for two tokens."""
    from quantkit.evaluation.artifact import open_artifact
    from quantkit.runtime.generate import generate

    artifact = open_artifact(folder)
    _ = artifact.vocab_size, artifact.described, artifact.context
    if artifact.session.generates:
        list(generate(artifact.session, [[1, 2, 3]], max_new_tokens=2))


def read_head(folder: Path, file: Path) -> None:
    from quantkit.runtime.labels import head_of

    session = SimpleNamespace(get_outputs=lambda: [SimpleNamespace(shape=["batch", "labels"])])
    head_of(SimpleNamespace(folder=folder, session=session))


def read_graph(folder: Path, file: Path) -> None:
    from quantkit.export.check import read_written

    read_written(file)
    open_stored(folder, file)


def read_statistics(folder: Path, file: Path) -> None:
    from quantkit.quantization.calibration.store import read_index

    statistics = read_index(folder)
    assert statistics is not None or b'"format_version": 3' not in file.read_bytes()
    if statistics is None:
        return
    for matrix in statistics.requested:
        statistics.read(matrix)


def read_part(folder: Path, file: Path) -> None:
    """A part with the checksum that belongs to it, as one who means harm would write it."""
    from quantkit.quantization.calibration.store import read_index

    statistics = read_index(CORPUS / "statistics")
    assert statistics is not None
    for matrix in statistics.requested:
        replace(statistics, folder=folder).read(matrix)


def read_host(folder: Path, file: Path) -> None:
    from quantkit.private.host.model import open_host

    open_host(folder, threads=1, check="none")


def read_secret_token(folder: Path, file: Path) -> None:
    from quantkit.private.keys import read_token

    file.chmod(0o600)
    read_token(file)


def read_key(folder: Path, file: Path) -> None:
    from quantkit.private.keys import open_key

    file.chmod(0o600)
    open_key(file, json.loads((CORPUS / "key.json").read_text())["model"])


@cache
def _host() -> Any:
    from quantkit.private.host.model import open_host

    return open_host(CORPUS / "host", threads=1)


def answer_opening(folder: Path, file: Path) -> None:
    from quantkit.private.host.server import open_session
    from quantkit.private.protocol import read_message

    session, _ = open_session(_host(), read_message(file.read_bytes()))
    session.close()


def answer_features(folder: Path, file: Path) -> None:
    from quantkit.private.protocol import features_of, read_message

    features_of(read_message(file.read_bytes()), width=32, max_tokens=64)


def run_package(folder: Path, file: Path) -> None:
    """The runner of a package reads its files, and ends with a line where they are damaged."""
    spec = importlib.util.spec_from_file_location("device", folder / "device.py")
    assert spec is not None
    assert spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    sys.argv = ["run.py", "--check"]
    try:
        device.arguments(None, "cpu")
    except SystemExit as end:
        assert end.code in (None, 0) or "copy the package again" in str(end.code), end


def read_machine(folder: Path, file: Path) -> None:
    from quantkit.plan import machines

    machines.read_machine(file)


def read_compiled(folder: Path, file: Path) -> None:
    from quantkit.runtime.providers.compiled import Origin, _why_stale

    _why_stale(file.with_suffix(".onnx"), Origin(**dict.fromkeys(Origin.__slots__, "x")))


def _opening() -> bytes:
    from quantkit.private.protocol import fields_message

    pair = json.loads((CORPUS / "host" / "manifest.json").read_text())["pair"]
    return fields_message({"version": "2", "pair": pair, "width": "32", "capacity": "8"})


def _features() -> bytes:
    from quantkit.private.protocol import features_message

    return features_message(np.zeros((3, 32), np.float32), np.float32)


def _machine() -> bytes:
    from quantkit.plan.machines import MACHINES

    row = next(iter(MACHINES.values()))
    return json.dumps({name: getattr(row, name) for name in row.__slots__}).encode()


def _index() -> bytes:
    names = json.loads((CORPUS / "model" / "model.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    return json.dumps(
        {"weight_map": dict.fromkeys((n for n in names if n != "__metadata__"), "model.safetensors")}
    ).encode()


def _ids() -> bytes:
    import io

    file = io.BytesIO()
    np.save(file, np.arange(60))
    return file.getvalue()


def _origin() -> bytes:
    from quantkit.runtime.providers.compiled import Origin

    return json.dumps({**dict.fromkeys(Origin.__slots__, "x"), "file_sha256": "x"}).encode()


JSON, TENSORS, ONNX = mutations.json_files, mutations.safetensors_files, mutations.onnx_files
SPECIAL = b'{"bos_token": "w1", "eos_token": {"content": "w2"}}'
GENERATION = (
    b'{"decoder_start_token_id": 1, "eos_token_id": [2, 3], "forced_bos_token_id": 4, "pad_token_id": 0}'
)
CHAT = b"""{% for message in messages %}{{ message['role'] }}: {{ message.content | trim | tojson }}
{% endfor %}{% if add_generation_prompt %}{{ eos_token }}assistant: {% endif %}"""
PREPROCESSING = b"""{"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 14},
"resample": 3, "crop_size": {"height": 12, "width": 12}, "rescale_factor": 0.004, "image_mean": [0.5],
"image_std": [0.2, 0.2, 0.3], "do_resize": true, "do_normalize": true}"""
MODULES = b"""[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
{"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]"""
HEAD = b"""{"architectures": ["BertForSequenceClassification"], "id2label": {"0": "good"},
"problem_type": "regression",
"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}"""
POOLING = b'{"word_embedding_dimension": 8, "pooling_mode_mean_tokens": true, "include_prompt": true}'
PARSERS: dict[str, Parser] = {
    "recipe": Parser("artifact", "recipe.yaml", mutations.yaml_files, read_recipe),
    "config": Parser("model", "config.json", JSON, read_config),
    "modules": Parser("model", "modules.json", JSON, read_modules, MODULES),
    "preprocessing": Parser(
        "model", "preprocessor_config.json", JSON, read_pictures_settings, PREPROCESSING
    ),
    "pooling": Parser("model", "pooling.json", JSON, read_pooling, POOLING),
    "weights": Parser("model", "model.safetensors", TENSORS, read_weights),
    "GGUF": Parser("gguf", "model.gguf", mutations.gguf_files, read_gguf),
    "weights index": Parser("model", "model.safetensors.index.json", JSON, read_weights, _index()),
    "tokenizer": Parser("model", "tokenizer.json", JSON, read_tokenizer),
    "tokenizer config": Parser("model", "tokenizer_config.json", JSON, read_token_files, SPECIAL),
    "generation config": Parser("model", "generation_config.json", JSON, read_start_tokens, GENERATION),
    "chat template": Parser("model", "chat_template.jinja", mutations.text_files, read_chat, CHAT),
    "token ids": Parser("", "ids.npy", mutations.npy_files, read_calibration, _ids()),
    "calibration text": Parser("", "text.txt", mutations.text_files, read_calibration, b"one two three " * 9),
    "manifest": Parser("artifact", "manifest.json", JSON, read_manifest),
    "report": Parser("artifact", "report.json", JSON, read_report),
    "artifact's config": Parser("artifact", "config.json", JSON, open_stored),
    "labels": Parser("artifact", "config.json", JSON, read_head, HEAD),
    "artifact's recipe": Parser("artifact", "recipe.yaml", mutations.yaml_files, open_stored),
    "graph": Parser("artifact", "model.onnx", ONNX, read_graph),
    "statistics index": Parser("statistics", "index.json", JSON, read_statistics),
    "statistics": Parser("statistics", "part_0001.safetensors", TENSORS, read_part),
    "host manifest": Parser("host", "manifest.json", JSON, read_host),
    "host graph": Parser("host", "model.onnx", ONNX, read_host),
    "key": Parser("", "key.json", JSON, read_key, (CORPUS / "key.json").read_bytes()),
    "token": Parser("", "host.token", mutations.text_files, read_secret_token, b"a-token-of-some-length\n"),
    "opening message": Parser("", "opening", TENSORS, answer_opening, _opening()),
    "features message": Parser("", "features", TENSORS, answer_features, _features()),
    "package": Parser("package", "manifest.json", JSON, run_package),
    "machine": Parser("", "machine.json", JSON, read_machine, _machine()),
    "compiled record": Parser("", "compiled.json", JSON, read_compiled, _origin()),
}  # fmt: skip


def prepare(parser: Parser, place: Path) -> Path:
    """A folder with all files of the parser; the mutated one is still the seed."""
    folder = place / "case"
    if parser.folder == "package":
        from quantkit.pipeline.package import pack

        pack(CORPUS / "artifact", folder)
    elif parser.folder:
        shutil.copytree(CORPUS / parser.folder, folder)
    else:
        folder.mkdir()
    if parser.seed is not None:
        (folder / parser.file).write_bytes(parser.seed)
    return folder
