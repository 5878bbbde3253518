"""Where the commands of the coordinator print."""

from rich.console import Console

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print a line for people. It is not broken, since some are copied."""
    OUT.print(text, markup=False, soft_wrap=True)


def print_stderr(text: str) -> None:
    """The same, where standard output is for a machine."""
    ERR.print(text, markup=False, soft_wrap=True)
