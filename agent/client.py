"""A hospital's site from Python, for notebooks: ``from agent.client import Site``.

It is a program like ``lazaret-agent``: it runs as the same user on the same machine, asks the same running service
over its control socket, and has no more rights. It has no call that approves, sends or withdraws a release, or that
changes a limit or a policy: what persons must approve waits here as everywhere, and costs what it costs.

What has left may be fetched (:meth:`SiteJob.fetch`); what is only made may not. Counts of a cohort, and prices of
k-anonymous sets, follow from patients: a notebook that shows them stays at the site.

Every error is a :class:`protos.common.errors.LazaretError` with a sentence; those of the service are its own. To
import this module loads none of torch, pandas, grpc and fastapi. Torch and pandas are imported by the calls that name
them; pandas is no dependency of Lazaret: install it in your own environment, or use ``labels``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.cli import detach, main, options
from agent.errors import CommandError, SiteStorageError
from agent.service.commands import operator_name, read_findings
from agent.service.jobs import DONE, MADE, Event, JobProgress, JobStore
from policies.review.rules import Finding
from protos.artifacts.byte_source import BytesSource
from protos.artifacts.shards import read_samples
from protos.common.errors import InvariantError, LazaretError, RefusedError, UnreachableError
from protos.service.control_client import ControlClient, ServiceFaultError, connect

if TYPE_CHECKING:
    import argparse

    import pandas
    import torch

    from agent.storage.instance_index import StateCount
    from policies.governance.acts import Acts
    from policies.ledger.budget_metrics import AccountSpending

Config = Mapping[str, Any] | str | Path  # tables of a TOML file, or the file
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})
_OUR_OWN: Final = frozenset({"blank", "config", "detach", "dry_run", "home", "json", "out"})  # nobody else sets them


class NoServiceError(UnreachableError):
    """No service runs in the site's directory; the text says how to start it."""


class JobNotDoneError(RefusedError):
    """A job ended otherwise, or a person must go on with it; the text has the reason."""


@dataclass(frozen=True, slots=True)
class ReleasePrice:
    """What a release would cost, count and weigh; nothing was read or spent. It is for this site alone."""

    claim: Mapping[str, Any]  # as the ledger would have it: "kind", and its numbers
    amount: int  # of the account: releases for "k"; nano-nats of Rényi divergence at the account's order for "rdp"
    left: int  # in the same unit
    samples: int  # the most images or volumes; 0: one model
    shape: tuple[int, ...]  # of a sample
    size: int  # the most bytes
    findings: tuple[Finding, ...]  # what is known to speak against it; empty: nothing


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job stands, as ``jobs show --json`` tells it."""

    number: int
    command: str  # "release ksalsa"
    project: str
    state: str  # one of agent.service.jobs.STATES
    reason: str  # why, for people; "": it speaks for itself
    stopped: bool  # it changes no more by itself: it has ended, or waits for a person
    by: str  # who asked for the state; "": nobody
    proposed_by: str
    at: float  # seconds since 1970, of its first state
    since: float  # the same, of this state
    attempts: int  # starts
    price: Mapping[str, Any]  # "claim", "amount", "left", as ReleasePrice has them; empty: it is no release
    priority: str  # "high", "normal" or "low"
    grant: str
    release: str  # the name of what it makes; "": not known yet, or nothing
    wanted: str  # "cancelled": it is told to end
    progress: JobProgress  # step, detail, done, of, left_s (seconds)
    memory_bytes: int  # resident
    outputs: tuple[str, ...]  # names of the files that `jobs fetch` writes


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One entry of the site's ledger."""

    seq: int
    at: int  # seconds since 1970
    kind: str  # "reserved", "admitted", ...
    values: Mapping[str, Any]  # its fields, as `ledger show --json` has them


