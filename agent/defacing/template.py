"""The MNI152 template, the program that registers to it, and brain masks that other programs made.

The template is Fonov's ICBM 2009a symmetric one as nilearn's wheel carries it: a T1 without skull, grey and white
matter. It is read as files of that package; nilearn itself is not imported.

niimath (BSD-2-Clause) registers, as a separate program. Both volumes are in unnamed memory (memfd) that disappears
with its last reader: no patient data reaches a disk, whichever process is killed. The moving volume is its standard
input (from a pipe it sometimes reads too little, seen on a busy machine). The fixed one is behind a symbolic link
into ``/proc``, since niimath opens only names that end in ``.nii``; a killed agent leaves only that link, in its own
folder. The matrix comes back through a pipe. The program may write no file; memory and time are limited.
"""

# mypy: disable-error-code="no-untyped-call"
# nibabel has no annotations
from __future__ import annotations

import gzip
import importlib.util
import json
import os
import resource
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import nibabel
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from agent.defacing.brain_extraction import Atlas
from agent.domain import Volume
from agent.volumes.errors import NotDefacedError
from agent.volumes.grid import averaged, spacing

_FILE: Final = "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"
_CLOSE_MM: Final = 8.0  # the folds of the cortex and the ventricles belong to the mask
_GRID_MM: Final = 2.0  # the finest stage of niimath's registration
_MEMORY: Final = 2 << 30
_CPU_SECONDS: Final = 120  # a head takes four
_SECONDS: Final = 900.0  # on a machine that has other work
_ANSWER: Final = 1 << 16  # bytes of a matrix: it fits into the buffer of a pipe
_SCALE: Final = (0.6, 1.6)  # heads, beside the template: beyond that it is no head or no registration
_SAME: Final = 0.05  # by which two series of one head may differ in size: more, and they were not aligned


def atlas() -> Atlas:
    """MNI152 on its 1 mm grid.

    Raises:
        FileNotFoundError, ModuleNotFoundError: the package ``nilearn`` is not installed as expected.
    """
    t1, affine = _packaged("t1")
    grey, _ = _packaged("gm")
    white, _ = _packaged("wm")
    tissue = grey.astype(np.uint16) + white > 127
    margin = int(_CLOSE_MM) + 2
    (box,) = ndimage.find_objects(tissue.astype(np.uint8))
    padded = np.pad(tissue[box], margin)
    wide = ndimage.distance_transform_edt(~padded) <= _CLOSE_MM
    closed = (ndimage.distance_transform_edt(wide) > _CLOSE_MM)[margin:-margin, margin:-margin, margin:-margin]
    tissue[box] |= closed
    return Atlas(t1, np.asarray(ndimage.binary_fill_holes(tissue), bool), affine)


def _packaged(name: str) -> tuple[NDArray[Any], NDArray[np.float64]]:
    package = importlib.util.find_spec("nilearn")  # found, not imported: that would take seconds
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("nilearn, which carries the template, is not installed")
    raw = Path(package.submodule_search_locations[0], "datasets", "data", _FILE.format(name)).read_bytes()
    image = nibabel.Nifti1Image.from_bytes(gzip.decompress(raw))
    return np.asarray(image.dataobj), np.asarray(image.affine, np.float64)


def register(volume: Volume, template: Atlas) -> NDArray[np.float64]:
    """Twelve degrees of freedom, (4, 4), RAS+ mm of the volume to mm of the template.

    Raises:
        NotDefacedError: ``not_registered``.
    """
    return _Niimath().aligned(_coarse(volume), Volume(template.values, template.affine))


def rigid(moving: Volume, fixed: Volume) -> NDArray[np.float64]:
    """Six degrees of freedom, (4, 4), mm of ``moving`` to mm of ``fixed``: two series of one head.

    niimath's fast engine knows twelve only. The rotation is the closest to its matrix, and the head's centre goes
    where the matrix takes it.

    Raises:
        NotDefacedError: ``not_registered``; ``other_frame``, the two differ in size or shape, so they are not one
        head.
    """
    coarse = _coarse(moving)
    affine = _Niimath().aligned(coarse, _coarse(fixed))
    u, stretch, vt = np.linalg.svd(affine[:3, :3])
    if not bool(np.abs(stretch - 1).max() <= _SAME):
        raise NotDefacedError("other_frame")
    mass = np.maximum(coarse.values - np.percentile(coarse.values, 50), 0)
    centre = coarse.affine @ np.array([*ndimage.center_of_mass(mass), 1.0])
    turned = np.eye(4)
    turned[:3, :3] = u @ vt
    turned[:3, 3] = (affine @ centre)[:3] - turned[:3, :3] @ centre[:3]
    return turned


