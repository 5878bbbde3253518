"""The papers' tables again, on the papers' data sets where somebody has them, and on phantoms in the same layout."""
