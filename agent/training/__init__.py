"""Training of networks on public or made pictures. No patient's picture ever comes here (design P6)."""
