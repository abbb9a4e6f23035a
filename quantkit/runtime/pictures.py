"""Pictures as a model reads them: decoded by Pillow, resized, cropped, rescaled and normalized.

The settings are those of preprocessor_config.json, in the order in which transformers' image processors
apply them. Grey, palette and transparent pictures are converted to RGB; what a camera noted on how it was
held is applied.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantkit.errors import InputError
from quantkit.files import expect, read_json, reading, require_regular
from quantkit.runtime.graph import Floats

if TYPE_CHECKING:
    from PIL.Image import Image

PREPROCESSOR_FILE = "preprocessor_config.json"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
ALLOWED = "a JPEG, PNG, WebP, BMP, GIF or TIFF file with one picture"
LARGEST_SIDE = 1 << 14  # of a resized picture: long strips grow with their shorter side
MOST_PIXELS = 1 << 26  # of a decoded picture
MOST_RESIZED = 1 << 24  # of a resized one, whose numbers take 24 bytes a pixel
DEEP_MODES = ("I", "F")  # of more than 8 bits; how bright their white is, no file says
# Processors that do nothing else, by the beginning of their names, and the sizes and the filter that they
# have where the file leaves them out: (resize, crop, filter).
PROCESSORS: Mapping[str, tuple[Any, Any, int]] = {
    "ViT": ({"height": 224, "width": 224}, None, 2),
    "DeiT": ({"height": 256, "width": 256}, {"height": 224, "width": 224}, 3),
    "Bit": ({"shortest_edge": 224}, {"height": 224, "width": 224}, 3),
    "CLIP": ({"shortest_edge": 224}, {"height": 224, "width": 224}, 3),
    "Siglip": ({"height": 224, "width": 224}, None, 3),
}
ENDS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
HALVES = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Mean and standard deviation where the file leaves them out.
NORMS = {
    "ViT": (HALVES, HALVES),
    "DeiT": (HALVES, HALVES),
    "Bit": (CLIP_MEAN, CLIP_STD),
    "CLIP": (CLIP_MEAN, CLIP_STD),
    "Siglip": (HALVES, HALVES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """How pixels become the numbers that a model reads; sizes are (height, width)."""

    size: tuple[int, int] | None = None  # resized to it
    shortest: int | None = None  # or until the shorter side has this many pixels
    crop: tuple[int, int] | None = None  # from the middle
    filter: int = 2  # of Pillow: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic, 4 box, 5 Hamming
    factor: float | None = 1 / 255
    mean: tuple[float, ...] = ()  # of each channel; empty: not normalized
    std: tuple[float, ...] = ()

    @property
    def output(self) -> tuple[int, int] | None:
        """Height and width of every picture afterwards; None where they vary."""
        return self.crop or self.size


def read_preprocessing(folder: Path) -> Preprocessing:
    """The preprocessing of a model's folder."""
    path = folder / PREPROCESSOR_FILE
    if not path.exists():
        raise InputError(
            f"the model brings no {PREPROCESSOR_FILE}, so no picture can be read for it",
            where=str(folder),
            next_step="copy the file from the original model into the folder",
        )
    document = read_json(path)
    kind = str(document.get("image_processor_type") or document.get("feature_extractor_type") or "")
    stem = next((kind.removesuffix(end) for end in ENDS if kind.endswith(end)), kind)
    if stem not in PROCESSORS:
        names = ", ".join(f"{name}ImageProcessor" for name in PROCESSORS)
        raise InputError(f"the processor '{kind}' is not known", where=str(path), allowed=names)
    size, crop, filtering = PROCESSORS[stem]
    mean, std = NORMS[stem]
    size = document.get("size") or size
    if isinstance(size, int):
        size = {"shortest_edge": size} if stem in ("CLIP", "Bit") else {"height": size, "width": size}
    resizes, crops, rescales, normalizes = (
        _switch(document, key, default, path)
        for key, default in (
            ("do_resize", True),
            ("do_center_crop", crop is not None),
            ("do_rescale", True),
            ("do_normalize", True),
        )
    )
    if crops:
        crop = document.get("crop_size") or crop
        crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    filtering = document.get("resample", filtering)
    if type(filtering) is not int or not 0 <= filtering <= 5:
        raise InputError(f"'resample' is {filtering!r}", where=str(path), allowed="a filter from 0 to 5")
    shortest = size.get("shortest_edge") if resizes and isinstance(size, dict) else None
    return Preprocessing(
        size=_sides(size, "size", path) if resizes and shortest is None else None,
        shortest=_side(shortest, "size", path) if shortest is not None else None,
        crop=_sides(crop, "crop_size", path) if crops else None,
        filter=filtering,
        factor=_number(document.get("rescale_factor", 1 / 255), "rescale_factor", path) if rescales else None,
        mean=_channels(document.get("image_mean") or mean, "image_mean", path) if normalizes else (),
        std=_channels(document.get("image_std") or std, "image_std", path) if normalizes else (),
    )


