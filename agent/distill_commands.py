"""``train autoencoder | verifier | aligner``, and what ``release distill`` shows before anything leaves."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.edges.page import write
from agent.edges.pictures import BadPictures, read_identities, read_labels
from agent.edges.sheet_page import by_chance, caught, kept_of, left_of, number, render, span, threshold, why
from agent.foreseen import untrained
from agent.mechanisms import Distill, DistillDp
from agent.nets.alignment import KnowsNothing, OtherConditions, aligner_from
from agent.nets.autoencoder import PRESETS, AutoencoderArchitecture, autoencoder_from
from agent.nets.conditions import TEMPLATES, Conditions
from agent.nets.features import features_from
from agent.nets.latent_diffusion import NotFinite
from agent.nets.siamese import Share
from agent.nets.stylegan import Generator
from agent.nets.tail import TooFewPeople
from agent.nouns import NotKept
from agent.stages.distil import NothingLeft, Output, Review
from agent.synthesis_commands import OUT, BadOrder, Kind, Public, Trained, answered, train
from agent.training.alignment import Labelled, TooFewPictures, train_aligner_of
from agent.training.alignment import suited as suited_aligner
from agent.training.autoencoder import AutoencoderTraining, Collapsed, train_autoencoder
from agent.training.loop import write_whole
from agent.training.near import near_duplicates
from agent.training.verification import NearDuplicates, second_opinion, train_verifier
from agent.training.verification import suited as suited_verifier
from agent.vetting_words import finite, power_json

EXPECTED: Final = (
    *(Collapsed, KnowsNothing, NotFinite, NotKept, NothingLeft, OtherConditions, TooFewPeople, TooFewPictures),
)
FOLDERS: Final = "folders"  # in the place of a list: a picture's folder names its condition


def run(arguments: argparse.Namespace) -> int:
    """Train one of these networks; what it expects to go wrong becomes a sentence."""
    return answered(lambda told: train(told, KINDS[told.network]), arguments, EXPECTED)


# -- train


def _channels(arguments: argparse.Namespace) -> int:
    return 1 if arguments.grey else 3


def _architecture(arguments: argparse.Namespace) -> AutoencoderArchitecture:
    """The preset's, or the one for the size.

    Raises:
        ValueError: there is none of this size, or no such file of features.
    """
    known = {preset.side: preset for preset in reversed(list(PRESETS.values()))}
    found = PRESETS.get(arguments.preset) if arguments.preset else known.get(arguments.side)
    if found is None or found.side != arguments.side:
        raise ValueError(f"no autoencoder of {arguments.side} pixels; --preset is one of: {', '.join(PRESETS)}")
    if arguments.features is not None and not arguments.features.is_file():
        raise ValueError(f"--features: there is no such file: {arguments.features.name}")
    return found.fitted(_channels(arguments))


def _autoencoder(arguments: argparse.Namespace, public: Public, _generator: Generator | None) -> Trained:
    config = AutoencoderTraining(
        _architecture(arguments),
        public.steps,
        arguments.seed,
        device=arguments.device,
        precision="float32" if arguments.device == "cpu" else "bfloat16",
        checkpoint_every=public.often,
        say_every=10,
    )
    # their digest stands in the autoencoder's file: who vouches for the one vouches for the other
    features = features_from(arguments.features.read_bytes(), "public") if arguments.features else None
    raw = train_autoencoder(public.images, config, arguments.out, public.say, features)
    write_whole(path := arguments.out / "autoencoder.safetensors", raw)
    return path, {}


def _verifier(arguments: argparse.Namespace, public: Public, _generator: Generator | None) -> Trained:
    places, whose = read_identities(arguments.identities, public.names)
    config = suited_verifier(f"verifier-{arguments.seed}", arguments.side, _channels(arguments), public.steps)
    config = replace(config, seed=arguments.seed, checkpoint_every=public.often, device=arguments.device)
    if arguments.second:
        config = second_opinion(config)
    # what it makes of every picture counts into the run's digest: with another autoencoder it is another run
    near = _near(arguments)
    trained = train_verifier(public.images[places], whose, config, arguments.out, public.say, near)
    name = "unseen" if arguments.second else "verifier"
    write_whole(path := arguments.out / f"{name}-{arguments.seed}.safetensors", trained.file)
    judged = trained.judged
    least = min(judged.caught, key=lambda kind: judged.caught[kind].value)
    said = (
        f"on people it never saw: area under the curve {_said(judged.auc)}, nearest is the same person "
        f"{_said(judged.precision_at_1)}, near-duplicates caught {_said(judged.caught[least])} at the least ({least})"
    )
    return path, {"second": arguments.second, "verified": asdict(judged), "said": said}


def _near(arguments: argparse.Namespace) -> NearDuplicates | None:
    """What makes near-duplicates by the autoencoder that was named; None where none was.

    Raises:
        ValueError: there is no such file, or it is of pictures of another shape.
        BadWeights: it is no autoencoder.
    """
    if arguments.autoencoder is None:
        return None
    path = arguments.autoencoder
    if not path.is_file():
        raise ValueError(f"--autoencoder: there is no such file: {path.name}")
    through = autoencoder_from(path.read_bytes()).to(arguments.device)
    if through.shape != ((arguments.side, arguments.side) if arguments.grey else (arguments.side, arguments.side, 3)):
        kind = "grey" if len(through.shape) == 2 else "colour"
        raise ValueError(f"--autoencoder: {path.name} is of {kind} pictures of {through.shape[0]} pixels")
    return near_duplicates(through)


def _said(share: Share) -> str:
    return f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"


def _aligner(arguments: argparse.Namespace, public: Public, _generator: Generator | None) -> Trained:
    labelled, conditions = _labelled(arguments, public)
    config = suited_aligner(arguments.side, _channels(arguments), public.steps)
    config = replace(config, seed=arguments.seed, checkpoint_every=public.often, device=arguments.device)
    raw = train_aligner_of(labelled, conditions, config, arguments.out, public.say)
    aligner = aligner_from(raw)
    aligner.demand()
    write_whole(path := arguments.out / "aligner.safetensors", raw)
    right, chance = aligner.fitness.right, aligner.fitness.chance
    said = (
        f"of pictures it never saw it finds the condition of {_said(right)}; "
        f"the commonest alone would be right for {chance:.3f}. In the configuration: "
        f"conditions = {list(conditions.names)}, templates = {list(conditions.templates)}".replace("'", '"')
    )
    return path, {**conditions.told(), "right": asdict(right), "chance": chance, "said": said}


def _labelled(arguments: argparse.Namespace, public: Public) -> tuple[Labelled, Conditions]:
    """The pictures that have a condition, whose each is, and the conditions in the order of their names."""
    where = None if arguments.labels == FOLDERS else Path(arguments.labels)
    places, shown = read_labels(where, public.names)
    names, labels = np.unique(shown, return_inverse=True)
    conditions = Conditions(tuple(map(str, names)), _templates(arguments.templates))
    owners = _owners(arguments.identities, public.names)[places]
    return Labelled(public.images[places], labels.astype(np.int64), owners), conditions


def _owners(path: Path | None, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Whose each picture is; one that is on no list is its own person's."""
    owners = np.arange(len(names), dtype=np.int64)
    if path is not None:
        places, whose = read_identities(path, names)
        owners[places] = len(names) + whose
    return owners


