"""A RAG application over a user's files: index them into a collection, and ask it questions."""
