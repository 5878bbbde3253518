"""What a person can propose: each command's form, made from its configuration's dataclasses and its options."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agent.cli import options
from agent.defacing.config import PARTS
from agent.mechanisms.anonfaces.identity_mixing import Mixing
from agent.mechanisms.centroids import config as centroids
from agent.mechanisms.common import config as common
from agent.mechanisms.common import dp_config
from agent.mechanisms.distillation import config as distillation
from agent.mechanisms.distillation.latent_model import LatentConfig
from agent.mechanisms.distillation.options import NETWORKS
from agent.mechanisms.distillation.teacher_student import Output, Sampling
from agent.mechanisms.federated import config as federated
from agent.mechanisms.ksalsa.augmentation import KSalsaViews
from agent.mechanisms.ksalsa.style_alignment import Alignment
from agent.mechanisms.privimage import config as privimage
from agent.mechanisms.privimage.diffusion import DiffusionConfig
from agent.mechanisms.privimage.mechanism import Synthetic
from agent.mechanisms.remodel import config as remodel
from agent.models.diffusion import edm, latent
from agent.models.diffusion.prompts import TEMPLATES
from agent.service.proposal_form import FormField, FormGroup, ProposalForm
from agent.vetting.config import JudgesTable, VettingTable

Tables = Sequence[tuple[str, Sequence[type[Any]]]]  # a table, and the dataclasses that its keys are of
_K: Final = (("cohort", (common.CohortTable,)), ("clusters", (common.ClustersTable,)))
_STYLED: Final = (*_K, ("networks", (common.NetworksTable,)))
_JUDGED: Final = ("vetting", (JudgesTable,))
_PRIVACY: Final = ("privacy", (dp_config.PrivacyTable,))
_DISTILL: Final = (
    ("cohort", (common.CohortTable,)), ("networks", (distillation.NetworksTable,)),
    ("teacher", (distillation.TeacherTable, LatentConfig)), ("student", (distillation.StudentTable,)),
    ("vetting", (VettingTable,)), ("sampling", (Sampling,)), ("output", (Output,)),
)  # fmt: skip
TABLES: Final[Mapping[str, Tables]] = {
    "ksame": (_JUDGED,),
    "ksalsa": (*_STYLED, ("alignment", (Alignment,)), ("views", (KSalsaViews,)), _JUDGED),
    "anonfaces": (*_STYLED, ("mixing", (Mixing,)), _JUDGED),
    "privimage": (
        ("cohort", (common.CohortTable,)), _PRIVACY, ("semantics", (privimage.SemanticsTable,)),
        ("public", (privimage.PublicTable,)), ("model", (privimage.ModelTable, DiffusionConfig)),
        ("synthetic", (Synthetic,)),
    ),
    "centroids": (
        ("cohort", (common.CohortTable,)), ("networks", (centroids.CodecTable,)),
        ("privacy", (centroids.PrivacyTable,)), ("cells", (centroids.CellsTable,)),
    ),
    "distill": _DISTILL,
    "distill-dp": (*_DISTILL, _PRIVACY, ("public", (distillation.PublicTable,))),
    "model": (("privacy", (federated.PriceTable,)), ("evaluate", (federated.LookTable,))),
    "remodel": (("cohort", (remodel.HeadsTable,)), ("network", (remodel.NetworkTable,))),
}  # fmt: skip
_CONDITIONS: Final = (
    FormField(
        "conditions", "text", "", "the patients' labels that count, as `train aligner` printed them", True, True
    ),
    FormField("templates", "text", ", ".join(TEMPLATES), "prompts, as the aligner learned them", many=True),
)
_LOOSE: Final[Mapping[str, tuple[FormField, ...]]] = {  # keys outside of any table
    "privimage": (
        FormField("classes", "text", "", "the labels to draw; images of others are left out", True, True),
        FormField("pooled", "text", "", "few patients: the name of the one class that all of classes make"),
    ),
    "distill": _CONDITIONS,
    "distill-dp": _CONDITIONS,
    "model": (FormField("task", "file", "", "the task file, which `task check` has accepted", True),),
}
_MAY_BE_LEFT_OUT: Final = {
    ("ksame", "vetting"),
    ("ksalsa", "vetting"),
    ("anonfaces", "vetting"),
    ("ksalsa", "views"),
    ("model", "evaluate"),
}
_ABOUT: Final[Mapping[type[Any], str]] = {  # where the first line of the docstring needs its neighbours
    JudgesTable: "before anything leaves, two verifiers compare every image with patients' images",
    common.NetworksTable: "files that IT has put into the folder networks, or that a finished training made",
    centroids.CodecTable: "files that IT has put into the folder networks, or that a finished training made",
    distillation.NetworksTable: "files that IT has put into the folder networks, or that a finished training made",
}
_NOT_OF: Final = {("anonfaces", "networks.style"), ("anonfaces", "networks.content")}  # see kanonymous_config
_NO_KEYS: Final = {(Mixing, "k"), (DiffusionConfig, "architecture"), (LatentConfig, "architecture")}
_SEEDED: Final = {(DiffusionConfig, "seed"): "0", (LatentConfig, "seed"): "0"}  # what the reader takes
_FILES: Final[Mapping[str, tuple[str, ...]]] = {  # keys that name a file, with the published kinds
    "generator": common.GENERATORS, "encoder": (), "style": common.EXTRACTORS, "content": common.EXTRACTORS,
    "recognisers": (), "codebook": (), "autoencoder": (), "verifier": (), "unseen": (), "aligner": (), "file": (),
    "labels": (), "remodeller": (), "basis": (), "reader": (), "features": (), "identities": (), "templates": (),
    "task": (),
}  # fmt: skip
_WORDS: Final = {"style": (common.RANDOM,), "content": (common.RANDOM,), "labels": (distillation.FOLDERS,)}
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "model.kind": ("diffusion",), "model.preset": tuple(edm.PRESETS), "teacher.preset": tuple(latent.PRESETS),
    "network.parts": PARTS,
}  # fmt: skip
_FOLDERS: Final = frozenset({"pictures", "heads"})
_IN_TABLES: Final = frozenset({"cohort.labels", "synthetic.pictures", "output.pictures"})  # no file, no folder
# options that the service sets, or that belong to a command line
_NOT_ASKED: Final = frozenset(
    {"help", "sheet", "out", "dry_run", "anew", "detach", "priority", "project", "json", "config", "vetting", "blank"}
)
_KINDS: Final = {int: "int", float: "float", bool: "bool"}
_TRAININGS: Final = (*options.NETWORKS, *NETWORKS, "remodeller", "codebook")


def forms() -> list[ProposalForm]:
    """All of them: releases, then trainings."""
    parser = options.build_parser()
    made = [_release(name, _command(parser, "release", name)) for name in TABLES]
    return made + [_training(name, _command(parser, "train", name)) for name in _TRAININGS]


def _command(parser: argparse.ArgumentParser, *words: str) -> argparse.ArgumentParser:
    for word in words:
        (group,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
        parser = group.choices[word]
    return parser


def _release(name: str, command: argparse.ArgumentParser) -> ProposalForm:
    known = {action.dest for action in command._actions}
    groups = [FormGroup("", "", _LOOSE[name])] if name in _LOOSE else []
    typed = FormGroup("", "How it is made and written.", tuple(_options(command)))
    groups += [_table(name, table, kinds) for table, kinds in TABLES[name]]
    order = (typed, *groups) if name == "ksame" else (*groups, typed)
    return ProposalForm(
        ("release", name),
        str(command.description),
        tuple(group for group in order if group.fields),
        config="--config" if "config" in known else "--vetting",
        mechanism=name if "config" in known else "",
        out="--sheet" if "sheet" in known else "",
        vetted="distill" not in name,
    )


def _training(name: str, command: argparse.ArgumentParser) -> ProposalForm:
    groups = (FormGroup("", "On public images, without any patient of yours.", tuple(_options(command))),)
    return ProposalForm(("train", name), str(command.description).partition(";")[0], groups, out="--out")


def _table(mechanism: str, name: str, kinds: Sequence[type[Any]]) -> FormGroup:
    about = (inspect.getdoc(kinds[0]) or "").partition("\n")[0]
    found = (one for kind in kinds for one in _keys(kind, f"{name}."))
    fields = tuple(one for one in found if (mechanism, one.name) not in _NOT_OF)
    about = _ABOUT.get(kinds[0]) or about.replace("``", "").removeprefix(f"[{name}]: ")
    return FormGroup(name, about, fields, (mechanism, name) in _MAY_BE_LEFT_OUT)


def _keys(kind: type[Any], prefix: str) -> Iterator[FormField]:
    hints = typing.get_type_hints(kind)
    owners = [owner for owner in reversed(kind.__mro__) if dataclasses.is_dataclass(owner)]
    said = {name: text for owner in owners for name, text in field_comments(owner).items()}
    for one in dataclasses.fields(kind):
        hint, name = hints[one.name], f"{prefix}{one.name}"
        if (kind, one.name) in _NO_KEYS:
            continue
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _keys(hint, f"{name}.")
            continue
        required = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        default = _SEEDED.get((kind, one.name), "" if required else _typed(_default(one)))
        what, many, choices = _kind_of(hint)
        if name in _CHOICES:
            what, choices = "choice", _CHOICES[name]
        text, demanded = said.get(one.name, ""), required and not default
        if name.endswith("_sha256"):
            text, demanded = f"{text}; left empty: of the file that you chose, as it is now", False
        made = FormField(name, what, default, text, demanded, many, choices)
        yield made if name in _IN_TABLES else _of_files(made, one.name)


def _kind_of(hint: Any) -> tuple[str, bool, tuple[str, ...]]:
    """Of a type: the field's kind, whether it holds several, and what may be chosen."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _kind_of(next(part for part in parts if part is not types.NoneType))
    if origin in (tuple, frozenset):
        return _kind_of(parts[0])[0], True, ()
    if origin is typing.Literal:
        return "choice", False, tuple(map(str, parts))
    return _KINDS.get(hint, "text"), False, ()


