"""The networks that a task may name, built and cut at what is trained: nothing received is ever run."""

from agent.models.networks.trainable import TrainableNetwork, build

__all__ = ["TrainableNetwork", "build"]
