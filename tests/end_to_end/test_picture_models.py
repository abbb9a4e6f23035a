"""Models of pictures as a user has them: quantized, measured, and run on files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from commands import quantkit, refused
from exporting import build_tiny, error

import quantkit as api
from quantkit.model.families import FAMILIES
from quantkit.report.stored import read_report

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed here")

from quantkit.runtime.pictures import (  # noqa: E402
    PREPROCESSOR_FILE,
    bundled_pictures,
    read_pictures,
    read_preprocessing,
)

OPTIONS = ("--min-dim", "1", "--scheme", "int8_block32")
MODELS = {  # folder -> (family, class, processor)
    "classifier": (
        "vit",
        "ViTForImageClassification",
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 16}},
    ),
    "embedder": (
        "clip_vision",
        "CLIPVisionModelWithProjection",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 14},
            "crop_size": {"height": 12, "width": 12},
        },
    ),
    "any-size": (
        "dinov2",
        "Dinov2Model",
        {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": 18},
            "crop_size": {"height": 16, "width": 16},
        },
    ),
}
LABELS = {0: "cat", 1: "coffee", 2: "rocket"}


def save(folder, name: str) -> None:
    family, class_name, processor = MODELS[name]
    labels = {"id2label": LABELS, "label2id": {label: key for key, label in LABELS.items()}}
    sizes = {**FAMILIES[family].tiny, **(labels if name == "classifier" else {})}
    build_tiny(class_name, sizes).save_pretrained(folder)
    (folder / PREPROCESSOR_FILE).write_text(json.dumps(processor))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> (the original, the artifact)"""
    made = {}
    for name in MODELS:
        folder = tmp_path_factory.mktemp(name)
        save(folder / "model", name)
        (folder / "recipe.yaml").write_text("measure: {latency: false, memory: false}\n")
        recipe = ("--recipe", str(folder / "recipe.yaml"))
        done = quantkit("quantize", str(folder / "model"), *OPTIONS, *recipe, "-o", str(folder / "out"))
        assert done.returncode == 0, done.stderr
        made[name] = (folder / "model", folder / "out")
    return made


def outputs_of(model, name: str, pictures: np.ndarray):
    """The original in transformers on these pixels."""
    from quantkit.model.load import model_class

    loaded = model_class(MODELS[name][1]).from_pretrained(model)
    with torch.inference_mode():
        return loaded(pixel_values=torch.from_numpy(pictures))


@pytest.mark.parametrize("name", MODELS)
def test_the_report_measures_what_its_users_see(folders, name):
    _, out = folders[name]
    document = json.loads((out / "report.json").read_text())
    similarity = document["similarity"]
    assert similarity["of_pictures"]
    assert similarity["text"] == "bundled held-out pictures"
    assert similarity["num_windows"] == len(bundled_pictures("evaluation"))
    assert document["judgement"]["verdict"] != "broken"
    assert document["float_error"]["largest_error"] < 1e-5
    assert read_report(out).similarity == api.load(out).report.similarity
    page, card = (out / "report.md").read_text(), (out / "README.md").read_text()
    assert "bundled held-out pictures" in page
    if name == "classifier":
        assert similarity["labels"]["num_compared"] == similarity["num_windows"]
        assert 0 <= similarity["labels"]["kl_divergence"] < 1e-2
        assert "other labels" in page
        assert 'pipeline_tag: "image-classification"' in card
    else:
        assert 0.99 < similarity["lowest_cosine"] <= similarity["mean_cosine"] <= 1
        assert "mean cosine of picture embeddings" in page
        assert 'pipeline_tag: "image-feature-extraction"' in card
    assert "picture.png" in card


@pytest.mark.parametrize("name", ["embedder", "any-size"])
def test_vectors_of_files_are_those_of_the_original(folders, name, tmp_path):
    model, out = folders[name]
    paths = bundled_pictures("evaluation")[:9]  # more than one batch
    pictures = read_pictures(paths, read_preprocessing(model))
    outputs = outputs_of(model, name, pictures)
    wanted = (outputs.image_embeds if name == "embedder" else outputs.pooler_output).numpy()
    done = quantkit("encode", str(out), *map(str, paths), "--json", "-o", str(tmp_path / "v.npy"))
    made = np.array(json.loads(done.stdout)["vectors"], np.float32)
    assert error(made, wanted).relative < 0.1
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), made)
    np.testing.assert_array_equal(api.load(out).encode(paths), made)


def test_labels_of_files_are_those_of_the_original(folders):
    model, out = folders["classifier"]
    paths = bundled_pictures("evaluation")[:3]
    pictures = read_pictures(paths, read_preprocessing(model))
    wanted = outputs_of(model, "classifier", pictures).logits.softmax(-1).numpy()
    document = json.loads(quantkit("score", str(out), *map(str, paths), "--json").stdout)
    assert document["labels"] == list(LABELS.values())
    assert error(np.array(document["scores"]), wanted).relative < 0.05
    line = quantkit("score", str(out), str(paths[0])).stdout
    best = int(np.argmax(document["scores"][0]))
    assert line == f"{document['scores'][0][best]:.4f} {LABELS[best]}: {paths[0]}\n"


