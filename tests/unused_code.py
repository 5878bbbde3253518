"""What the product defines and nothing but tests uses: ``python -m tests.unused_code``, part of ``make check``.

vulture goes by names: a name that is read anywhere in the packages, in ``deploy`` or in a template counts as used.
What tests read does not count. What is used in a way that vulture cannot see stands in ``unused_code.toml``, each
name with the reason. An entry that is not needed any more is red, too.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from vulture import Vulture

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("agent", "coordinator", "policies", "protos")
USERS: Final = ("deploy",)  # not installed at a hospital: what it uses is used, what it has is its own affair
GENERATED: Final = "*/protos/v1/*"
ROUTES: Final = ["@pages.get", "@pages.post", "@*.get", "@*.post"]  # a page is called by its address
_TEMPLATE: Final = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)


def unused(root: Path, packages: Iterable[str], users: Iterable[str] = ()) -> dict[str, str]:
    """Names that are defined in packages and used nowhere, each with its first place."""
    found = Vulture(ignore_decorators=ROUTES)
    found.scavenge([str(root / name) for name in (*packages, *users) if (root / name).exists()], exclude=[GENERATED])
    templates = [path.read_text() for name in packages for path in (root / name).rglob("*.html")]
    read = {word for text in templates for part in _TEMPLATE.findall(text) for word in re.findall(r"\w+", part)}
    out: dict[str, str] = {}
    for item in found.get_unused_code(min_confidence=60):
        place = Path(item.filename).relative_to(root)
        if place.parts[0] in packages and item.name not in read:
            out.setdefault(item.name, f"{place}:{item.first_lineno}: {item.typ}")
    return out


def complaints(found: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    """What is neither used nor allowed, what is allowed for nothing, and what is allowed without a reason."""
    return [
        *(f"{place} {name}: nothing but tests uses it" for name, place in found.items() if name not in allowed),
        *(f"unused_code.toml: {name}: it is used, or gone: delete the line" for name in allowed if name not in found),
        *(f"unused_code.toml: {name}: say why it stays" for name, why in allowed.items() if len(why.split()) < 3),
    ]


def main() -> int:
    """Print what is wrong; 1 where anything is."""
    allowed = tomllib.loads((ROOT / "tests/unused_code.toml").read_text())["allowed"]
    lines = complaints(unused(ROOT, PACKAGES, USERS), allowed)
    print("\n".join(sorted(lines)) if lines else f"no unused code; {len(allowed)} names are allowed")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
