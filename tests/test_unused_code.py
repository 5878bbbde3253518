"""The check of unused code, on small trees: what only tests call is red, and so is an entry that excuses nothing."""

from __future__ import annotations

from pathlib import Path

from tests.unused_code import complaints, unused


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".html" if name.endswith("page") else ".py").write_text(text)
    return root


def test_what_only_tests_call_is_found_and_what_a_user_or_a_template_reads_is_not(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        product__one="def wanted(): ...\n\ndef shown(): ...\n\ndef asked(): ...\n\ndef forgotten(): ...\n",
        product__two="from product.one import forgotten, wanted\n\nwanted()\n",
        product__page="<p>forgotten {{ row.shown }}</p>",
        tests__test_one="from product.one import forgotten\n\nforgotten()\n",
        demo__main="from product.one import asked\n\nasked()\n\ndef own(): ...\n",
    )
    assert unused(root, ("product",), ("demo",)) == {"forgotten": "product/one.py:7: function"}
    assert set(unused(root, ("product",))) == {"forgotten", "asked"}


def test_an_entry_needs_a_reason_and_something_to_excuse() -> None:
    found = {"kept": "a.py:1: function", "bare": "a.py:2: function", "new": "a.py:3: function"}
    lines = complaints(found, {"kept": "a later step uses it", "bare": "why not", "gone": "pydicom reads it"})
    assert lines[0] == "a.py:3: function new: nothing but tests uses it"
    assert lines[1] == "unused_code.toml: gone: it is used, or gone: delete the line"
    assert lines[2] == "unused_code.toml: bare: say why it stays"