@dataclass(frozen=True, slots=True, eq=False)
class ReleasedSet:
    """A set of images or volumes that has left."""

    form: str  # png, png-rgb, dicom-uint8, nifti-int16 or nifti-float32
    samples: NDArray[Any] = field(repr=False)  # (m, h, w) or (m, h, w, 3) uint8; of volumes (m, i, j, k)
    labels: tuple[str, ...] = field(repr=False)  # m
    file: bytes = field(repr=False)  # the shard, with the spacing of volumes; as `jobs fetch` writes it

    def tensor(self) -> torch.Tensor:
        """The samples for torch, a copy: (m, 1, h, w) or (m, 3, h, w) uint8; of volumes (m, 1, i, j, k)."""
        import torch  # noqa: PLC0415 - two seconds, for who asks

        channels = np.moveaxis(self.samples, -1, 1) if self.form == "png-rgb" else self.samples[:, None]
        return torch.from_numpy(np.array(channels))

    def frame(self) -> pandas.DataFrame:
        """The labels for pandas: column ``label``, a row for each sample in order.

        Raises:
            CommandError: pandas is not installed.
        """
        try:
            import pandas  # noqa: PLC0415 - not a dependency
        except ImportError:
            raise CommandError("pandas is not installed: `pip install pandas`, or use `labels`") from None
        return pandas.DataFrame({"label": list(self.labels)})


