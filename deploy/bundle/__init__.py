"""The offline bundle: what a hospital installs from, made and signed by whoever publishes it."""
