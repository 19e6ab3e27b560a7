"""One color scale for widths: the page's style sheet has it, and none of it looks like late or refused."""

import colorsys
import re
from pathlib import Path

import pytest

import anyprec
from anyprec.colors import DARK, LATE, LIGHT, REFUSED, css_name, css_variables, width_color

PAGE = (Path(anyprec.__file__).parent / "serve/http/page/page.css").read_text()


def channels(color: str) -> tuple[float, ...]:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def luminance(color: str) -> float:
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(color))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def variables(css: str) -> dict[str, str]:
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{3,6})", css))


def test_the_page_has_the_same_colors():
    light, dark = PAGE.split("@media (prefers-color-scheme: dark)", 1)
    assert css_variables(LIGHT) in light and css_variables(DARK) in dark.split("}")[0]
    assert variables(light)["--late"] == LATE and variables(light)["--bad"] == REFUSED


@pytest.mark.parametrize(("scale", "background"), [(LIGHT, "#ffffff"), (DARK, "#161b22")])
def test_widths_can_be_seen_and_told_apart(scale, background):
    assert all(contrast(color, background) >= 2.9 for color in scale.values())
    shades = [luminance(scale[str(bits)]) for bits in range(1, 9)]
    assert shades == sorted(shades) and len(set(scale.values())) == len(scale)


@pytest.mark.parametrize("scale", [LIGHT, DARK])
def test_no_width_looks_late_or_refused(scale):
    """Reds and oranges have hues below 50 or above 330 degrees."""
    for bits in range(1, 9):
        hue, _, _ = colorsys.rgb_to_hls(*channels(scale[str(bits)]))
        assert 60 < 360 * hue < 300, bits


def test_profiles_without_a_width_of_their_own():
    assert width_color(32) == width_color("float") == LIGHT["float"]
    assert width_color("first8") == LIGHT["mixed"] and width_color(4) == LIGHT["4"]
    assert (css_name(4), css_name("32"), css_name("first8")) == ("var(--w4)", "var(--wf)", "var(--wm)")
