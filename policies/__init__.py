"""The law and its books: what may leave, what it costs, and a ledger that cannot be rewritten unseen."""
