"""From one form of a ledger's database to the next; nothing of it is imported to open a ledger."""
