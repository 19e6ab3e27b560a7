"""Colors of bit-widths and of what becomes of requests: one scale for the server's page, plots, reports and docs.

Narrow widths are dark violet, wide ones light green, so that neighbors differ in hue and in lightness. None of them is
close to the orange of late answers or the red of refused requests. Imports nothing; page.css repeats the values, and
tests/test_colors.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

LIGHT: Mapping[str, str] = {  # on a white background
    "1": "#54278f",
    "2": "#4150b5",
    "3": "#2c71c7",
    "4": "#1f86bd",
    "5": "#14938f",
    "6": "#219a70",
    "7": "#4f9e3a",
    "8": "#7aa31d",
    "float": "#4b535d",
    "mixed": "#8b949e",
}
DARK: Mapping[str, str] = {  # on a near-black background
    "1": "#a884dc",
    "2": "#8c99f0",
    "3": "#69a9f5",
    "4": "#4dbfee",
    "5": "#42cdc9",
    "6": "#50d29e",
    "7": "#8ace70",
    "8": "#bcd854",
    "float": "#c0c8d1",
    "mixed": "#818b98",
}

IN_TIME, LATE, REFUSED, TARGET = "#0f5fd7", "#d9822b", "#b3301a", "#8250df"  # as page.css has them, on white
TEXT, QUIET, GRID = "#1f2328", "#59636e", "#d0d7de"
SERIES = ("#0f5fd7", "#14938f", "#7aa31d", "#54278f", "#c2529b", "#59636e")  # lines that are not widths

SHORT = {"float": "f", "mixed": "m"}  # in names of CSS variables


def width_key(bits: int | str) -> str:
    """The entry of LIGHT and DARK for a width or profile: 4 -> "4", 32 -> "float", "first8" -> "mixed"."""
    name = "float" if str(bits) == "32" else str(bits)
    return name if name in LIGHT else "mixed"


def width_color(bits: int | str) -> str:
    return LIGHT[width_key(bits)]


def css_variables(scale: Mapping[str, str] = LIGHT) -> str:
    """--w1: #54278f; ... --wf: float; --wm: mixed profiles."""
    return " ".join(f"--w{SHORT.get(name, name)}: {color};" for name, color in scale.items())


def css_name(bits: int | str) -> str:
    """var(--w4): for SVG inside a page whose style sheet has `css_variables`."""
    key = width_key(bits)
    return f"var(--w{SHORT.get(key, key)})"
