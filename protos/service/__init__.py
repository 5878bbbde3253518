"""The control socket by which commands reach the service that is running on this machine; for both sides."""
