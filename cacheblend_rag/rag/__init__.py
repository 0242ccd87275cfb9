"""An application over one's own files: a collection, made by indexing, asked by retrieval."""
