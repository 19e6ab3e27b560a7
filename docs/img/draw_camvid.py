"""Draws camvid.png: what a model file says of some test images of CamVid at each width.

python docs/img/draw_camvid.py NET.apm DATA_DIR [PICTURE.png]; needs Pillow and the engine. The picture in
docs/guides/segmentation.md shows the answers alone: the data set is for research, and its images are not ours to hand
on. With a name of your own for the picture, images and labels stand beside them.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import anyprec
from anyprec.data import VOID, load_data
from anyprec.data.annotated import CAMVID_CLASSES
from anyprec.run.segmentation import colors

SHOWN = (0, 75, 140, 220)  # of the 233 test images: different streets and lights
GAP, HEAD, LEGEND = 4, 22, 26


def main(file: str, folder: str, out: str = "") -> None:
    model, data = anyprec.load(file, layout="NHWC"), load_data("camvid", "test", folder)
    palette = colors(CAMVID_CLASSES, len(CAMVID_CLASSES))
    heads = [*(["image", "labels"] if out else []), *("float" if k == 32 else f"{k} bit" for k in model.widths)]
    rows = []
    for i in SHOWN:
        image, mask = data.pair(i)
        labels = np.where((mask == VOID)[:, :, None], 0, palette[np.where(mask == VOID, 0, mask)]).astype(np.uint8)
        answers = [model(image[None], bits=k)[0].argmax(axis=2) for k in model.widths]
        rows.append([*([image, labels] if out else []), *(palette[answer] for answer in answers)])
    height, width = rows[0][0].shape[:2]
    size = len(heads) * (width + GAP) - GAP, HEAD + len(rows) * (height + GAP) + LEGEND
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(15)
    for column, head in enumerate(heads):
        pen.text((column * (width + GAP) + width / 2, HEAD / 2), head, fill="black", font=font, anchor="mm")
        for row, pictures in enumerate(rows):
            sheet.paste(Image.fromarray(pictures[column]), (column * (width + GAP), HEAD + row * (height + GAP)))
    step = size[0] / len(CAMVID_CLASSES)
    for i, name in enumerate(CAMVID_CLASSES):
        x, y = i * step, size[1] - LEGEND + 6
        pen.rectangle((x + 2, y, x + 18, y + 16), fill=tuple(palette[i].tolist()))
        pen.text((x + 24, y + 8), name, fill="black", font=font, anchor="lm")
    sheet.save(out or Path(__file__).with_name("camvid.png"), optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
