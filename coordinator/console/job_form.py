"""A run as a form: its fields to a job and back, what it would cost, and whether that has changed since. Pure.

The fields are the keys of a job file, and each key of its mechanism's public configuration, so a forecast needs no
JSON by hand. All problems are reported at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from coordinator.explanations import epsilon_at_least, epsilon_text, format_rounded_up, rounded_up
from coordinator.federation.job import (
    APPROVAL_DAYS,
    EPSILON,
    FEDAVG,
    KEYS,
    MASKED,
    PLAIN,
    PRECISION,
    Job,
    JobError,
    LaunchDecision,
    SiteCost,
)
from policies.accounting.claims import RELATION, UNIT
from policies.tasks.bounds import TaskError
from policies.tasks.task import task_from_json, task_from_toml
from protos.common.canonical_json import canonical, json_object
from protos.common.errors import ConfigError
from protos.federation import round_times

MOST_JOB: Final = 1 << 20  # bytes of a job file
_NEEDED: Final = frozenset({"mechanism", "config", "parameters", "sites", "rounds", "min_sites"})
_TIMES: Final[Mapping[str, int]] = MappingProxyType(
    {"round_seconds": round_times.DEFAULT_S, "approval_days": APPROVAL_DAYS, "wait_seconds": 0}
)
# may be left out of a job file
_MORE: Final = frozenset({"strategy", "all_or_none", "secure", "evaluate", "required_sites", *_TIMES})


class JobFormError(ConfigError, ValueError):
    """The form makes no job; every problem is in the tuple."""

    def __init__(self, problems: Iterable[str]) -> None:
        """Keep the problems."""
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, slots=True)
class FormField:
    """One input of the form."""

    name: str
    label: str
    help: str
    value: str
    required: bool = True


# label, help; in the order in which people think of them
_HELP: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "task": ("Task", "the text of the task file, which `lazaret-agent task check` has accepted"),
        "epsilon": ("Price of the run", "epsilon for each patient; the noise is found for it"),
        "noise_multiplier": (
            "Noise multiplier",
            "instead of a price: the noise's standard deviation, in bounds on one patient's part",
        ),
        "update_precision": ("Precision of updates", "bfloat16, or float32 for twice the bytes; nothing: bfloat16"),
        "sites": ("Sites that share the noise", "as many as take part"),
        "honest": ("Honest sites", "this number must keep their noise secret for the guarantee to hold"),
        "value_bound": ("Bound on a value", "of one element of an update, before it is masked"),
        "scale": ("Scale", "bits after the point in the masked sum"),
        "ring_bits": ("Ring", "bits of the masked sum's elements"),
    }
)
# The looks at a model, which a run need not have: label, help.
_LOOKS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "evaluate": ("Look after rounds", "a JSON list of rounds, the last one among them; nothing: no looks"),
        "config.evaluate": ("Price of the looks", "a JSON object with looks, noise, held_out and bins; or nothing"),
    }
)
_NUMBERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "parameters": "Length of the model",
        "rounds": "Rounds",
        "min_sites": "Fewest hospitals",
        "round_seconds": "Seconds of a round",
        "approval_days": "Days to approve the run",
        "wait_seconds": "Seconds to wait for a silent hospital",
    }
)
NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        PLAIN: "Every site adds its own noise; the coordinator sees each site's noisy update",
        MASKED: "Sites share the noise; the coordinator sees only the sum of all updates",
    }
)
_DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{"rounds": "", "min_sites": "", "parameters": "", "run": "", "strategy": FEDAVG},
        **{name: str(unsaid) for name, unsaid in _TIMES.items()},
    }
)


def blank(mechanism: str, sites: Sequence[str]) -> dict[str, str]:
    """An empty form for a mechanism, every enrolled site ticked."""
    config = {f"config.{key}": "" for key in _fields(mechanism)}
    return {**_DEFAULTS, "mechanism": mechanism, **config, **{f"site.{site}": "on" for site in sites}}


def _fields(mechanism: str) -> list[str]:
    """The keys of the configuration that a person fills in, in their order: the job's length is asked for once."""
    return [key for key in _HELP if key in {EPSILON, *KEYS[mechanism]}]


