"""Words in pictures: a font of 3x5 pixels, since nothing that we depend on draws text."""

from __future__ import annotations

import numpy as np

_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ- "
# Five rows from top to bottom, an octal digit each: its bits are the pixels from left to right.
_ROWS = (
    "75557 26227 71747 71717 55711 74717 74757 71122 75757 75717 "  # digits
    "25755 65656 34443 65556 74647 74644 34553 55755 72227 "  # A to I
    "11152 55655 44447 57755 65555 25552 65644 25563 65655 "  # J to R
    "34216 72222 55557 55522 55775 55255 55222 71247 00700 00000"  # S to Z, dash, space
)
_GLYPHS = dict(zip(_CHARACTERS, _ROWS.split(), strict=True))
_WIDTH, _HEIGHT = 3, 5


def text_size(text: str, scale: int) -> tuple[int, int]:
    """Height and width of the text in pixels."""
    return scale * _HEIGHT, scale * ((_WIDTH + 1) * len(text) - 1)


def draw_text(picture: np.ndarray, text: str, top: int, left: int, scale: int) -> None:
    """White letters into a ``(height, width, 3)`` picture, cut at its edges. Letters come out as capitals."""
    for index, character in enumerate(text.upper()):
        rows = _GLYPHS.get(character, _GLYPHS["-"])
        bits = np.array([[int(row) >> shift & 1 for shift in (2, 1, 0)] for row in rows], bool)
        mask = bits.repeat(scale, 0).repeat(scale, 1)
        x = left + index * (_WIDTH + 1) * scale
        area = picture[top : top + mask.shape[0], x : x + mask.shape[1]]
        area[mask[: area.shape[0], : area.shape[1]]] = 255