def _switch(document: dict[str, Any], key: str, default: bool, path: Path) -> bool:
    value = expect(document, key, bool, where=path)
    return default if value is None else value


def _sides(sizes: Any, key: str, path: Path) -> tuple[int, int]:
    if not isinstance(sizes, dict) or not {"height", "width"} <= sizes.keys():
        allowed = "an object with height and width, or for size with shortest_edge"
        raise InputError(f"'{key}' is {sizes!r}", where=str(path), allowed=allowed)
    height, width = _side(sizes["height"], key, path), _side(sizes["width"], key, path)
    if height * width > MOST_RESIZED:
        what = f"'{key}' is {height} x {width}"
        raise InputError(what, where=str(path), allowed=f"up to {MOST_RESIZED:,} pixels")
    return height, width


def _side(value: Any, key: str, path: Path) -> int:
    if type(value) is not int or not 1 <= value <= LARGEST_SIDE:
        raise InputError(f"'{key}' is {value!r}", where=str(path), allowed=f"pixels from 1 to {LARGEST_SIDE}")
    return value


def _number(value: Any, key: str, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"'{key}' is {value!r}", where=str(path), allowed="a number")
    return float(value)


def _channels(values: Any, key: str, path: Path) -> tuple[float, ...]:
    values = values if isinstance(values, list | tuple) else [values]
    numbers = tuple(_number(value, key, path) for value in values)
    if len(numbers) not in (1, 3) or (key == "image_std" and 0 in numbers):
        allowed = "a number other than 0 for each channel" if key == "image_std" else "a number a channel"
        raise InputError(f"'{key}' is {list(numbers)}", where=str(path), allowed=allowed)
    return numbers


