"""The words of the commands that train, tune, release and reproduce synthesis; apart, since they need no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agent.edges import home as homes

Add = Callable[..., argparse.ArgumentParser]
NETWORKS: Final = ("generator", "encoder", "features", "recogniser", "semantics")
DISTILLING: Final = ("autoencoder", "verifier", "aligner")  # networks of `release distill`
AUTOENCODERS: Final = ("tiny16", "tiny32", "coarse32", "small64", "base256", "base512")
EXPERIMENTS: Final = (
    *("ksalsa-table1", "ksalsa-table2", "ksalsa-table3", "ksalsa-table4", "ksalsa-s5", "ksalsa-s6", "ksalsa-s8"),
    *("anonfaces-fig2", "anonfaces-fig3", "anonfaces-fig9", "anonfaces-fig10", "anonfaces-fig13"),
    *("anonfaces-table1", "anonfaces-fig14", "anonfaces-fig15", "anonfaces-fig16"),
    *("privimage-table2", "privimage-table3", "privimage-fig6", "privimage-fig7"),
    *("distillation-table1", "distillation-table2", "distillation-fig2", "distillation-fig3"),
    *("deid-figure3", "deid-figure4"),
)
SIZES: Final = ("tiny32", "small64", "small128", "auto128", "auto256", "auto512", "auto1024")
KINDS: Final = ("learned", "vgg19", "vgg19-unnormalised", "moco", "resnet18", "resnet34", "resnet50", "inception")
LAYOUTS: Final = ("aptos", "eyepacs", "celeba", "rafd", "cifar10", "camelyon17", "imagenet", "mimic-cxr")
DIGITS: Final = "digits"  # a layout of no folder: handwriting that comes along
PHANTOMS: Final = "phantoms"  # another: made-up radiographs


def _act(name: str) -> Callable[[argparse.Namespace], int]:
    """A command of :mod:`agent.cluster_commands`, imported when it is typed: torch takes two seconds."""

    def act(arguments: argparse.Namespace) -> int:
        from agent import cluster_commands  # noqa: PLC0415 - see above

        return cluster_commands.run(name, arguments)

    return act


def _train(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.synthesis_commands`."""
    from agent import synthesis_commands  # noqa: PLC0415 - torch takes two seconds

    return synthesis_commands.run(arguments)