def _of_files(made: FormField, key: str) -> FormField:
    """The field, where its key names a file or a folder."""
    if key in _FOLDERS:
        return dataclasses.replace(made, kind="folder")
    if key not in _FILES or made.kind != "text":
        return made
    words = _WORDS.get(key, ())
    return dataclasses.replace(made, kind="file", choices=words, prefixes=_FILES[key])


def _options(command: argparse.ArgumentParser) -> Iterator[FormField]:
    for action in command._actions:
        if action.dest in _NOT_ASKED:
            continue
        name, text = action.option_strings[0], str(action.help or "")
        default = "" if isinstance(action, argparse._StoreTrueAction) else _typed(action.default)
        kind = "bool" if isinstance(action, argparse._StoreTrueAction) else "choice" if action.choices else "text"
        choices = tuple(map(str, action.choices or ()))
        made = FormField(name, kind, default, text, action.required, choices=choices)
        yield _of_files(made, action.dest)


def field_comments(kind: type[Any]) -> dict[str, str]:
    """What stands beside each field of a dataclass in the source: after it, continued below it, or above it."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node in body.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        said: list[str] = []
        while lines[first - 1].startswith("    # "):  # above, in the field's own column
            first -= 1
            said.insert(0, lines[first].strip(" #"))
        said += [line.partition("  # ")[2] for line in lines[node.lineno - 1 : last]]
        while last < len(lines) and lines[last].startswith("     ") and lines[last].strip().startswith("# "):
            said.append(lines[last].strip(" #"))
            last += 1
        found[node.target.id] = " ".join(filter(None, said))
    return found


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def _typed(value: Any) -> str:
    """A default as somebody would type it."""
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, tuple | frozenset | list):
        return ", ".join(map(_typed, sorted(value) if isinstance(value, frozenset) else value))
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
