"""Preprocessing beside transformers' own processors, and pictures that cannot be read as one.

The oracle is the processor of transformers that the settings name, on the same file.
"""

from __future__ import annotations

import json
import re
import zlib

import numpy as np
import pytest

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed here")
import transformers  # noqa: E402

from quantkit.errors import InputError  # noqa: E402
from quantkit.runtime.pictures import (  # noqa: E402
    PREPROCESSOR_FILE,
    bundled_pictures,
    read_pictures,
    read_preprocessing,
)

SIZES = [(61, 47), (30, 80), (224, 224), (1, 1), (33, 32)]
SETTINGS = {
    "vit": ("ViT", {"size": {"height": 32, "width": 24}}),
    "vit-plain": ("ViT", {"size": {"height": 32, "width": 32}, "do_normalize": False, "resample": 3}),
    "deit": ("DeiT", {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}}),
    "dinov2": (
        "Bit",
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 33, "width": 32}, "resample": 3},
    ),
    "clip": ("CLIP", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}),
    "clip-padded": ("CLIP", {"size": {"shortest_edge": 20}, "crop_size": {"height": 31, "width": 30}}),
    "clip-defaults": ("CLIP", {}),
    "siglip": ("Siglip", {"size": {"height": 24, "width": 32}, "image_mean": [0.1, 0.2, 0.3]}),
    "siglip-unscaled": ("Siglip", {"size": {"height": 24, "width": 24}, "do_rescale": False}),
}


def processor_of(stem: str, settings: dict):
    """The processor that computes with Pillow: transformers 5 gives it a name of its own."""
    cls = getattr(transformers, f"{stem}ImageProcessorPil", None) or getattr(
        transformers, f"{stem}ImageProcessor"
    )
    return cls(**settings)


def noise(size: tuple[int, int], mode: str = "RGB"):
    width, height = size
    random = np.random.default_rng(width)
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    return PIL.fromarray(random.integers(0, 256, shape, np.uint8), mode)


def write_settings(folder, stem: str, settings: dict) -> None:
    document = {"image_processor_type": f"{stem}ImageProcessor", **settings}
    (folder / PREPROCESSOR_FILE).write_text(json.dumps(document))


