"""From one form of a ledger's database to the next, by Alembic; nothing of it is imported to open a ledger."""
