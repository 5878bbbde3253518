"""Code of both consoles: logins, permissions of pages, and layout."""
