"""What travels between an engine and the connector, in a request's ``kv_transfer_params``."""
