"""Reports and certificates of the ledger, each as data first, then as a page, a PDF or JSON. Pure."""
