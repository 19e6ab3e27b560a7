"""Draws docs/img/nested_codes.svg: four weights as 8-bit codes, and which of their bits each width reads.

Standard library only: python docs/img/draw_nested_codes.py. The codes are the worked numbers of
docs/concepts/quantizers.md.
"""

from __future__ import annotations

from pathlib import Path

CODES = {"0.80": 0b11111111, "0.30": 0b10111000, "-0.10": 0b01101100, "-0.45": 0b00101110}
SHADES = ["#0b3d91", "#1a52b8", "#1f6feb", "#3f86f0", "#5aa2f5", "#7db6f7", "#9bc6f9", "#b9d7fb"]  # plane 0 to 7
CELL, LEFT, TOP = 44, 92, 40


def text(x: float, y: float, words: str, anchor: str = "middle", fill: str = "#222", size: int = 15) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{words}</text>'


def main() -> None:
    parts = [text(LEFT + CELL * (p + 0.5), TOP - 12, f"plane {p}", size=11, fill="#555") for p in range(8)]
    for row, (weight, code) in enumerate(CODES.items()):
        y = TOP + row * CELL
        parts.append(text(LEFT - 14, y + 28, weight, "end"))
        for plane in range(8):
            bit = code >> (7 - plane) & 1
            shade = SHADES[plane] if bit else "#ffffff"
            x = LEFT + plane * CELL
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{shade}" stroke="#8fa3bf"/>')
            parts.append(text(x + CELL / 2, y + 28, str(bit), fill="#fff" if bit and plane < 5 else "#222"))
    bottom = TOP + len(CODES) * CELL
    for line, bits in enumerate((1, 2, 4, 8)):
        y = bottom + 22 + 24 * line
        end = LEFT + bits * CELL
        parts.append(f'<path d="M{LEFT} {y - 8}V{y}H{end}V{y - 8}" fill="none" stroke="#333" stroke-width="1.5"/>')
        parts.append(text(LEFT - 14, y + 3, f"{bits} bit", "end", size=13))
    width, height = LEFT + 8 * CELL + 24, bottom + 22 + 24 * 3 + 18
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif"><rect width="{width}" height="{height}" fill="#ffffff" rx="6"/>'
        f"{''.join(parts)}</svg>\n"
    )
    Path(__file__).with_name("nested_codes.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
