"""The torture set: files with planted identifiers, the scores, and the same for other anonymisers."""
