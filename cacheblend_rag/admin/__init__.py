"""Administration of stores and collections: select, inspect, move, warm."""
