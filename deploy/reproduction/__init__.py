"""Reproduce the papers' tables and figures, on their data sets or on phantoms in the same layout."""
