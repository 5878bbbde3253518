"""Review rules and ledger: what may leave, its privacy cost, and a tamper-evident record."""
