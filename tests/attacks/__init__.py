"""What an attacker sends through the real ports, and what must come of it: refused, written down."""
