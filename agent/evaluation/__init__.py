"""Evaluation of a synthetic set: fidelity, utility, information loss. Every figure names its measuring network."""
