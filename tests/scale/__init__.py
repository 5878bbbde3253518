"""How much one coordinator carries: many real agents at once."""
