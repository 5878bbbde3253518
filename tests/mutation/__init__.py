"""Mutation testing of the law: ``python -m tests.mutation``."""
