"""The process of one job: bounds itself, then runs the command that the record names, as it was typed.

``python -m agent.cli.job_process HOME NUMBER PARENT``. It imports nothing large before the bounds hold. Images
come first at a hospital, so it takes what the receiver leaves: nice 10, batch scheduling, idle disk access, and all
processors but one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.service.jobs import BUSY, PREDICTION, TRAINING, Job, JobStore
from protos.common.durable_files import replace_file
from protos.operations.confinement import end_with
from protos.operations.process_bounds import bound

if TYPE_CHECKING:
    import argparse

_EVERY_S: Final = 1.0


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process runs this job; nobody else does meanwhile."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(handle)


class _Told:
    """Writes progress down, once a second at most within a stage."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("a", buffering=1)
        self._last, self._at = "", 0.0

    def __call__(self, step: str, detail: str, done: int, of: int) -> None:
        now = time.time()
        if step == self._last and now < self._at + _EVERY_S and (done < of or not of):
            return
        self._last, self._at = step, now
        with contextlib.suppress(OSError):  # a full disk stops no training on account of its progress
            self._out.write(
                json.dumps({"at": round(now, 3), "step": step, "detail": detail, "done": done, "of": of}) + "\n"
            )


def run(store: JobStore, job: Job, send: Sequence[str]) -> int:
    """Run the job's command; its exit status.

    Args:
        store: of the site's jobs.
        job: as its record has it.
        send: the command that takes its place where the release is made already; empty: none.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is in hand is put down
    try:
        return _carry_out(store, job, list(send or job.words))
    except KeyboardInterrupt:
        return -signal.SIGTERM
    except MemoryError:
        sys.stderr.write("refused: memory ran out: raise memory_gib in jobs.toml, or take smaller batches\n")
        return 70
    except Exception as error:  # noqa: BLE001 - no text of it, which may quote anything
        sys.stderr.write(f"stopped: internal fault ({type(error).__name__})\n")
        return 70


def _carry_out(store: JobStore, job: Job, words: Sequence[str]) -> int:
    from agent.cli import main, options, output  # noqa: PLC0415 - rich, and what it brings: the bounds come first
    from agent.release.maker_process import MakerEndedError  # noqa: PLC0415 - as above
    from agent.service.job_outputs import output_names, seal_outputs  # noqa: PLC0415 - as above
    from agent.service.making_lock import MakingBusyError  # noqa: PLC0415 - as above
    from agent.service.prediction_jobs import prepare  # noqa: PLC0415 - as above
    from agent.storage import projects  # noqa: PLC0415 - as above
    from agent.storage.site_directory import SiteDirectory  # noqa: PLC0415 - as above
    from protos.common.errors import LazaretError, is_transient, out_of_memory  # noqa: PLC0415 - as above
    from protos.operations.command_line import run_main  # noqa: PLC0415 - as above

    home = SiteDirectory(store.root.parent)
    gone = projects.opted_out(home) if output_names(job) and job.lane != TRAINING else frozenset()
    folder, exhausted = store.folder(job.number), list[MemoryError]()
    output.LISTENERS.append(_Told(folder / "said.jsonl"))

    def carry_out(arguments: argparse.Namespace) -> int:
        arguments.grant = job.grant
        try:
            if job.lane == PREDICTION:
                prepare(home, folder, job, arguments)
            return main.carry_out(arguments)
        except MakerEndedError as error:  # this process ends as that one did, and is counted so
            output.print_stderr(f"refused: {error}")
            return -error.number
        except (LazaretError, OSError) as error:
            if not isinstance(error, MakingBusyError) and not is_transient(error):
                raise
            output.print_stderr(f"refused: {error.strerror if isinstance(error, OSError) else error}")
            return BUSY
        except Exception as error:  # of the command itself; a making has a sentence of its own
            if not out_of_memory(error):
                raise
            exhausted.append(MemoryError())
            return 70
        finally:
            seal_outputs(home, store, job, gone)

    status = run_main(options.build_parser(), carry_out, ["--home", str(store.root.parent), *words])
    if exhausted:
        raise MemoryError
    return status


def main(words: Sequence[str]) -> int:
    """Bound this process, run the job, and write down how it ended."""
    home, number, parent = Path(words[0]), int(words[1]), int(words[2])
    end_with(parent)
    store = JobStore(home)
    with _alone(store.folder(number)) as alone:
        if not alone:
            return BUSY
        job = store.read(number)
        bound(int(os.environ.get("LAZARET_JOB_MEMORY", "0")))
        status = run(store, job, words[3:])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its end is written down, whoever wants it now
        sys.stdout.flush()
        end: dict[str, Any] = {"status": status, "attempt": job.attempts}
        with contextlib.suppress(OSError):  # then how it ended is asked of the ledger
            replace_file(store.folder(number) / "end.json", json.dumps(end).encode(), 0o600)
        if status < 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
