"""The fixed looks of each library in every picture: told apart by colour-blind readers (CIE76 distance of 20 and more in
simulated protanopia, deuteranopia and tritanopia) and by shape; each colour has a contrast of 3 to its background."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """Colours on light and on dark, and the marker: matplotlib's letter, which the page draws too."""

    light: str
    dark: str
    marker: str


LOOKS = {
    "warpnorm": Look("#d1410c", "#ff7a3d", "o"),
    "torch.compile": Look("#0b4f9e", "#3a9af7", "s"),
    "liger": Look("#18a063", "#9fecd9", "^"),
    "quack": Look("#c46fd2", "#a65cb5", "D"),
    "apex": Look("#4a3c02", "#eee08a", "v"),
    "flash-attn": Look("#3e10fd", "#7a48f9", "P"),
    "eager": Look("#70767e", "#8b949e", "X"),
}
OTHER = Look("#70767e", "#8b949e", "o")


def look(library: str) -> Look:
    return LOOKS.get(library, OTHER)


def in_order(libraries: Iterable[str]) -> tuple[str, ...]:
    """As listed above; those that are not, after them."""
    order = tuple(LOOKS)
    return tuple(sorted(libraries, key=lambda name: order.index(name) if name in order else len(order)))
