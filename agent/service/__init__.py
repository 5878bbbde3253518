"""What a site's running service does for commands and pages: short work on its ledger, vault and coordinator."""
