"""Jinja2 as the consoles use it: everything escaped, nothing undefined, the kit's templates beside the page's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined

from protos.common.text import utc
from protos.web.request import RequestContext

_HERE: Final = Path(__file__).parent
_TYPES: Final = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}


def assets() -> dict[str, tuple[str, bytes]]:
    """The files that pages ask for, under names that change with what is in them: name -> (media type, body)."""
    out = {}
    for path in sorted(_HERE.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            out[f"{hashlib.sha256(body).hexdigest()[:16]}-{path.name}"] = (_TYPES[path.suffix], body)
    return out


class Templates:
    """Writes pages."""

    def __init__(self, folder: Path, title: str, side: str, menu: Sequence[tuple[str, str, frozenset[str]]]) -> None:
        """``folder``: the side's own templates."""
        self._menu = menu
        self.assets = assets()
        names = {name.partition("-")[2]: f"/static/{name}" for name in self.assets}
        self._env = Environment(
            loader=ChoiceLoader([FileSystemLoader(folder), FileSystemLoader(_HERE)]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._env.globals.update({"title": title, "side": side, "asset": names.__getitem__, "utc": utc})
        filters: dict[str, Callable[..., Any]] = {"utc": utc, "grouped": grouped, "significant": significant}
        self._env.filters.update(filters)

    def render(self, asked: RequestContext, template: str, context: Mapping[str, Any]) -> str:
        """A page. In the template: ``asked``, ``person`` (None before a login), ``menu``, ``ui`` (the macros)."""
        role = asked.who.role if asked.who else ""
        shared = {
            "asked": asked,
            "person": asked.who,
            "menu": [(label, path) for label, path, roles in self._menu if role in roles],
        }
        ui = self._env.get_template("parts.html").make_module(shared)
        return self._env.get_template(template).render({**shared, "ui": ui, **context})


def grouped(number: int) -> str:
    """A whole number in groups of three, with thin spaces."""
    return f"{number:,}".replace(",", "\u202f")


def significant(number: float, digits: int = 3) -> str:
    """A number with so many digits that count."""
    return f"{number:.{digits}g}"