def _templates(path: Path | None) -> tuple[str, ...]:
    """Prompts, one in each line.

    Raises:
        BadPictures: the file cannot be read.
    """
    if path is None:
        return TEMPLATES
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise BadPictures(f"{path.name} cannot be read as UTF-8") from None
    return tuple(line.strip() for line in lines if line.strip())


def _sized(arguments: argparse.Namespace) -> object:
    """Both networks have a trunk of this size, and the verifier's autoencoder is one of such pictures.

    Raises:
        ValueError: they have none, or it is not.
    """
    if arguments.network == "verifier":
        _near(arguments)
    suited = suited_verifier("checked", arguments.side, _channels(arguments), 1)
    return suited, suited_aligner(arguments.side, _channels(arguments), 1)


KINDS: Final[dict[str, Kind]] = {
    "autoencoder": Kind(10_000, _architecture, _autoencoder),
    "verifier": Kind(2_000, _sized, _verifier),
    "aligner": Kind(1_000, _sized, _aligner),
}


# -- release


def refuse_wrapping(arguments: argparse.Namespace, output: Output) -> None:
    """A model is one file of weights: it is not written as pictures.

    Raises:
        BadOrder: it was asked to be.
    """
    if output.release == "model" and arguments.form != "png":
        raise BadOrder('--form is of pictures: [output] release = "model" leaves as safetensors')


def refuse_sheet(path: Path | None, out: Path | None = None) -> None:
    """A page is never written over, and a folder that is not there takes none.

    Args:
        path: of the page, if there is to be one.
        out: another file that is to be written, if any.

    Raises:
        BadOrder: either.
    """
    if path is not None and (path.exists() or not path.parent.is_dir()):
        raise BadOrder(f"{path.name}: name a new file for the sheet, in a folder that is there")
    if path is not None and path == out:
        raise BadOrder("--sheet and --out name one file")