def _coarse(volume: Volume) -> Volume:
    """At 2 mm, without the brightest thousandth, from zero: what the registration sees."""
    edges = spacing(volume.affine)
    i, j, k = (max(1, int(np.ceil(n))) for n in edges * volume.values.shape / _GRID_MM)
    grid = volume.affine @ np.diag([*(_GRID_MM / edges), 1.0])
    grid[:3, 3] += volume.affine[:3, :3] @ ((_GRID_MM / edges - 1) / 2)
    values = averaged(volume.values, volume.affine, (i, j, k), grid, fill=float(volume.values.min()))
    low, high = float(values.min()), float(np.percentile(values, 99.9))
    return Volume(np.clip(values, low, max(high, low)) - np.float32(low), grid)


@dataclass(frozen=True, slots=True)
class _Niimath:
    program: str = ""  # "": the one of the package
    seconds: float = _SECONDS
    cpu_seconds: int = _CPU_SECONDS

    def aligned(self, moving: Volume, fixed: Volume) -> NDArray[np.float64]:
        """(4, 4), mm of ``moving`` to mm of ``fixed``."""
        try:
            answer = self._answer(_nifti(moving), _nifti(fixed))
            matrix = np.array(json.loads(answer)["moving_to_fixed"], np.float64)
        except (OSError, ValueError, KeyError, TypeError, ImportError, subprocess.SubprocessError):
            raise NotDefacedError("not_registered") from None
        if matrix.shape != (4, 4) or not bool(np.isfinite(matrix).all()) or not np.linalg.det(matrix[:3, :3]) > 0:
            raise NotDefacedError("not_registered")
        scale = np.linalg.svd(matrix[:3, :3], compute_uv=False)
        if not (scale.min() >= _SCALE[0] and scale.max() <= _SCALE[1]):
            raise NotDefacedError("not_registered")
        return matrix

    def _answer(self, moving: bytes, fixed: bytes) -> bytes:
        program = self.program or _bundled()
        still, moves = _unnamed(fixed), _unnamed(moving)
        out, into = os.pipe()
        try:
            with tempfile.TemporaryDirectory(prefix="lazaret-") as folder:
                link = Path(folder, "fixed.nii")
                link.symlink_to(f"/proc/self/fd/{still}")
                command = [program, "-", "-allineate", str(link), "-final", "NN"]
                command += ["-savemat", f"/proc/self/fd/{into}", "-"]
                self._run(command, moves, (still, into))
            os.set_blocking(out, False)
            return os.read(out, _ANSWER)
        finally:
            for descriptor in (still, moves, out, into):
                os.close(descriptor)

    def _run(self, command: list[str], moving: int, keep: tuple[int, ...]) -> None:
        with subprocess.Popen(  # noqa: S603 - the program of an installed package, without a shell
            command,
            stdin=moving,
            stdout=subprocess.DEVNULL,  # the resliced volume, which nobody needs
            stderr=subprocess.DEVNULL,
            pass_fds=keep,
            cwd="/",
            env={"OMP_NUM_THREADS": "1", "LANG": "C.UTF-8", "PATH": os.defpath},
        ) as process:
            try:
                resource.prlimit(process.pid, resource.RLIMIT_AS, (_MEMORY, _MEMORY))
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
                most = (self.cpu_seconds, self.cpu_seconds)  # it ends by itself if the agent was killed
                resource.prlimit(process.pid, resource.RLIMIT_CPU, most)
                process.wait(timeout=self.seconds)
            except ProcessLookupError:
                process.wait()  # it failed before it could be bound
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            raise subprocess.SubprocessError("niimath failed")


def _unnamed(data: bytes) -> int:
    """A descriptor of memory that no file system shows and that is gone with its last reader."""
    descriptor = os.memfd_create("lazaret", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as stream:
        stream.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _bundled() -> str:
    """Where the package has its program. It is found and not imported: importing marks it as executable."""
    package = importlib.util.find_spec("niimath")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("niimath is not installed")
    return str(Path(package.submodule_search_locations[0], "bin", "niimath"))


def _nifti(volume: Volume) -> bytes:
    image = nibabel.Nifti1Image(volume.values, volume.affine)
    return bytes(image.to_bytes())
