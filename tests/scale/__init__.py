"""How much one coordinator carries: many real agents at once, and many virtual sites in one simulated run."""
