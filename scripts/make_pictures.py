"""Writes the bundled pictures: cut-outs of photographs that are free of copyright.

python scripts/make_pictures.py SKIMAGE_DATA, the folder `skimage/data` of the wheel of scikit-image 0.26.
Cut-outs have odd and different sizes on purpose. No photograph is in both folders.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

OUTPUT = Path(__file__).parents[1] / "quantkit" / "assets" / "pictures"
LONGEST, QUALITY = 299, 78
# Photograph -> cut-outs as (left, top, right, bottom) in thousandths of its sides.
SOURCES = {
    "calibration": {
        "coffee.png": [(0, 0, 1000, 1000), (150, 300, 800, 950)],
        "rocket.jpg": [(0, 0, 1000, 1000), (250, 100, 700, 1000)],
        "hubble_deep_field.jpg": [(0, 0, 600, 430)],
        "camera.png": [(0, 0, 1000, 1000)],
        "gravel.png": [(0, 0, 700, 611)],
        "cell.png": [(0, 0, 1000, 1000)],
    },
    "evaluation": {
        "astronaut.png": [
            (0, 0, 1000, 1000),
            (200, 0, 720, 480),
            (550, 100, 1000, 1000),
            (0, 400, 600, 1000),
        ],
        "chelsea.png": [(0, 0, 1000, 1000), (150, 50, 650, 800), (400, 200, 1000, 1000), (0, 0, 500, 500)],
        "retina.jpg": [(0, 0, 1000, 1000), (100, 250, 520, 700), (500, 300, 950, 800)],
        "grass.png": [(0, 0, 500, 700), (300, 400, 1000, 1000)],
        "brick.png": [(0, 0, 800, 500), (200, 300, 700, 1000)],
        "clock_motion.png": [(0, 0, 1000, 1000), (250, 150, 800, 950)],
        "microaneurysms.png": [(0, 0, 1000, 1000)],
        "text.png": [(0, 0, 1000, 1000)],
        "horse.png": [(0, 0, 1000, 1000)],
    },
}


def main(data: Path) -> None:
    for folder, photographs in SOURCES.items():
        (OUTPUT / folder).mkdir(parents=True, exist_ok=True)
        for name, boxes in photographs.items():
            with Image.open(data / name) as opened:
                image = opened.convert("L" if opened.mode in ("L", "1") else "RGB")
            for number, (left, top, right, bottom) in enumerate(boxes):
                box = (left * image.width, top * image.height, right * image.width, bottom * image.height)
                part = image.crop(tuple(side // 1000 for side in box))
                part.thumbnail((LONGEST - 6 * number, LONGEST - 6 * number), Image.Resampling.LANCZOS)
                target = OUTPUT / folder / f"{Path(name).stem}-{number}.jpg"
                part.save(target, quality=QUALITY, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
