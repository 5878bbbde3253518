"""What pytest should know of the tree: ``support`` holds helpers and programs that tests start, and no tests."""

from hypothesis import settings

collect_ignore_glob = ["support/*"]

# No test is timed: a busy machine must not turn one red.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Programs that tests and benchmarks start: they read their settings when they are imported.
collect_ignore = ["benchmarks/roles.py", "scale/agents.py", "scale/simulated.py"]