@dataclass(frozen=True, slots=True, eq=False)
class NetworkWeights:
    """A model that has left, or a network that was trained on public images."""

    arrays: Mapping[str, NDArray[Any]] = field(repr=False)  # by name, in the types that the file has
    sha256: str  # of the file: what `site.toml`'s public_components vouches for
    file: bytes = field(repr=False)  # safetensors, as `jobs fetch` writes it

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights for torch, copies: what ``load_state_dict`` takes."""
        import torch  # noqa: PLC0415 - two seconds, for who asks

        return {name: torch.from_numpy(np.array(one)) for name, one in self.arrays.items()}


class Site:
    """A site whose service runs on this machine, under this user."""

    def __init__(self, home: str | Path) -> None:
        """Find the service.

        Args:
            home: the site's directory.
        Raises:
            NoServiceError: none runs there.
            ServiceRefusedError: it runs under another user, or is of another version.
        """
        self.home = Path(home).resolve()
        with self._service() as service:
            if service.about["side"] != "agent":
                raise CommandError(f"{self.home.name} is a coordinator's directory: name a site's")

    def __repr__(self) -> str:
        """The directory's name."""
        return f"Site({self.home.name})"

    # -- what there is

    def cohort(self, project: str = options.MAIN) -> tuple[StateCount, ...]:
        """Instances and patients by modality, body part and state, as ``cohort --json`` has them; keep them here.

        Raises:
            ProjectError: there is no such project.
        """
        with _sentences():
            from agent.ingest.context import open_ingest  # noqa: PLC0415 - pydicom, which jobs do not need
            from agent.storage.site_directory import SiteDirectory  # noqa: PLC0415 - as above

            with open_ingest(SiteDirectory(self.home), project) as way:
                return way.vault.counts(way.ingestion.rules.min_instances_per_series)

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """All entries of the site's ledger, as ``ledger show --json`` tells them."""
        with _sentences():
            from policies.audit.display import entry_json  # noqa: PLC0415 - as above
            from policies.ledger.backends.sqlite import read_lines  # noqa: PLC0415 - as above

            told = [entry_json(line.seq, line.record) for line in read_lines(self.home / "ledger.db")]
        return tuple(LedgerEntry(one.pop("seq"), one.pop("at"), one.pop("type"), one) for one in told)

    def budgets(self) -> tuple[AccountSpending, ...]:
        """Limit, spent, held and left of every account: of kind ``rdp`` in epsilon, of kind ``k`` in releases."""
        with _sentences():
            from policies.ledger.backends.sqlite import read_lines  # noqa: PLC0415 - as above
            from policies.ledger.budget_metrics import spending  # noqa: PLC0415 - as above
            from policies.ledger.state import State  # noqa: PLC0415 - as above

            state = State()
            for line in read_lines(self.home / "ledger.db"):
                state.apply(line.record)
            return tuple(spending(state))

    # -- work

    def price(self, mechanism: str, config: Config = _NONE, **more: Any) -> ReleasePrice:
        """What a release would cost and count, and what speaks against it. No image is read, and nothing is spent.

        Args:
            mechanism: "ksame", "privimage", ...: see ``release --help``.
            config: its tables as a dictionary, or the TOML file; names of files in a dictionary are relative to the
                folder that this program runs in.
            more: its other options: ``k=5``, ``project="retina"``, ``anew=True``.
        Raises:
            CommandError: an option does not exist or lacks a value.
            ConfigError: the configuration cannot be used; all problems at once.
        """
        with _sentences(), tempfile.TemporaryDirectory() as folder:
            words = _release_words(mechanism, config, more, Path(folder))
            for name, value in vars(self._parsed(words)).items():
                if isinstance(value, Path) and name != "sheet" and not value.exists():
                    raise CommandError(f"{value.name}: no such file")
            told = detach.dry_run(self.home, words, main.carry_out)
        price, samples = told["price"], told["samples"]
        counts = (samples["most"], tuple(samples["shape"]), told["bytes"]["most"])
        return ReleasePrice(price["claim"], price["amount"], price["left"], *counts, read_findings(told))

    def release(self, mechanism: str, config: Config = _NONE, **more: Any) -> SiteJob:
        """Queue a release, after its dry run. It spends within the site's policy, and waits for persons as that says.

        Args:
            mechanism: see :meth:`price`; and so are ``config`` and ``more``.
            config: copied: what you change afterwards does not count.
            more: also ``sheet="FILE"``, the reviewer's page.
        Raises:
            CommandError, ConfigError: see :meth:`price`.
            WouldBeRefusedError: the dry run says no; nothing is queued.
        """
        with _sentences(), tempfile.TemporaryDirectory() as folder:
            words = _release_words(mechanism, config, more, Path(folder))
            return self._queued([*words, f"--out={Path(folder) / 'release'}"])

    def train(self, network: str, config: Config = _NONE, **more: Any) -> SiteJob:
        """Queue the training of a network on public images.

        Args:
            network: "generator", "codebook", ...: see ``train --help``.
            config: its options as a dictionary or a TOML file: ``pictures``, ``side``, ``steps``, ...
            more: the same, which count before those of ``config``.
        Raises:
            CommandError: an option does not exist or lacks a value, or a file is missing.
        """
        with _sentences(), tempfile.TemporaryDirectory() as folder:
            told = config if isinstance(config, Mapping) else _read_toml(Path(config))
            words = ["train", network, *_option_words({**told, **more}), "--json"]
            return self._queued([*words, f"--out={Path(folder) / network}"])

    def jobs(self) -> tuple[JobStatus, ...]:
        """All jobs of the site, by number."""
        return tuple(map(_status, self._ask("jobs/list")["jobs"]))

    def job(self, number: int) -> SiteJob:
        """A job that was queued before, by whomever.

        Raises:
            ServiceRefusedError: there is none of this number.
        """
        self._ask("jobs/show", number=number)
        return SiteJob(self, number)

    # -- how it is asked

    def _queued(self, words: Sequence[str]) -> SiteJob:
        with self._service():  # before a dry run, which takes its time
            pass
        arguments = self._parsed(words)
        typed = ["--home", str(self.home), *words]
        return SiteJob(self, detach.submit(arguments, typed, main.carry_out, self._acts).number)

    def _parsed(self, words: Sequence[str]) -> argparse.Namespace:
        """The command as it would be typed; whatever is wrong with it is said in a sentence."""
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
            try:
                return options.build_parser().parse_args(["--home", str(self.home), *words])
            except SystemExit:
                raise CommandError(said.getvalue().rpartition("error: ")[2].strip() or "no such command") from None

    @contextlib.contextmanager
    def _service(self) -> Iterator[ControlClient]:
        """The running service, over a connection of its own: it may have been started again since the last one."""
        service = connect(self.home)
        if service is None:
            name = self.home.name
            raise NoServiceError(f"no service runs in {name}: start it with `lazaret-agent --home {name} serve`")
        with service:
            yield service

    @contextlib.contextmanager
    def _acts(self) -> Iterator[Acts]:
        with self._service() as service:
            yield lambda act, **given: service.ask(f"/{act}", given)

    def _ask(self, act: str, **given: Any) -> Any:
        with self._acts() as do:
            return do(act, **given)


