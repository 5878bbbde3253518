"""The site console: pages for people at the hospital, on its own network only."""
