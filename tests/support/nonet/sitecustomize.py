"""For every Python process with this directory on its path: nothing may leave loopback; attempts are noted."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "flower"))
from loopback import guard

guard(Path(os.environ["LAZARET_TEST_CONNECTIONS"]))
