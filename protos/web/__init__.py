"""What both consoles share: who is logged in, what a page may do, how it looks."""