def inputs(values: Mapping[str, str]) -> list[FormField]:
    """The fields of the mechanism's public configuration, filled."""
    named = [(key, *_HELP[key]) for key in _fields(values["mechanism"])]
    instead = (EPSILON, "noise_multiplier", PRECISION)  # one of the first two; the third may be left out
    own = [
        FormField(f"config.{key}", label, text, values.get(f"config.{key}", ""), key not in instead)
        for key, label, text in named
    ]
    return own + [FormField(name, *told, values.get(name, ""), required=False) for name, told in _LOOKS.items()]


def from_job(job: Job) -> dict[str, str]:
    """A job's form."""
    config = json.loads(job.config)
    filled = {f"config.{key}": _typed(value) for key, value in config.items() if key != "parameters"}
    return {
        "run": job.run,
        "mechanism": job.mechanism,
        "parameters": str(job.parameters),
        "rounds": str(job.rounds),
        "min_sites": str(job.min_sites),
        "strategy": job.strategy,
        **{name: str(getattr(job, name)) for name in _TIMES},
        **({"all_or_none": "on"} if job.all_or_none else {}),
        **({"evaluate": _typed(list(job.evaluate))} if job.evaluate else {}),
        **filled,
        **{f"site.{site}": "on" for site in job.sites},
        **{f"required.{site}": "on" for site in job.required_sites},
    }


def from_file(raw: bytes, run: str = "") -> dict[str, str]:
    """The form of a job file, as ``round launch`` takes it; what its values mean is checked with the form.

    Raises:
        JobFormError: not a job file.
    """
    try:
        values = json_object(raw.decode()) if len(raw) <= MOST_JOB else {}
    except ValueError:
        values = {}
    lacking = sorted(_NEEDED - values.keys())
    unknown = sorted(values.keys() - _NEEDED - _MORE)
    wrong = [f"the job file lacks {', '.join(lacking)}"] if lacking else []
    wrong += [f"the job file has the unknown keys {', '.join(key[:40] for key in unknown)}"] if unknown else []
    if wrong:
        raise JobFormError(wrong)
    mechanism, config = values["mechanism"], values["config"]
    sites, required = (values.get(name, []) for name in ("sites", "required_sites"))
    lists = isinstance(sites, list) and isinstance(required, list)
    if mechanism not in KEYS or not isinstance(config, dict) or not lists:
        raise JobFormError([f"the job file: mechanism is one of {', '.join(KEYS)}, config an object, sites lists"])
    out = {name: _typed(values[name]) for name in ("parameters", "rounds", "min_sites")}
    out |= {"run": run, "mechanism": mechanism, "strategy": json.dumps(values.get("strategy", json.loads(FEDAVG)))}
    out |= {"all_or_none": "on"} if values.get("all_or_none") is True else {}
    out |= {name: _typed(values.get(name, unsaid)) for name, unsaid in _TIMES.items()}
    if isinstance(config.get("task"), str):
        raise JobFormError(
            [f"the job file names the task file {config['task'][:40]}: put its text into the field Task"]
        )
    out |= {"evaluate": _typed(values["evaluate"])} if values.get("evaluate") else {}
    known = {*_fields(mechanism), "evaluate"}
    out |= {f"config.{key}": _typed(value) for key, value in config.items() if key in known}
    out |= {f"required.{site}": "on" for site in required if isinstance(site, str)}
    return out | {f"site.{site}": "on" for site in sites if isinstance(site, str)}