def test_eval_and_calibration_read_a_folder_of_pictures(folders, tmp_path):
    model, out = folders["classifier"]
    (tmp_path / "mine").mkdir()
    for number, mode in enumerate(("L", "RGBA", "P", "RGB")):
        size = (1 + 7 * number, 9 + number)
        PIL.new("RGB", size, (40 * number, 90, 200)).convert(mode).save(tmp_path / "mine" / f"{mode}.png")
    (tmp_path / "mine" / "notes.txt").write_text("no picture")
    done = quantkit("eval", str(out), "--text", str(tmp_path / "mine"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["similarity"]["labels"]["num_compared"] == 4
    options = ("--fit", "gptq", "--scheme", "int4_block32", "--calibration-text", str(tmp_path / "mine"))
    again = ("quantize", str(model), "--min-dim", "1", *options, "--no-eval", "-o", str(tmp_path / "out"))
    done = quantkit(*again)
    assert done.returncode == 0, done.stderr
    assert api.load(tmp_path / "out").score(bundled_pictures("evaluation")[:1]).shape == (1, 3)


def test_what_is_refused(folders, tmp_path):
    model, out = folders["classifier"]
    picture = str(bundled_pictures("evaluation")[0])
    (tmp_path / "wrong.png").write_text("no picture")
    assert "wrong.png: not a picture" in refused("score", str(out), picture, str(tmp_path / "wrong.png"))
    assert "no such file" in refused("score", str(out), "absent.png")
    assert "'quantkit score'" in refused("encode", str(out), picture)
    assert "'quantkit encode'" in refused("score", str(folders["embedder"][1]), picture)
    assert "reads no query" in refused("score", str(out), picture, "--query", "a")
    assert "reads pictures" in refused("package", str(out), "-o", str(tmp_path / "packed"))
    fixed = refused("quantize", str(model), "--target", "npu", "-o", str(tmp_path / "npu"))
    assert "no static graph for it" in fixed
    text = refused("quantize", str(model), *OPTIONS, "--text", str(tmp_path / "wrong.png"), "-o", "x")
    assert "not a folder" in text
    (tmp_path / "model").mkdir()
    for path in model.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    (tmp_path / "model" / PREPROCESSOR_FILE).write_text(json.dumps(settings))
    line = refused("quantize", str(tmp_path / "model"), *OPTIONS, "-o", str(tmp_path / "y"))
    assert "gives 16 x 16 pixels, and the model reads 12 x 16" in line


def test_a_model_of_both_is_refused_with_the_way_to_its_towers(tmp_path):
    tiny, vision = FAMILIES["clip_text"].tiny, FAMILIES["clip_vision"].tiny
    config = {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 24}
    config |= {"text_config": dict(tiny), "vision_config": dict(vision)}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    line = refused("quantize", str(tmp_path / "model"), "--random-weights", "-o", str(tmp_path / "out"))
    assert "is two models" in line
    assert "CLIPVisionModelWithProjection" in line
    assert not (tmp_path / "out").exists()


def test_without_preprocessing_nothing_is_measured_and_a_note_says_so(folders, tmp_path):
    model, _ = folders["embedder"]
    (tmp_path / "model").mkdir()
    for path in model.iterdir():
        if path.name != PREPROCESSOR_FILE:
            (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    options = ("--recipe", str(model.parent / "recipe.yaml"), "-o", str(tmp_path / "out"))
    done = quantkit("quantize", str(tmp_path / "model"), *OPTIONS, *options)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "similarity" not in document
    assert any(PREPROCESSOR_FILE in note for note in document["notes"])
    picture = str(bundled_pictures("evaluation")[0])
    assert PREPROCESSOR_FILE in refused("encode", str(tmp_path / "out"), picture)


try:
    from optimum.onnxruntime import ORTModelForImageClassification
except ImportError as missing:
    WHY_NO_OPTIMUM = str(missing)
else:
    WHY_NO_OPTIMUM = ""


@pytest.mark.skipif(bool(WHY_NO_OPTIMUM), reason=f"optimum's runtime does not import here: {WHY_NO_OPTIMUM}")
def test_optimum_and_pipelines_open_classifiers(folders):
    from transformers import AutoImageProcessor, pipeline

    _, out = folders["classifier"]
    model = ORTModelForImageClassification.from_pretrained(out)
    processor = AutoImageProcessor.from_pretrained(out)
    path = str(bundled_pictures("evaluation")[0])
    answers = pipeline("image-classification", model=model, image_processor=processor)(path)
    ours = dict(zip(LABELS.values(), api.load(out).score(path)[0], strict=True))
    for answer in answers:
        assert answer["score"] == pytest.approx(ours[answer["label"]], abs=2e-3)
