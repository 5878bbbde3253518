"""Conditions of an image: labels, put into words by templates over a public vocabulary.

Privacy Distillation trains with each image's own radiology report. A report links a drawn image to one patient,
and the marks that de-identification leaves in it are what such models learn by heart first. Here a condition is a
label, a prompt is a public template with that label in it, and there is no way to pass any other text: not per
image, not per patient. A word that stands in no template and no label has no token.

A label's findings are its parts at "+": ``edema+effusion`` shows two, ``none`` is one of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from protos.common.canonical_json import canonical
from protos.common.errors import ConfigError

TEMPLATES: Final = ("image with {}", "image showing {}", "{}")  # neutral: of any modality
MOST: Final = 4_096  # conditions
LONGEST: Final = 64  # tokens of a prompt
NAMED: Final = re.compile(r"[!-~]([ -~]{0,30}[!-~])?")  # a label of a released set: 32 characters of printed ASCII
_TEMPLATE: Final = re.compile(r"[ -~]{2,200}")
_WORD: Final = re.compile(r"[!-~]{1,200}")
_MOST_TEMPLATES: Final = 16
_MOST_WRITTEN: Final = 49_152  # characters as JSON: the header of a network's file holds 65,536 in all


class UnknownWordError(ConfigError, ValueError):
    """A text holds a word of no template and no label. It is not repeated: it may be a patient's."""

    def __init__(self) -> None:
        """Say what is known, and not which word it was."""
        super().__init__("a prompt holds a word that is in no template and no label")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The words that a prompt may hold. Token 0 is nothing; words are numbered from 1."""

    words: tuple[str, ...]  # lower case, sorted, each once

    def __post_init__(self) -> None:
        """Refuse what cannot be numbered in one way only."""
        if not all(isinstance(w, str) and _WORD.fullmatch(w) and w == w.lower() for w in self.words):
            raise ValueError("a word is lower case, in printed ASCII, without a space")
        if not self.words or list(self.words) != sorted(set(self.words)):
            raise ValueError("a vocabulary has words, sorted and each once")

    @property
    def size(self) -> int:
        """How many tokens there are, with 0 for nothing."""
        return len(self.words) + 1

    def tokens(self, texts: Sequence[str], length: int) -> Tensor:
        """Texts as tokens: (n, length) int64, filled up with 0.

        Raises:
            UnknownWordError: a word that is not in the vocabulary.
            ValueError: a text longer than ``length`` words.
        """
        number = {word: place for place, word in enumerate(self.words, start=1)}
        rows = torch.zeros((len(texts), length), dtype=torch.int64)
        for row, text in zip(rows, texts, strict=True):
            found = [number.get(word) for word in _words(text)]
            if len(found) > length:
                raise ValueError(f"a prompt has {length} words at most")
            for place, token in enumerate(found):
                if token is None:
                    raise UnknownWordError
                row[place] = token
        return rows


@dataclass(frozen=True, slots=True)
class Conditions:
    """The labels that a model can be asked for, and the templates that put them into words: public configuration.

    Order counts: a label is known by its place.
    """

    names: tuple[str, ...]
    templates: tuple[str, ...] = TEMPLATES
    length: int = 16  # tokens of every prompt, filled up with 0
    vocabulary: Vocabulary = field(init=False, repr=False, compare=False)
    parts: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)  # findings of every name
    # (templates, names + 1, length): tokens; the last row is no condition
    _table: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse names and templates that cannot be told apart, and prompts that are too long."""
        _check(self.names, self.templates, self.length)
        if len(json.dumps(self.told())) > _MOST_WRITTEN:
            raise ValueError("the names and templates of the conditions are too long: shorten them")
        parts = tuple(_parts(name) for name in self.names)
        prompts = [[_said(template, part) for part in parts] for template in self.templates]
        words = {word for said in prompts for prompt in said for word in _words(prompt)}
        object.__setattr__(self, "vocabulary", Vocabulary(tuple(sorted(words))))
        object.__setattr__(self, "parts", parts)
        tokens = torch.stack([self.vocabulary.tokens(said, self.length) for said in prompts])
        if any(len(torch.unique(rows, dim=0)) < len(self.names) for rows in tokens):
            raise ValueError("two conditions have the same prompt: they differ in capitals, spaces or 'and' only")
        nothing = torch.zeros((len(tokens), 1, self.length), dtype=torch.int64)
        object.__setattr__(self, "_table", torch.cat([tokens, nothing], dim=1))

    @property
    def count(self) -> int:
        """How many conditions there are."""
        return len(self.names)

    @property
    def findings(self) -> tuple[str, ...]:
        """Every finding that some condition shows, sorted; a label such as ``none`` is one of its own."""
        return tuple(sorted({finding for part in self.parts for finding in part}))

    @property
    def digest(self) -> str:
        """SHA-256 of names, templates and length: the same tokens mean the same prompts."""
        return hashlib.sha256(canonical(self.told())).hexdigest()

    def told(self) -> dict[str, Any]:
        """What :func:`conditions_from` reads: for a file's configuration."""
        return {"length": self.length, "names": list(self.names), "templates": list(self.templates)}

    def place(self, name: str) -> int:
        """The label of a name.

        Raises:
            ValueError: no condition has this name. It is not repeated.
        """
        if name not in self.names:
            raise ValueError("a label is not one of the conditions")
        return self.names.index(name)

    def prompts(self, name: str) -> tuple[str, ...]:
        """What is said of a condition, one prompt for each template.

        Raises:
            ValueError: no condition has this name.
        """
        found = self.parts[self.place(name)]
        return tuple(_said(template, found) for template in self.templates)

    def tokens(self, labels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The prompts of labels.

        Args:
            labels: (n,) int64, places of names; -1 is no condition, all zeros.
            generator: chooses a template for each; without one, the first.
        Returns:
            (n, length) int64, where the labels are.
        Raises:
            ValueError: labels that are no whole numbers, or of no condition.
        """
        if labels.ndim != 1 or labels.dtype != torch.int64:
            raise ValueError("labels are (n,) int64")
        if len(labels) and not -1 <= int(labels.min()) <= int(labels.max()) < self.count:
            raise ValueError("a label is not one of the conditions")
        rows = labels.cpu()
        chosen = torch.zeros_like(rows)
        if generator is not None:
            drawn = torch.randint(
                len(self.templates), labels.shape, generator=generator, device=generator.device, dtype=torch.int64
            )
            chosen = drawn.cpu()
        return self._table[chosen, rows].to(labels.device)  # -1 is the last row: nothing


def conditions_from(told: Mapping[str, Any]) -> Conditions:
    """Read what :meth:`Conditions.told` gave.

    Raises:
        ValueError: unknown or missing keys, or no conditions.
    """
    if not isinstance(told, Mapping) or told.keys() != {"length", "names", "templates"}:
        raise ValueError("conditions have names, templates and a length")
    if not isinstance(told["names"], list) or not isinstance(told["templates"], list):
        raise ValueError("names and templates are lists")
    return Conditions(tuple(told["names"]), tuple(told["templates"]), told["length"])


def _check(names: tuple[str, ...], templates: tuple[str, ...], length: int) -> None:
    """Raise ValueError where these are no conditions."""
    if type(length) is not int or not 1 <= length <= LONGEST:
        raise ValueError(f"a prompt has 1 to {LONGEST} tokens")
    if not isinstance(names, tuple) or not 1 <= len(names) <= MOST:
        raise ValueError(f"there are 1 to {MOST} conditions")
    if not all(isinstance(name, str) and NAMED.fullmatch(name) for name in names):
        raise ValueError("a condition's name has 1 to 32 characters of printed ASCII, and no space around it")
    findings = [frozenset(_parts(name)) for name in names]
    several = zip(names, findings, strict=True)
    if not all(all(part) and len(part) == name.count("+") + 1 for name, part in several):
        raise ValueError("a condition names each of its findings once, with a '+' between two")
    if len(set(findings)) < len(findings):
        raise ValueError("two conditions have the same findings")
    if not isinstance(templates, tuple) or not 1 <= len(templates) <= _MOST_TEMPLATES:
        raise ValueError(f"there are 1 to {_MOST_TEMPLATES} templates")
    if not all(isinstance(t, str) and _TEMPLATE.fullmatch(t) and t.count("{}") == 1 for t in templates):
        raise ValueError("a template is at most 200 characters of printed ASCII, with {} once, for the label")
    if len(set(templates)) < len(templates):
        raise ValueError("two templates are the same")


def _parts(name: str) -> tuple[str, ...]:
    return tuple(" ".join(_words(part)) for part in name.split("+"))


def _words(text: str) -> Iterable[str]:
    return text.lower().split()


def _said(template: str, findings: tuple[str, ...]) -> str:
    """A prompt; not str.format, which would look into a label's braces."""
    return " ".join(_words(template.replace("{}", " and ".join(findings))))
