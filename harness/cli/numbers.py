"""Numbers of a command line, with their bounds: argparse says what was found and what would do."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """A converter for whole numbers of at least `least`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"found {text}, needs a whole number >= {least}")
        return value

    return convert


def finite(least: float) -> Callable[[str], float]:
    """A converter for finite numbers of at least `least`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"found {text}, needs a finite number >= {least:g}")
        return value

    return convert
