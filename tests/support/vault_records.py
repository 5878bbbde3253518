"""Records of images as the reader makes them, and a vault to keep them in."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agent.deidentify.ps315.action_trace import AttributeAction
from agent.deidentify.record import Record, keyed_name
from agent.storage.site_database import SiteDatabase
from agent.storage.vault import Vault

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))
TRACE = (AttributeAction("0010,0010", "replaced", "profile"), AttributeAction("0009,1001", "removed", "private"))


def key_of(number: int, kind: int = 0) -> str:
    """A keyed identity, as the reader makes them."""
    return f"{kind:016x}{number:016x}"


def record(
    number: int = 1, person: int = 1, label: str = "7", face: bool = False, series: int | None = None
) -> Record:
    """One image; its series is the patient's own unless told otherwise."""
    pixels = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8) * np.float32(1 / (1 + number))
    return Record(
        key_of(number, 1),
        key_of(number, 2),
        key_of(person, 3),
        key_of(person, 4),
        "OT",
        "image",
        label,
        pixels,
        b"PAYLOAD-IN-CLEAR" + str(number).encode(),
        face,
        key_of(person if series is None else series, 5),
        "CHEST",
        TRACE,
    )


def open_vault(folder: Path) -> Vault:
    return Vault(SiteDatabase(folder / "vault.db", KEY), folder / "main.db", OTHER)


def picture_record(person: int, number: int, picture: int | None = None, *, instance: int | None = None) -> Record:
    """One image of a patient; equal pictures have equal pixels."""
    dice = np.random.default_rng(1000 + (number if picture is None else picture))
    who, uids = (
        key_of(person, 3),
        (key_of(number, 4), key_of(number, 5), key_of(number if instance is None else instance, 6)),
    )
    study, series, name = (keyed_name(who, uid) for uid in uids)
    pixels = np.rint(dice.random((8, 8)) * 255).astype(np.float32) / np.float32(255)
    return Record(
        *(name, key_of(number, 2), who, study, "OT", "image", str(person % 2), pixels, b"%d" % number, False, series),
        uids=uids,
    )
