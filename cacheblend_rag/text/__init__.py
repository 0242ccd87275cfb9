"""What prompts are made of: chunks, the registries that find them, prompts and their tokens."""
