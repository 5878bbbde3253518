"""What options hold: the ``type`` of an argument, shared by the command lines of the mechanisms. argparse alone."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number, 1 or more."""
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError("give a whole number, 1 or more")
    return int(text)


def seed(text: str) -> int:
    """A whole number from 0 on, below 2^63."""
    if not (text.isdecimal() and int(text) < 1 << 63):
        raise argparse.ArgumentTypeError("give a whole number, 0 or more")
    return int(text)


def rate(text: str) -> float:
    """A share above 0 and below a half; NaN is none."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < 0.5:
        raise argparse.ArgumentTypeError("give a share above 0 and below 0.5")
    return found


def menu(text: str) -> tuple[int, ...]:
    """Two or more values of k, rising, from 2 on, with commas between them."""
    ks = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if len(ks) < 2 or list(ks) != sorted(set(ks)) or not ks[0] >= 2:
        raise argparse.ArgumentTypeError("give two or more ascending numbers from 2 on: 11,15,20")
    return ks


def sizes(text: str) -> tuple[int, ...]:
    """Two sides of an image, or three of a volume, with commas between them."""
    sides = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if len(sides) not in (2, 3) or not all(1 <= side <= 4096 for side in sides):
        raise argparse.ArgumentTypeError("give two or three numbers from 1 to 4096: 64,64")
    return sides