@pytest.mark.parametrize("name", SETTINGS)
def test_pixels_are_those_of_transformers(name, tmp_path):
    stem, settings = SETTINGS[name]
    write_settings(tmp_path, stem, settings)
    preprocessing, processor = read_preprocessing(tmp_path), processor_of(stem, settings)
    for size in SIZES:
        path = tmp_path / "picture.png"
        noise(size).save(path)
        options = {"return_tensors": "np", "input_data_format": "channels_last"}  # of a picture of one pixel
        wanted = processor(PIL.open(path), **options)["pixel_values"]
        made = read_pictures([path], preprocessing)
        assert made.dtype == np.float32
        assert made.shape == wanted.shape
        np.testing.assert_allclose(made, wanted, atol=2e-6 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_transformers_writes_are_read(name, tmp_path):
    stem, settings = SETTINGS[name]
    processor_of(stem, settings).save_pretrained(tmp_path)
    write_settings(tmp_path / "..", stem, settings)
    assert read_preprocessing(tmp_path) == read_preprocessing(tmp_path / "..")


@pytest.mark.parametrize("mode", ["L", "RGBA", "LA", "P", "1", "CMYK"])
def test_other_modes_are_read_as_rgb(mode, tmp_path):
    write_settings(tmp_path, *SETTINGS["vit"])
    path = tmp_path / ("picture.tif" if mode == "CMYK" else "picture.png")
    picture = noise((31, 45)).convert("RGBA").convert(mode) if mode != "LA" else noise((31, 45)).convert("LA")
    picture.save(path)
    processor = processor_of(*SETTINGS["vit"])
    wanted = processor(PIL.open(path).convert("RGB"), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(read_pictures([path], read_preprocessing(tmp_path)), wanted, atol=1e-6)


def test_a_picture_that_was_held_sideways_is_turned(tmp_path):
    write_settings(tmp_path, "ViT", {"size": {"height": 9, "width": 5}, "resample": 0})
    picture = noise((9, 5))
    notes = picture.getexif()
    notes[0x0112] = 6  # turn by 90 degrees to the right
    picture.save(tmp_path / "held.png", exif=notes)
    picture.transpose(PIL.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    preprocessing = read_preprocessing(tmp_path)
    made = read_pictures([tmp_path / "held.png", tmp_path / "upright.png"], preprocessing)
    np.testing.assert_array_equal(made[0], made[1])


def png(width: int, height: int) -> bytes:
    """The beginning of a PNG file that claims this size."""
    chunk = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    header = (13).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + header + (99).to_bytes(4, "big") + b"IDAT" + bytes(99)


def write_wrong(path, kind: str) -> None:
    whole = path.with_name("whole.png")
    noise((40, 30)).save(whole)
    if kind == "truncated":
        path.write_bytes(whole.read_bytes()[:600])
    elif kind == "text":
        path.write_text("no picture")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "animated":
        noise((8, 8)).save(path, "GIF", save_all=True, append_images=[noise((8, 9)).resize((8, 8))])
    elif kind == "deep":
        PIL.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 900).save(path, "PNG")
    elif kind == "huge":
        path.write_bytes(png(100_000, 100_000))
    elif kind == "strip":
        noise((1, 9000)).save(path, "PNG")
    elif kind == "folder":
        path.mkdir()


@pytest.mark.parametrize(
    ("kind", "reason"),
    {
        "truncated": "damaged|truncated",
        "text": "not a picture",
        "empty": "not a picture",
        "animated": "it holds 2 pictures",
        "deep": "more than 8 bits",
        "huge": "pixels",
        "strip": "a strip of 1 x 9000 pixels",
        "folder": "not a regular file",
        "absent": "no such file",
    }.items(),
)
def test_what_is_no_picture_is_named_in_one_line(kind, reason, tmp_path, recwarn):
    write_settings(
        tmp_path, "CLIP", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    )
    path = tmp_path / "wrong.png"
    write_wrong(path, kind)
    with pytest.raises(InputError, match=reason) as refused:
        read_pictures([path], read_preprocessing(tmp_path))
    assert "wrong.png" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"image_processor_type": "FlavaImageProcessor"}, "'FlavaImageProcessor' is not known"),
        ({"size": {"height": 32}}, "'size'"),
        ({"size": {"shortest_edge": 0}}, "'size' is 0"),
        ({"size": {"height": 32, "width": 1 << 20}}, "'size'"),
        ({"do_resize": "yes"}, "'do_resize'"),
        ({"resample": 9}, "'resample' is 9"),
        ({"rescale_factor": "a"}, "'rescale_factor'"),
        ({"image_mean": [0.5, 0.5]}, "'image_mean'"),
        ({"image_std": [0.5, 0, 0.5]}, "'image_std'"),
        ({"do_center_crop": True, "crop_size": [32]}, "'crop_size'"),
    ],
)
def test_settings_that_contradict_are_named(settings, reason, tmp_path):
    write_settings(tmp_path, "ViT", settings)
    with pytest.raises(InputError, match=re.escape(reason)) as refused:
        read_preprocessing(tmp_path)
    assert PREPROCESSOR_FILE in str(refused.value)


def test_a_folder_without_settings_is_refused(tmp_path):
    with pytest.raises(InputError, match=PREPROCESSOR_FILE):
        read_preprocessing(tmp_path)


@pytest.mark.once
def test_no_bundled_photograph_is_in_both_parts():
    parts = [
        {path.stem.rpartition("-")[0] for path in bundled_pictures(part)}
        for part in ("calibration", "evaluation")
    ]
    assert parts[0] and parts[1]
    assert not parts[0] & parts[1]
    sizes = {PIL.open(path).size for path in bundled_pictures("evaluation")}
    assert len(sizes) > 10
