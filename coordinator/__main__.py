"""``python -m coordinator``."""

from coordinator.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
