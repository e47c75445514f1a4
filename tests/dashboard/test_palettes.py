"""Colours: owners stay apart for colour-blind eyes, text can be read, and every palette is complete."""

import math
from itertools import combinations

import pytest
from rich.style import Style
from textual.strip import Strip

from kvscope.dashboard import theme
from kvscope.dashboard.colouring import SCALES, ColourBy
from kvscope.dashboard.halves import PAIRS
from kvscope.dashboard.palettes import ANSI, DARK, LIGHT, Recolour, css_variables

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
SHARES = ("share-1", "share-2", "share-3")
OKABE_ITO = ("#56b4e9", "#e69f00", "#2fbf91", "#cc79a7", "#f0e442", "#e8743b", "#8c9eff")  # lightened for a dark ground


def linear(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def seen_as(colour, matrix):
    return [max(sum(m * c for m, c in zip(row, linear(colour), strict=True)), 0.0) for row in matrix]


def oklab(rgb):
    """Ottosson 2020."""
    r, g, b = rgb
    lms = (
        0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
        0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
        0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
    )
    l_, m_, s_ = (x ** (1 / 3) for x in lms)
    return (
        0.2104542553 * l_ + 0.7936177850 * m_ - 0.0040720468 * s_,
        1.9779984951 * l_ - 2.4285922050 * m_ + 0.4505937099 * s_,
        0.0259040371 * l_ + 0.7827717662 * m_ - 0.8086757660 * s_,
    )


def smallest_distance(colours):
    distances = []
    for matrix in DEFICIENCIES.values():
        labs = [oklab(seen_as(colour, matrix)) for colour in colours]
        distances += [
            100 * sum((x - y) ** 2 for x, y in zip(one, two, strict=True)) ** 0.5 for one, two in combinations(labs, 2)
        ]
    return min(distances)


def contrast(colour, ground):
    """WCAG 2's ratio."""
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(colour), linear(ground)))
    return (high + 0.05) / (low + 0.05)


def shares(palette):
    return [palette[name] for name in ("soft", *SHARES)]


def owners(palette):
    return [palette[f"owner-{code}"] for code in range(1, 8)]


@pytest.mark.parametrize("palette", [DARK, LIGHT, ANSI], ids=["dark", "light", "ansi"])
@pytest.mark.parametrize("by", ColourBy)
def test_two_blocks_in_a_cell_can_be_told_apart(palette, by):
    """Every pair of a mode's colours is another picture, also where the text's colour is no colour for a ground."""
    symbols, styles = PAIRS[by]
    recolour, count = Recolour(css_variables(palette)), math.isqrt(len(styles))
    inks = range(len(SCALES[by]) + 1)  # the ground and the codes; the cursor is a colour of its own
    pictures = set()
    for look in (upper * count + lower for upper in inks for lower in inks):
        style = recolour.style(styles[look])
        assert not style.reverse
        pictures.add((symbols[look], style.color, style.bgcolor))
    assert len(pictures) == len(inks) ** 2


@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
def test_owners_stay_apart_with_every_colour_blindness(palette):
    assert smallest_distance(owners(palette)) >= 12
    assert smallest_distance(OKABE_ITO) < 3  # what the search started from


@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
def test_shares_stay_apart_with_every_colour_blindness(palette):
    assert smallest_distance(shares(palette)) >= 12


@pytest.mark.parametrize("palette", [DARK, LIGHT], ids=["dark", "light"])
def test_text_can_be_read(palette):
    ground = palette["background"]
    for name in ("foreground", "strong", "soft", "brand", "good", "notice", "bad"):
        assert contrast(palette[name], ground) >= 4.5, name
    for name in ("faint", "owner-1", "owner-2", "owner-3", "owner-4", "owner-5", "owner-6", "owner-7", *SHARES):
        assert contrast(palette[name], ground) >= 2.9, name
    for ink, chip in (("background", "good"), ("background", "notice"), ("on-bad", "alarm"), ("foreground", "chip")):
        assert contrast(palette[ink], palette[chip]) >= 4.5, chip


def test_palettes_have_the_same_names_and_the_drawn_one_names_each_colour_once():
    assert DARK.keys() == LIGHT.keys() == ANSI.keys()
    assert len(set(DARK.values())) == len(DARK)


def test_every_style_of_the_drawing_is_known_to_every_palette():
    styles = [value for value in vars(theme).values() if isinstance(value, Style)]
    styles += [theme.owner_style(code) for code in range(9)]
    known = set(DARK.values())
    for style in styles:
        assert {colour.name for colour in (style.color, style.bgcolor) if colour is not None} <= known


def test_recolouring_keeps_the_attributes():
    fresh, shared = map(Recolour(css_variables(LIGHT)).style, (theme.FRESH, theme.SHARED))
    assert (fresh.color.name, fresh.bold, fresh.underline) == (LIGHT["strong"], True, True)
    assert (shared.color.name, shared.bgcolor.name) == (LIGHT["background"], LIGHT["strong"])


def test_without_colours_grounds_become_reversed_and_only_they():
    recolour = Recolour(css_variables(ANSI), no_color=True)
    for style in (theme.SHARED, theme.CURSOR, theme.CHIP_GOOD, theme.ROW):
        assert recolour.style(style).reverse
    for style in (theme.TEXT, theme.FAINT, theme.owner_style(3), Style(bgcolor="default"), Style(bgcolor="#0d1117")):
        plain = recolour.style(style)
        assert not plain.reverse
        assert plain.color is None
    assert recolour.style(theme.FAINT).dim
    assert Recolour(css_variables(ANSI)).style(theme.SHARED).reverse
    assert Strip([]).text == ""


def test_without_colours_shares_are_told_by_attributes():
    recolour = Recolour(css_variables(ANSI), no_color=True)
    looks = [recolour.style(style) for style in theme.TINTS]
    assert len({(bool(look.bold), bool(look.underline), bool(look.reverse)) for look in looks}) == 4
    assert all(look.color is None for look in looks)
