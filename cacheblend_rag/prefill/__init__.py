"""Lead-ins, precomputing of chunks, and the blending of a prompt with stored chunks."""