def job_of(form: Mapping[str, str]) -> Job:
    """The job that a form asks for.

    Raises:
        JobFormError: every problem at once: those of the single fields, or else those of the job as a whole.
    """
    mechanism, wrong = form.get("mechanism", ""), list[str]()
    if mechanism not in KEYS:
        raise JobFormError([f"mechanism: one of {', '.join(KEYS)}"])

    def read(name: str, label: str, of: Callable[[str], Any]) -> Any:
        try:
            return of(form.get(name, _DEFAULTS.get(name, "")).strip())
        except TaskError as fault:
            wrong.extend(f"{label}: {problem}" for problem in fault.problems)
        except ValueError as fault:
            wrong.append(f"{label}: {fault}")
        return None

    kinds = {**KEYS[mechanism], EPSILON: float}
    price = EPSILON if _given(form, EPSILON) else "noise_multiplier"
    unsaid = {EPSILON, "noise_multiplier"} - {price} | {key for key in (PRECISION,) if not _given(form, key)}
    asked = [key for key in _fields(mechanism) if key not in unsaid]
    if price == EPSILON and _given(form, "noise_multiplier"):
        wrong.append("Price of the run: leave the noise multiplier empty, it is found")
    config = {key: read(f"config.{key}", _HELP[key][0], _READ[kinds[key]]) for key in asked}
    numbers = {name: read(name, label, _whole) for name, label in _NUMBERS.items()}
    config["parameters"] = numbers["parameters"]
    named = [name for name in _LOOKS if form.get(name, "").strip()]
    found = {name: read(name, _LOOKS[name][0], _list if name == "evaluate" else _object) for name in named}
    looks = found.pop("evaluate", [])
    config |= {name.removeprefix("config."): value for name, value in found.items()}
    try:
        strategy = canonical(json_object(form.get("strategy", ""))).decode()
    except ValueError:
        wrong.append("strategy: a JSON object, such as " + FEDAVG)
        strategy = ""
    if wrong:
        raise JobFormError(wrong)
    try:
        return Job(
            run=form.get("run", "").strip(),
            mechanism=mechanism,
            config=json.dumps(config, sort_keys=True, allow_nan=False),
            sites=_ticked(form, "site."),
            required_sites=_ticked(form, "required."),
            strategy=strategy,
            all_or_none="all_or_none" in form,
            secure=mechanism == MASKED,
            evaluate=tuple(looks),
            **numbers,
        )
    except JobError as fault:
        raise JobFormError(str(fault).removeprefix("the job needs ").split("; ")) from None


def _ticked(form: Mapping[str, str], before: str) -> tuple[str, ...]:
    return tuple(sorted(key.removeprefix(before) for key in form if key.startswith(before)))


def _given(form: Mapping[str, str], key: str) -> bool:
    """Whether something stands in the field of a key of the configuration."""
    return bool(form.get(f"config.{key}", "").strip())


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ValueError("a whole number")
    return int(text)


def _real(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("a number, such as 0.25")
    return number


def _task(text: str) -> dict[str, Any]:
    """The tables of a task file, or of a task's JSON."""
    return dict((task_from_json(text) if text.startswith("{") else task_from_toml(text, "")).to_table())


def _list(text: str) -> list[Any]:
    try:
        read = json_object(f'{{"list": {text or "null"}}}')
    except ValueError:
        read = {}
    found = read.get("list")
    if len(read) != 1 or not isinstance(found, list):
        raise ValueError("a JSON list, such as [4, 8]")
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        return json_object(text)
    except ValueError:
        raise ValueError("a JSON object") from None


_READ: Final[Mapping[type, Callable[[str], Any]]] = MappingProxyType(
    {int: _whole, float: _real, str: str, dict: _task}
)


def _typed(value: object) -> str:
    """A value as a person would type it."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class SiteForecast:
    """One line of a forecast."""

    site: str
    fits: bool
    epsilon: str  # of the run, rounded up; "" when it cannot be told
    delta: str
    left: str  # the largest epsilon that one more run could have, rounded down
    share: float | None  # of what is left, in percent; None: nothing is left
    reason: str


def costs_of(costs: Sequence[SiteCost]) -> list[SiteForecast]:
    """A forecast as people read it: what is taken is rounded up, what is left is rounded down."""
    return [
        SiteForecast(
            c.site,
            c.fits,
            epsilon_text(c.epsilon) if c.epsilon else "",
            format_rounded_up(c.delta) if c.delta else "",
            epsilon_at_least(c.left_epsilon) if c.left_epsilon else "",
            rounded_up(100 * c.amount / c.left, 1) if c.left > 0 else None,
            c.reason,
        )
        for c in costs
    ]


def forecast_digest(costs: Sequence[SiteCost], decision: LaunchDecision) -> str:
    """A digest of the forecast that a person has seen: the participants and the price.

    A launch sends it back. If it has changed by then, nothing is launched, and the person sees the new forecast
    first.
    """
    told = [[c.site, c.fits, str(c.amount), c.epsilon, c.delta] for c in costs]
    value: Any = [decision.go, list(decision.sites), told]
    return hashlib.sha256(canonical(value)).hexdigest()


def priced_as() -> str:
    """What every epsilon on the page means nothing without."""
    assert (UNIT, RELATION) == ("patient", "add-or-remove-one"), "the sentence below says so"
    return "epsilon per patient, neighbours differ by one patient added or removed"
