"""One module for each form: what turns the form before into it. Alembic finds them by their file names."""
