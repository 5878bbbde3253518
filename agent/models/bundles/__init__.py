"""MONAI bundles: a foreign one becomes a draft of a task, a finished model becomes one. Neither is ever run here."""
