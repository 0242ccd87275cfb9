"""ASGI middleware in front of both servers: checks keys, hosts and bodies of requests."""
