"""What pytest should know of the tree: ``support`` holds helpers and programs that tests start, and no tests."""

collect_ignore_glob = ["support/*"]
