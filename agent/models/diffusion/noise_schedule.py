"""The noise of a latent diffusion model: MONAI's schedule, and its DDIM and PNDM steps at times that fit them.

Ho, Jain & Abbeel 2020 (DDPM, arXiv 2006.11239), Eq. 4; Rombach et al. 2022 (latent diffusion, arXiv 2112.10752);
Salimans & Ho 2022 (v, arXiv 2202.00512), Appendix D; Song, Meng & Ermon 2020 (DDIM, arXiv 2010.02502), Eq. 12; Liu,
Ren, Lin & Zhao 2022 (PNDM, arXiv 2202.09778), Eq. 9 and 13.

MONAI 1.6 steps from t to t - T / n, but visits other times: DDIM's are (T - 1) / (n - 1) apart, so that every step
removes less noise than there is, and noise remains; PNDM's lack the second visit of its second time, so that all
later steps are one step off. Here both visit the times of their steps: T - T / n, ..., T / n, 0, and then no noise at
all. For latents of standard deviation 1 a sixtieth is left at the first of 20 times; a last step from T / n would
cost more: it paints with the mean of what is possible. Latents are never clipped: unlike images, they have no bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

Prediction = Literal["v", "epsilon"]  # what the network says: the noise, or sqrt(abar) noise - sqrt(1 - abar) latents
Sampler = Literal["ddim", "pndm"]
Predict = Callable[[Tensor, int], Tensor]  # (z_t (n, ...), t) -> v or epsilon, like z_t

TIMES: Final = 1000  # T
BETAS: Final = (0.0015, 0.0205)  # of the first and the last time; the root is linear (MONAI's chest radiograph model)
_NAMES: Final[dict[Prediction, str]] = {"v": "v_prediction", "epsilon": "epsilon"}


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a network is asked for latents: public, and part of a released model."""

    prediction: Prediction = "v"
    sampler: Sampler = "pndm"
    steps: int = 50  # evaluations of the network, a divisor of ``TIMES``; of PNDM one more
    guidance: float = 1.0  # 1: the plain conditional model; above, away from no condition

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn, all of it at once."""
        good = {
            "prediction": self.prediction in get_args(Prediction),
            "sampler": self.sampler in get_args(Sampler),
            f"steps (a divisor of {TIMES})": type(self.steps) is int and self.steps >= 2 and TIMES % self.steps == 0,
            "guidance": type(self.guidance) in (int, float) and 0.0 <= self.guidance < 100.0,
        }
        if wrong := [name for name, fine in good.items() if not fine]:
            raise ValueError(f"not usable for drawing: {', '.join(wrong)}")

    @property
    def times(self) -> tuple[int, ...]:
        """(steps,), from T - T / steps down to 0; the level after the last is no noise at all."""
        apart = TIMES // self.steps
        return tuple(range(TIMES - apart, -1, -apart))


def _kept() -> Tensor:
    """(T,) float32: abar, the share of the latents' variance in z_t (DDPM, Eq. 4)."""
    found: Tensor = _scheduler("epsilon").alphas_cumprod
    return found


def _scheduler(prediction: Prediction, sampler: Sampler | None = None) -> Any:
    """MONAI's schedule without a sampler, or one for a single run: PNDM's remembers where it is."""
    # two seconds, and every process of an agent would pay them
    from monai.networks.schedulers.ddim import DDIMScheduler  # noqa: PLC0415
    from monai.networks.schedulers.ddpm import DDPMScheduler  # noqa: PLC0415
    from monai.networks.schedulers.pndm import PNDMScheduler  # noqa: PLC0415

    schedule: dict[str, Any] = {
        "num_train_timesteps": TIMES,
        "schedule": "scaled_linear_beta",
        "beta_start": BETAS[0],
        "beta_end": BETAS[1],
    }
    told = schedule | {"prediction_type": _NAMES[prediction]}
    if sampler == "ddim":
        return DDIMScheduler(**told, clip_sample=False, set_alpha_to_one=True)
    if sampler == "pndm":
        return PNDMScheduler(**told, skip_prk_steps=True, set_alpha_to_one=True)
    return DDPMScheduler(**told, clip_sample=False)


class Noising:
    """The noise that training adds to latents, and the network's target."""

    def __init__(self, prediction: Prediction) -> None:
        """Make MONAI's schedule."""
        self._prediction = prediction
        self._own = _scheduler(prediction)

    def noised(self, z: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """z_t = sqrt(abar_t) z + sqrt(1 - abar_t) noise.

        Args:
            z: (n, c, h, w) latents.
            t: (n,) int64, 0 .. T - 1.
            noise: (n, c, h, w) standard normal.
        Returns:
            (n, c, h, w).
        """
        out: Tensor = self._own.add_noise(z, noise, t)
        return out

    def target(self, z: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """The noise, or v = sqrt(abar_t) noise - sqrt(1 - abar_t) z; arguments and result as of :meth:`noised`."""
        out: Tensor = noise if self._prediction == "epsilon" else self._own.get_velocity(z, noise, t)
        return out


@torch.no_grad()
def denoised(predict: Predict, z: Tensor, drawing: Drawing) -> Tensor:
    """Latents without noise from nothing but noise; deterministic.

    Args:
        predict: v or epsilon, as ``drawing.prediction`` says.
        z: (n, ...) float32, standard normal.
        drawing: public.
    Returns:
        (n, ...) float32.
    """
    times = drawing.times
    if drawing.sampler == "ddim":
        scheduler = _scheduler(drawing.prediction, "ddim")
        scheduler.set_timesteps(drawing.steps)  # how far a step goes; its times are ours
        for t in times:
            z, _ = scheduler.step(predict(z, t), t, z)
        return z
    # PNDM combines what was said at different times: epsilon means the same at all of them, v does not
    scheduler, abar = _scheduler("epsilon", "pndm"), _kept()
    scheduler.set_timesteps(drawing.steps)
    for t in (*times[:2], *times[1:]):  # its first step is taken twice: Euler, then with the mean of both ends
        said = predict(z, t)
        epsilon = said if drawing.prediction == "epsilon" else abar[t].sqrt() * said + (1.0 - abar[t]).sqrt() * z
        z, _ = scheduler.step(epsilon, t, z)
    return z
