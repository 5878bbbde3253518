"""Made-up patients and images, of nobody: for the demo, the papers' tables and the tests."""