def write_blank(arguments: argparse.Namespace, mechanism: object) -> int:
    """Write what the coordinator's operator approves the architecture by: nothing is priced, and no patient is read.

    Raises:
        BadOrder: the file is there, or no model is released.
    """
    if arguments.blank.exists() or not arguments.blank.parent.is_dir():
        raise BadOrder(f"{arguments.blank.name}: name a new file, in a folder that is there")
    if not isinstance(mechanism, Distill | DistillDp) or mechanism.course.output.release != "model":
        raise BadOrder('--blank is of a model: [output] release = "model"')
    write_whole(arguments.blank, untrained(mechanism.course))
    if arguments.json:
        sys.stdout.write(json.dumps({"blank": arguments.blank.name}) + "\n")
    else:
        OUT.print(f"wrote {arguments.blank.name}, which has learned nothing: hand it to the coordinator's operator")
    return 0


def shown(arguments: argparse.Namespace, patients: bool, say: Callable[[str, str], None]) -> Callable[[Review], None]:
    """What is done with a review before anything leaves: the sheet is written, and the figures are printed.

    Args:
        arguments: ``config``, ``sheet`` and ``mechanism``.
        patients: the samples were compared with patients' pictures.
        say: a line of progress for people.
    Returns:
        It raises NotKept where the sheet cannot be written: nothing leaves then, and the making can go on.
    """

    def show(review: Review) -> None:
        if arguments.sheet is not None:
            told = f"{arguments.mechanism}, as {arguments.config.name} has it."
            _keep(arguments.sheet, render(review, told, patients))
            whose = "it shows patients" if patients else "nobody has reviewed what was dropped"
            say("sheet", f"wrote {arguments.sheet.name}: {whose}, so it stays at this site; delete it when decided")
        for line in in_words(review):
            say("review", line)

    return show


def _keep(path: Path, page: bytes) -> None:
    """Write the sheet, or half of it is no sheet.

    Raises:
        NotKept: it has come up meanwhile, or the disk does not take it.
    """
    told = "nothing has left. Say the same again with another --sheet: what was trained is kept"
    try:
        write(path, page)
    except FileExistsError:
        raise NotKept(f"{path.name} has come up meanwhile: {told}") from None
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise NotKept(f"{path.name}: {error.strerror}: {told}") from None


def in_words(review: Review) -> list[str]:
    """A review in lines: what became of each condition, and how sure it is."""
    lines = []
    for tally in review.conditions:
        gone = "".join(f", {count} {why(reason)}" for reason, count in sorted(tally.dropped.items()))
        empty = f"; {tally.empty} groups left empty" if tally.empty else ""
        told = f"{tally.drawn} drawn, {kept_of(tally)} kept{gone}; the student learned {tally.learned}{empty}"
        lines.append(f"{tally.name}: {told}")
        if not tally.learned:
            lines.append(f"{tally.name}: nothing was left of it, so the student never saw it")
    lines.append(f"re-identified by the second verifier: {span(review.before)} of the teacher's samples")
    lines.append(f"the student's own pictures: {left_of(review.leaving)}")
    lines.append(f"re-identified by the second verifier: {span(review.after)} of what leaves")
    lines += [f"planted near-duplicates that were caught, {name}: {text}" for name, text in caught(review.power)]
    lines.append(f"mean alignment of what leaves: {number(review.alignment, '.3f')}")
    for name, value in sorted(review.thresholds.items()):
        told = by_chance(review.intervals, name)
        chance = f"; {told} of samples like nobody reach it (95 %)" if told else ""
        lines.append(f"threshold, {name}: {threshold(name, value)}{chance}")
    return lines


def as_json(review: Review) -> dict[str, Any]:
    """The same as data; a number that is none is null."""
    conditions = [
        {
            "name": tally.name,
            "drawn": tally.drawn,
            "kept": kept_of(tally),
            "dropped": dict(tally.dropped),
            "learned": tally.learned,
            "empty": tally.empty,
        }
        for tally in review.conditions
    ]
    return {
        "conditions": conditions,
        "reidentified": {"before": asdict(review.before), "after": asdict(review.after)},
        "power": power_json(review.power),
        "leaving": {
            "drawn": review.leaving.drawn,
            "kept": kept_of(review.leaving),
            "dropped": dict(review.leaving.dropped),
            "left": review.leaving.learned,
        },
        "thresholds": {name: finite(value) for name, value in review.thresholds.items()},
        "intervals": {name: [finite(end) for end in ends] for name, ends in review.intervals.items()},
        "alignment": finite(review.alignment),
    }
