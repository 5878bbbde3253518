"""The coordinator of a federation: it reviews what the sites send, then aggregates it."""
