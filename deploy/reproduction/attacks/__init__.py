"""Attacks on synthetic sets, as an adversary would run them; each prints what chance alone would reach."""
