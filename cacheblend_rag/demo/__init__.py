"""A sample of real passages, with questions."""