@dataclass(frozen=True, slots=True)
class SiteJob:
    """A job of a site's service. Every call asks anew."""

    site: Site = field(repr=False)
    number: int

    def status(self) -> JobStatus:
        """How it stands now.

        Raises:
            ServiceRefusedError: it is gone: finished jobs have an age.
        """
        return _status(self.site._ask("jobs/show", number=self.number)["job"])

    def history(self) -> tuple[Event, ...]:
        """Every change of its state: when, why, by whom."""
        return tuple(Event(**one) for one in self.site._ask("jobs/show", number=self.number)["history"])

    def follow(self, every_s: float = 1.0) -> Iterator[JobStatus]:
        """How it stands, again whenever that has changed, until it changes no more by itself.

        For a plain loop, or for ``tqdm``: a bar's ``total`` and ``n`` are ``progress.of`` and ``progress.done`` of a
        stage. If you leave the loop, the job goes on.

        Args:
            every_s: seconds between two looks.
        """
        last = None
        while True:
            status = self.status()
            if status != last:
                yield status
            if status.stopped:
                return
            last = status
            time.sleep(every_s)

    def wait(self, timeout_s: float | None = None, every_s: float = 1.0) -> JobStatus:
        """Wait until it is done, or made and waits for the persons who approve it.

        Args:
            timeout_s: seconds after which to stop waiting; None: as long as it takes. The job goes on.
            every_s: seconds between two looks.
        Returns:
            How it stands: ``done``, ``made``, or as it stood when the time was over.
        Raises:
            JobNotDoneError: it was refused, failed or cancelled, or a person must go on with it.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status.stopped and status.state not in (DONE, MADE):
                why = f": {status.reason}" if status.reason else ""
                raise JobNotDoneError(f"job {self.number} is {status.state}{why}; `retry()` tries again")
            if status.stopped or (until is not None and time.monotonic() >= until):
                return status
            time.sleep(every_s)

    def cancel(self, *, spend: bool = False) -> None:
        """End it; its process may take a few seconds to end.

        Args:
            spend: also where its price has been paid, which is lost then.
        Raises:
            ServiceRefusedError: it has ended, its release is made, or its price is paid.
        """
        self.site._ask("jobs/cancel", number=self.number, by=operator_name(), spend=spend)

    def retry(self) -> SiteJob:
        """Go on with it now, if it is interrupted; or begin a failed one anew, which gives another job.

        Raises:
            ServiceRefusedError: nothing is to be tried again.
        """
        told = self.site._ask("jobs/retry", number=self.number, by=operator_name())
        return SiteJob(self.site, told["number"])

    def fetch(self) -> ReleasedSet | NetworkWeights:
        """What it released, once that has left; or the network that it trained on public images.

        A release that is only made is given to nobody here. Persons may still refuse it, and whoever had fetched it
        could use what may not leave. Reviewers see it in the console or by ``release inspect``.

        Raises:
            JobStateError: it has not left, or the job makes neither.
            SiteStorageError: it has left, and is not kept here any more, as after an opt-out.
        """
        with _sentences():
            from agent.service.job_outputs import read_released  # noqa: PLC0415 - the vault: jobs need none
            from agent.service.ledger_access import BorrowedLedger  # noqa: PLC0415 - as above
            from agent.storage.site_directory import SiteDirectory  # noqa: PLC0415 - as above

            home, store = SiteDirectory(self.site.home), JobStore(self.site.home)
            job = store.read(self.number)
            if job.words[0] == "train":
                return _weights(_trained(store.folder(self.number), self.number))
            raw = read_released(home, job, BorrowedLedger(home).read().state.releases)
            if raw[257:262] != b"ustar":
                return _weights(raw)
            contents, samples = read_samples(BytesSource(raw))
            return ReleasedSet(contents.form, samples, contents.labels, raw)


def _status(told: Mapping[str, Any]) -> JobStatus:
    known = {one.name: told[one.name] for one in fields(JobStatus)}
    known |= {"progress": JobProgress(**told["progress"]), "outputs": tuple(told["outputs"])}
    return JobStatus(**known)


def _trained(folder: Path, number: int) -> bytes:
    """The network that a training wrote last, which says its name when it is complete."""
    try:
        told = json.loads((folder / "stdout").read_text().splitlines()[-1])
        (raw,) = (path.read_bytes() for path in (folder / "out").glob(f"*/{told['file']}"))
    except (OSError, ValueError, IndexError, KeyError):
        raise SiteStorageError(f"job {number} has written no network: `jobs show {number}` tells why") from None
    if hashlib.sha256(raw).hexdigest() != told["sha256"]:
        raise SiteStorageError(f"the network of job {number} was changed since it was trained")
    return raw


def _weights(raw: bytes) -> NetworkWeights:
    import safetensors.numpy  # noqa: PLC0415 - few fetch a network

    return NetworkWeights(safetensors.numpy.load(raw), hashlib.sha256(raw).hexdigest(), raw)


# -- what would be typed


def _release_words(mechanism: str, config: Config, more: Mapping[str, Any], folder: Path) -> list[str]:
    """The words of a release; a configuration of tables is written into ``folder``."""
    words = ["release", mechanism, *_option_words(more)]
    if not isinstance(config, Mapping):
        return [*words, f"--config={Path(config)}"]
    if config:
        path = folder / f"{mechanism}.toml"
        path.write_text("".join(f"{_text(name)} = {_toml(value)}\n" for name, value in config.items()))
        words.append(f"--config={path}")
    return words


def _option_words(told: Mapping[str, Any]) -> list[str]:
    """``k=5`` as ``--k=5``; True as the option alone; False and None as nothing.

    Raises:
        CommandError: the client sets this option itself, or cannot do what it asks for.
    """
    if own := sorted(_OUR_OWN & told.keys()):
        raise CommandError(f"{', '.join(own)}: the client sets this itself, or cannot do it")
    words = []
    for name, value in told.items():
        option = f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            words.append(option if value is True else f"{option}={value}")
    return words


def _read_toml(path: Path) -> Mapping[str, Any]:
    import tomllib  # noqa: PLC0415 - few name a file

    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        raise CommandError(f"{path.name}: not a TOML file that can be read") from None


def _toml(value: Any) -> str:
    """A value as TOML; a text that names a file of the working folder becomes its whole path.

    Raises:
        CommandError: TOML has no such value.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, str | Path):
        kind, colon, file = str(value).rpartition(":")  # a file, or KIND:FILE
        named = detach.names_file(Path.cwd(), file)
        return _text(f"{kind}{colon}{Path(file).absolute()}" if named else str(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(name)} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise CommandError("a configuration holds tables, lists, texts, numbers and true or false")


def _text(value: str) -> str:
    """A text or a key as a basic string: JSON's, but for characters beyond 16 bits and for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """Errors of ours as they are. Of others, and of our own guards, the class alone: a text may hold patient data."""
    try:
        yield
    except OSError as error:
        raise CommandError(error.strerror or type(error).__name__) from None
    except Exception as error:
        if isinstance(error, ServiceFaultError) or (
            isinstance(error, LazaretError) and not isinstance(error, InvariantError)
        ):
            raise
        raise InvariantError(f"internal fault ({type(error).__name__})") from None
