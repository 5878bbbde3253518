"""Processes killed, lines cut, disks filled in the middle of federated rounds; see ``python -m tests.faults``."""