def _codebook(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.codebook_command`."""
    from agent import codebook_command  # noqa: PLC0415 - torch takes two seconds

    return codebook_command.run(arguments)


def _private(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.private_commands`."""
    from agent import private_commands  # noqa: PLC0415 - torch takes two seconds

    return private_commands.run(arguments)


def _distilling(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.distill_commands`."""
    from agent import distill_commands  # noqa: PLC0415 - torch takes two seconds

    return distill_commands.run(arguments)


def _remodel(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.remodel_command`."""
    from agent import remodel_command  # noqa: PLC0415 - torch takes two seconds

    return remodel_command.run(arguments)


def _train_remodeller(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.remodel_command`."""
    from agent import remodel_command  # noqa: PLC0415 - torch takes two seconds

    return remodel_command.train(arguments)


def _draw(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.draw_command`."""
    from agent import draw_command  # noqa: PLC0415 - torch takes two seconds

    return draw_command.run(arguments)


def _evaluate(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.evaluate_command`."""
    from agent import evaluate_command  # noqa: PLC0415 - torch takes two seconds

    return evaluate_command.run(arguments)


def _reproduce(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.reproduce_command`."""
    from agent import reproduce_command  # noqa: PLC0415 - torch takes two seconds

    return reproduce_command.run(arguments)


def _audit(arguments: argparse.Namespace) -> int:
    """As :func:`_act`, of :mod:`agent.audit_command`."""
    from agent import audit_command  # noqa: PLC0415 - torch takes two seconds

    return audit_command.run(arguments)


def add_release(release: Any, add: Add) -> None:
    """``release`` of ksalsa, anonfaces, privimage, centroids and both distillations."""
    for name, act, text, told in (
        ("ksalsa", _act("release"), "by local style alignment (k-SALSA)", "cohort, clusters, networks"),
        ("anonfaces", _act("release"), "by identity mixing, tested by recognisers (AnonFACES)", "as of ksalsa"),
        ("privimage", _private, "by a model fine-tuned with DP-SGD (PrivImage)", "cohort, privacy, model"),
        ("centroids", _private, "by noisy averages of a public codebook's cells", "cohort, privacy, cells"),
        ("distill", _private, "or model, vetted against every patient (Privacy Distillation)", "cohort, networks"),
        (
            "distill-dp",
            _private,
            "or model, by a teacher under DP-SGD, vetted against public pictures",
            "as of distill",
        ),
    ):
        kind = "differentially private" if act is _private else "k-anonymous"
        kind = "vetted, not differentially private" if name == "distill" else kind
        command = add(release, name, act, f"a {kind} synthetic set {text}")
        command.set_defaults(mechanism=name)
        command.add_argument("--config", type=Path, required=True, help=f"TOML: {told}")
        add_making(command)
        if act is _private:
            command.add_argument("--out", type=Path, help="write what was admitted here too: a new file")
        command.set_defaults(sheet=None, blank=None)
        if act is not _private or name.startswith("distill"):
            sheet = (
                "write the reviewer's contact sheet here before anything leaves: a new HTML file, for this site only"
            )
            command.add_argument("--sheet", type=Path, help=sheet)
        if name.startswith("distill"):
            blank = (
                "release nothing: write the untrained model here, whose architecture the coordinator approves first"
            )
            command.add_argument("--blank", type=Path, help=blank)
        command.add_argument("--form", choices=("png", "dicom"), default="png", help="how the images are written")
        command.add_argument("--spacing-um", type=int, default=1000, help="of DICOM: a pixel's side in micrometres")
        command.add_argument("--reader", type=Path, help="seal it to this reader's public key")
        _common(command)

    told = "patients' own head scans with other faces (C-DeID-GAN): the brain itself remains linkable"
    heads = add(release, "remodel", _remodel, told)
    heads.add_argument("--config", type=Path, required=True, help="TOML: cohort, network")
    add_making(heads)
    _common(heads)


def add_making(command: argparse.ArgumentParser) -> None:
    """What every ``release`` of a mechanism can be told."""
    dry = "say price, number and bytes, and what speaks against it: nothing is read, spent or written"
    command.add_argument("--dry-run", action="store_true", help=dry)
    anew = "give up what was interrupted, whatever it was: its budget stays spent"
    command.add_argument("--anew", action="store_true", help=anew)


def add_commands(commands: Any, add: Add) -> None:
    """``tune``, ``evaluate``, ``train``, ``draw``, ``audit`` and ``reproduce``."""
    tune = add(commands, "tune", _act("tune"), "try several k on the cohort, and show the site what each would cost")
    tune.add_argument("--config", type=Path, required=True, help="as for `release`")
    tune.add_argument("--menu", type=_menu, required=True, help="every k to try, fixed beforehand: 11,15,20")
    tune.add_argument("--out", type=Path, required=True, help="the page, for this site only")
    _common(tune)
    _add_evaluate(add(commands, "evaluate", _evaluate, "judge a private release's set by held-out patients"))
    train = commands.add_parser("train", help="train networks on public pictures").add_subparsers(
        required=True, metavar="NETWORK"
    )
    for name in NETWORKS:
        told = f"train the {name} on public pictures; again: go on where it stopped"
        _add_training(add(train, name, _train, told), name)
    for name in DISTILLING:
        told = f"train the {name} of `release distill` on public pictures; again: go on where it stopped"
        _add_training(add(train, name, _distilling, told), name)
    told = "train the network of `deface --method remodel` on public heads; again: go on where it stopped"
    _add_remodeller(add(train, "remodeller", _train_remodeller, told))
    told = "make a codebook of public pictures, the cells of `release centroids`"
    _add_codebook(add(train, "codebook", _codebook, told))
    _add_draw(add(commands, "draw", _draw, "draw pictures by a model that `release distill` let go"))
    audit = add(commands, "audit", _audit, "is the noise that is claimed the noise that this machine draws?")
    audit.add_argument("--full", action="store_true", help="also break the training in every known way, and look")
    audit.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    audit.add_argument("--json", action="store_true")
    audit.set_defaults(homeless=True)
    _add_reproduce(add(commands, "reproduce", _reproduce, "a paper's table again, on its data set or on phantoms"))


def _add_evaluate(judge: argparse.ArgumentParser) -> None:
    judge.add_argument("--config", type=Path, required=True, help="that the set was made with; it has a split")
    judge.add_argument("--set", type=Path, required=True, help="what `release ... --out` wrote")
    judge.add_argument("--part", required=True, help="of the split: patients who are in no release of it")
    judge.add_argument("--out", type=Path, required=True, help="the page, for this site only")
    _common(judge)


def _add_reproduce(again: argparse.ArgumentParser) -> None:
    again.add_argument("experiment", choices=EXPERIMENTS, metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    again.add_argument(
        "--data", type=Path, help="the data set's folder, as it is published; not for digits, phantoms"
    )
    again.add_argument("--public", type=Path, help="of privimage: ImageNet's folder, the public set")
    again.add_argument("--layout", choices=(*LAYOUTS, DIGITS, PHANTOMS), help="else the one that the folder has")
    presets = (
        "cpu32 (else this), cpu64 or paper512, which needs an accelerator; of privimage: digits8, which goes with "
    )
    more = (
        "--layout digits, or cifar32, celeba32, celeba64, camelyon32, which need an accelerator; of distillation: "
        "chest32, chest64 or mimic512, the last two with an accelerator; of deid: heads3mm, heads1mm, or "
        "folder, which goes with --data; else by the layout"
    )
    again.add_argument("--preset", default="", help=presets + more)
    again.add_argument("--out", type=Path, required=True, help="what is trained and computed, kept; again: go on")
    for role, told in (
        ("style", "that aligns styles, as VGG19 did: vgg19-unnormalised"),
        ("content", "that keeps content, as MoCo did: moco"),
        ("judge", "that measures fidelity, as Inception did: inception"),
    ):
        text = f"the published network {told}. Its file is OUT/official/KIND, its digest its authors'"
        again.add_argument(f"--{role}", type=_official, metavar="KIND:SHA256", help=text)
    drawn = "of deid: a file of `train remodeller`; else the mean of other people's heads draws the faces"
    again.add_argument("--network", type=Path, help=drawn)
    stand_in = "at paper512, go on without those of the three that are not named: random or learned features instead"
    again.add_argument("--random-features", action="store_true", help=stand_in)
    most = "so many images only: all are kept in memory. EyePACS at 512 px is 27.6 GB, and 50 GB more in training"
    again.add_argument("--limit", type=_count, help=most)
    again.add_argument("--json", action="store_true")
    again.set_defaults(homeless=True)


def _add_training(command: argparse.ArgumentParser, network: str) -> None:
    command.set_defaults(network=network, homeless=True)
    command.add_argument("--pictures", type=Path, required=True, help="a folder of PNG or JPEG; nobody's patients")
    command.add_argument("--out", type=Path, required=True, help="checkpoint, network and pictures of progress")
    command.add_argument("--steps", type=_count, help="else as many as usual")
    command.add_argument("--seed", type=_seed, default=0)
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--json", action="store_true")
    if network == "encoder":
        command.add_argument("--generator", required=True, help="a file of `train generator`; or stylegan2-ada:FILE")
        command.add_argument("--sha256", default="", help="of a published generator, as its authors tell it")
        command.add_argument("--side", type=_count, help="pixels; else, and always, the generator's")
        command.add_argument("--grey", action="store_true", help="for a generator of grey pictures; may be left out")
        return
    command.add_argument("--side", type=_count, default=64, help="pixels")
    command.add_argument("--grey", action="store_true", help="one channel instead of three")
    if network == "generator":
        command.add_argument("--preset", default="", help=f"{', '.join(SIZES)}; else the first for --side")
    if network == "semantics":
        which = command.add_mutually_exclusive_group(required=True)
        which.add_argument("--labels", help='CSV: file,label; or "folders": a picture\'s folder names its label')
        which.add_argument("--clusters", type=_count, help="without labels: so many clusters of features")
        command.add_argument("--features", type=Path, help="of --clusters: a file of `train features`; else random")
    if network in DISTILLING:
        _add_distilling(command, network)
    if network == "recogniser":
        command.add_argument("--identities", type=Path, required=True, help="CSV: file,identity")
        rate = "at which the threshold is set; a smaller one needs more people"
        command.add_argument("--false-match-rate", type=_rate, default=0.01, help=rate)


def _add_remodeller(command: argparse.ArgumentParser) -> None:
    command.set_defaults(homeless=True)
    heads = "a folder of head MRI, NIfTI or DICOM: a BIDS folder, or each volume is somebody else; nobody's patients"
    command.add_argument("--heads", type=Path, required=True, help=heads)
    command.add_argument("--out", type=Path, required=True, help="examined heads, checkpoint, network, pictures")
    command.add_argument("--side", type=_count, default=64, help="voxels of the cube: 32, 64 or 128")
    command.add_argument("--steps", type=_count, help="else as many as usual")
    command.add_argument("--seed", type=_seed, default=0)
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--json", action="store_true")


def _add_distilling(command: argparse.ArgumentParser, network: str) -> None:
    who = "CSV: file,identity"
    if network == "autoencoder":
        command.add_argument("--preset", default="", help=f"{', '.join(AUTOENCODERS)}; else the one for --side")
        features = "of the perceptual loss: a file of `train features`, of public pictures; else random ones"
        command.add_argument("--features", type=Path, help=features)
    if network == "verifier":
        command.add_argument("--identities", type=Path, required=True, help=who)
        second = "the second opinion, which measures and chooses nothing: another seed, split and trunk"
        command.add_argument("--second", action="store_true", help=second)
        through = "a file of `train autoencoder`: it also learns what a latent model makes of a picture"
        command.add_argument("--autoencoder", type=Path, help=through)
    if network == "aligner":
        labels = 'CSV: file,label; or "folders": a picture\'s folder names its condition'
        command.add_argument("--labels", required=True, help=labels)
        command.add_argument(
            "--templates", type=Path, help="a text file, a prompt in each line, {} for the condition"
        )
        command.add_argument("--identities", type=Path, help=f"{who}; else each picture is another person's")


def _add_draw(command: argparse.ArgumentParser) -> None:
    command.set_defaults(homeless=True)
    command.add_argument("--model", type=Path, required=True, help="the model's file, as it left")
    command.add_argument("--count", type=_count, required=True, help="pictures; with all, of each condition")
    command.add_argument("--condition", required=True, help="what they show, as the model names it; or all")
    command.add_argument("--out", type=Path, required=True, help="PNG files and labels.csv: a new folder")
    command.add_argument("--seed", type=_seed, default=0, help="the same seed, the same pictures")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--json", action="store_true")


def _add_codebook(command: argparse.ArgumentParser) -> None:
    command.set_defaults(homeless=True)
    command.add_argument("--pictures", type=Path, required=True, help="a folder of PNG or JPEG; nobody's patients")
    command.add_argument("--generator", required=True, help="a file of `train generator`; or KIND:FILE")
    command.add_argument("--encoder", default="", help="a file of `train encoder`; none beside restyle:FILE")
    command.add_argument("--sha256", default="", help="of a published generator, as its authors tell it")
    command.add_argument("--cells", type=_count, required=True, help="a cell needs a hundred patients or so")
    command.add_argument("--dims", type=_count, default=16, help="of the subspace: 32 at most")
    command.add_argument("--out", type=Path, required=True, help="the codebook's folder")
    command.add_argument("--seed", type=_seed, default=0)
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--json", action="store_true")


def _menu(text: str) -> tuple[int, ...]:
    ks = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if len(ks) < 2 or list(ks) != sorted(set(ks)) or not ks[0] >= 2:
        raise argparse.ArgumentTypeError("two or more numbers, rising, from 2 on: 11,15,20")
    return ks


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError("a whole number, 1 or more")
    return int(text)


def _official(text: str) -> tuple[str, str]:
    kind, _, digest = text.partition(":")
    if kind not in KINDS or not re.fullmatch(r"[0-9a-f]{64}", digest.lower()):
        raise argparse.ArgumentTypeError(f"KIND:SHA256, a kind of {', '.join(KINDS)}, and its 64 hexadecimal digits")
    return kind, digest.lower()


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 63):
        raise argparse.ArgumentTypeError("a whole number, 0 or more")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < 0.5:
        raise argparse.ArgumentTypeError("a share above 0 and below a half")
    return rate


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--project", default=homes.MAIN, help="whose vault; else the project main")
    command.add_argument("--json", action="store_true")
