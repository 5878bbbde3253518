"""Fuzzing of every parser of the law: targets, seeds, mutations, and the command ``python -m tests.fuzz``."""
