"""``python -m deploy.demo.train_networks``: train the demo's networks whose recipe is new, and keep them.

It types the commands that a person would, on public phantoms. A quarter of an hour of one processor for all of them;
what is kept already is passed over. The recipes are the clinics' own: see :mod:`deploy.demo.kept_networks`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from deploy.demo import chests, eyes, heads, letters, printed_digits
from deploy.demo.kept_networks import Recipe, keep, kept, lay, missing

# Raise a network's number when the code that draws its phantoms, or trains it, makes another one of the same recipe.
NUMBERS: Final[Mapping[str, int]] = {
    "generator": 1,
    "encoder": 1,
    "recogniser-0": 1,
    "recogniser-1": 1,
    "semantics": 1,
    "autoencoder": 1,
    "verifier": 1,
    "unseen": 1,
    "aligner": 1,
    "printed-digits": 1,
    "remodeller": 1,
}
_CLINICS: Final[tuple[ModuleType, ...]] = (eyes, letters, chests, printed_digits)
_PUBLIC, _NETWORKS = Path("PUBLIC"), Path("NETWORKS")  # in the place of folders


def _recipes() -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for clinic in _CLINICS:
        for name in clinic.STEPS:
            words: dict[str, Any] = {
                "command": clinic.training(name, _PUBLIC, _NETWORKS),
                "public": [clinic.__name__.rpartition(".")[2], dict(clinic.PUBLIC)],
            }
            if name == "encoder":
                words["generator"] = found["generator"].file_name
            found[name] = Recipe(name, words, NUMBERS[name])
    found["remodeller"] = Recipe("remodeller", heads.recipe_words(), NUMBERS["remodeller"])
    return found


RECIPES: Final[Mapping[str, Recipe]] = _recipes()  # a network stands before those that build on it


def kept_network(name: str) -> bytes:
    """A kept network's file, by its name.

    Raises:
        KeptNetworkError: none of its recipe and number is kept.
    """
    return kept(RECIPES[name])


def train(name: str, work: Path, say: Callable[[str], None] = lambda _: None) -> bytes:
    """Train one network anew; what it builds on must be kept.

    Args:
        name: one of ``RECIPES``.
        work: a folder for public images and checkpoints. Networks of one clinic share the images.
        say: told the command.
    Raises:
        KeptNetworkError: the generator of the encoder is not kept.
        subprocess.CalledProcessError: the command failed.
    """
    if name == "remodeller":
        say("train remodeller")
        return heads.train(work / "remodeller")
    clinic = next(one for one in _CLINICS if name in one.STEPS)
    public, networks, out = work / clinic.__name__, work / "networks", work / name
    if not public.exists():
        clinic.write_public(public)
    if name == "encoder":
        lay([RECIPES["generator"]], networks)
    words = ["train", *clinic.training(name, public, networks), "--out", str(out), "--json"]
    say(" ".join(words))
    command = [sys.executable, "-m", "agent", "--home", str(work / "none"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return Path(out, json.loads(done.stdout)["file"]).read_bytes()


def main(names: Sequence[str]) -> int:
    """Train what is named, or what has no file; exit 2 for a name that is none."""
    if unknown := sorted(set(names) - RECIPES.keys()):
        print(f"no such network: {', '.join(unknown)}. There are: {', '.join(RECIPES)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        for recipe in [RECIPES[name] for name in names] or missing(list(RECIPES.values())):
            raw = train(recipe.name, Path(folder), lambda text: print(text, file=sys.stderr, flush=True))
            path = keep(recipe, raw)
            kept_network(recipe.name)
            print(f"{path.name}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