def require_pillow() -> Any:
    """Pillow's module of images; refused where the package is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError(
            "pictures are read with Pillow, which is not installed",
            where="pictures",
            next_step="pip install 'quantkit-onnx[images]'",
        ) from error
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # what is wrong with a file is said once
    return Image


def read_pictures(paths: Sequence[Path], preprocessing: Preprocessing, *, channels: int = 3) -> Floats:
    """Pictures as a model reads them, [N, C, H, W]."""
    if not paths:
        raise InputError("there is no picture", where="pictures", allowed="one picture or more")
    pictures = [_pixels(open_picture(path), preprocessing, channels, path) for path in paths]
    shapes = {picture.shape: path for picture, path in zip(pictures, paths, strict=True)}
    if len(shapes) > 1:
        raise InputError(
            "the pictures have several sizes, and the preprocessing of the model keeps them",
            where=", ".join(map(str, shapes.values())),
            next_step="give pictures of one size",
        )
    return np.stack(pictures)


def open_picture(path: Path) -> Image:
    """The decoded picture, upright."""
    images = require_pillow()
    from PIL import ImageOps, UnidentifiedImageError

    if not path.exists():
        raise InputError("no such file", where=str(path), allowed=ALLOWED, next_step="check the path")
    with (
        reading(path, "not a picture, or a damaged one", allowed=ALLOWED),
        warnings.catch_warnings(action="ignore"),
    ):
        require_regular(path)
        try:
            opened = images.open(path)
        except UnidentifiedImageError as error:
            raise InputError("not a picture", where=str(path), allowed=ALLOWED) from error
        with opened as image:
            if image.width * image.height > MOST_PIXELS:
                raise InputError(
                    f"a picture of {image.width} x {image.height} pixels",
                    where=str(path),
                    allowed=f"up to {MOST_PIXELS:,} pixels",
                    next_step="scale it down",
                )
            frames = getattr(image, "n_frames", 1)
            if frames > 1:
                raise InputError(
                    f"it holds {frames} pictures",
                    where=str(path),
                    allowed=ALLOWED,
                    next_step="save one of them",
                )
            if image.mode.startswith(DEEP_MODES):
                raise InputError(
                    f"its pixels have more than 8 bits (mode {image.mode})",
                    where=str(path),
                    allowed="pictures of 8 bits a channel",
                    next_step="save it with 8 bits",
                )
            image.load()
            upright: Image = ImageOps.exif_transpose(image)
            return upright


def _pixels(image: Image, preprocessing: Preprocessing, channels: int, path: Path) -> Floats:
    """One picture as the model reads it, [C, H, W]."""
    from PIL.Image import Resampling

    image = image.convert("RGB" if channels == 3 else "L")
    target = _target_size(image, preprocessing, path)
    if target != image.size:
        image = image.resize(target, Resampling(preprocessing.filter))
    pixels_CHW = np.asarray(image).reshape(image.height, image.width, channels).transpose(2, 0, 1)
    if preprocessing.crop:
        pixels_CHW = _cropped(pixels_CHW, preprocessing.crop)
    values_CHW = pixels_CHW.astype(np.float64)
    if preprocessing.factor is not None:
        values_CHW = values_CHW * preprocessing.factor
    values_CHW = values_CHW.astype(np.float32)
    if preprocessing.mean:
        mean, std = (
            np.array(each, np.float32)[:, None, None] for each in (preprocessing.mean, preprocessing.std)
        )
        values_CHW = (values_CHW - mean) / std
    return np.ascontiguousarray(values_CHW, np.float32)


def _target_size(image: Image, preprocessing: Preprocessing, path: Path) -> tuple[int, int]:
    """(width, height) after resizing."""
    if preprocessing.size:
        height, width = preprocessing.size
        return width, height
    if preprocessing.shortest is None:
        return int(image.width), int(image.height)
    short, long = sorted((int(image.width), int(image.height)))
    longest = int(preprocessing.shortest * long / short)
    if longest > LARGEST_SIDE or longest * preprocessing.shortest > MOST_RESIZED:
        raise InputError(
            f"a strip of {image.width} x {image.height} pixels",
            where=str(path),
            allowed=f"pictures whose longer side has up to {LARGEST_SIDE} pixels "
            f"when the shorter one has {preprocessing.shortest}",
            next_step="cut it",
        )
    return (
        (preprocessing.shortest, longest)
        if image.width <= image.height
        else (longest, preprocessing.shortest)
    )


def _cropped(pixels_CHW: Any, crop: tuple[int, int]) -> Any:
    """The middle, with zeros around a picture that is smaller."""
    sides = pixels_CHW.shape[1:]
    missing = [max(0, wanted - side) for wanted, side in zip(crop, sides, strict=True)]
    before = [(side + gap - side + 1) // 2 for side, gap in zip(sides, missing, strict=True)]
    pads = [(first, gap - first) for first, gap in zip(before, missing, strict=True)]
    pixels_CHW = np.pad(pixels_CHW, [(0, 0), *pads])
    top, left = ((side - wanted) // 2 for side, wanted in zip(pixels_CHW.shape[1:], crop, strict=True))
    return pixels_CHW[:, top : top + crop[0], left : left + crop[1]]


def pictures_in(folder: Path, flag: str) -> list[Path]:
    """The picture files of a folder, in the order of their names."""
    if not folder.is_dir():
        raise InputError(
            "not a folder", where=f"{flag} {folder}", allowed="a folder of pictures: the model reads no text"
        )
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        allowed = f"files that end in {', '.join(SUFFIXES)}"
        raise InputError("the folder holds no pictures", where=f"{flag} {folder}", allowed=allowed)
    return paths


def bundled_pictures(part: str) -> list[Path]:
    """Paths of the pictures of the package, of the part "calibration" or "evaluation"."""
    return pictures_in(Path(str(resources.files("quantkit") / "assets" / "pictures" / part)), "")


def require_size(made: tuple[int, ...] | None, size: tuple[int, int] | None, folder: Path) -> None:
    """Refuse a preprocessing that gives another size than a graph of one size reads."""
    if made and size and made != size:
        height, width = made
        raise InputError(
            f"the preprocessing gives {height} x {width} pixels, and the model reads {size[0]} x {size[1]}",
            where=str(folder / PREPROCESSOR_FILE),
            next_step="correct size or crop_size there",
        )
