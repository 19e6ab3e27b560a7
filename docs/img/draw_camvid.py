"""Draws camvid.png: test images of CamVid, their labels, and what a model file answers at each width.

python docs/img/draw_camvid.py NET.apm DATA_DIR [PICTURE.png]; needs Pillow and the engine. One column per scene, one
row per width. The photographs and labels are CamVid's (research use): docs/guides/segmentation.md names the source.
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import anyprec
from anyprec.data import VOID, load_data
from anyprec.data.annotated import CAMVID_CLASSES
from anyprec.run.segmentation import Pixels, colors, painted

SHOWN = (0, 75, 140)  # of the 233 test images: different streets and lights
COLORS = 96  # of the picture's palette: enough for the photographs, and a quarter of the bytes
GAP, LEFT, LEGEND, LINE = 4, 94, 3, 22  # pixels; lines of the legend; pixels of a line


def main(file: str, folder: str, out: str = "") -> None:
    model, data = anyprec.load(file, layout="NHWC"), load_data("camvid", "test", folder)
    palette = colors(CAMVID_CLASSES, len(CAMVID_CLASSES))
    rows: dict[str, list[Pixels]] = {"photograph": [], "truth": []}
    for i in SHOWN:
        image, mask = data.pair(i)
        rows["photograph"].append(image)
        rows["truth"].append(painted(mask, palette, void=VOID))
        for k in model.widths:
            answer = model(image[None], bits=k)[0].argmax(axis=2)
            rows.setdefault("float" if k == 32 else f"{k} bit", []).append(painted(answer, palette))
    sheet = drawn(rows, palette).quantize(COLORS, dither=Image.Dither.NONE)
    sheet.save(out or Path(__file__).with_name("camvid.png"), optimize=True)


def drawn(rows: dict[str, list[Pixels]], palette: Pixels) -> Image.Image:
    height, width = rows["photograph"][0].shape[:2]
    size = LEFT + len(SHOWN) * (width + GAP) - GAP, len(rows) * (height + GAP) + LEGEND * LINE + GAP
    sheet = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for row, (name, pictures) in enumerate(rows.items()):
        y = row * (height + GAP)
        pen.text((LEFT - 8, y + height / 2), name, fill="black", font=font, anchor="rm")
        for column, picture in enumerate(pictures):
            sheet.paste(Image.fromarray(picture), (LEFT + column * (width + GAP), y))
    names = {**{name: tuple(palette[i].tolist()) for i, name in enumerate(CAMVID_CLASSES)}, "no class": (0, 0, 0)}
    columns = -(-len(names) // LEGEND)
    for i, (name, color) in enumerate(names.items()):
        x = LEFT + i % columns * ((size[0] - LEFT) // columns)
        y = len(rows) * (height + GAP) + i // columns * LINE + GAP
        pen.rectangle((x, y, x + 16, y + 16), fill=color)
        pen.text((x + 22, y + 8), name, fill="black", font=font, anchor="lm")
    return sheet


if __name__ == "__main__":
    main(*sys.argv[1:])
