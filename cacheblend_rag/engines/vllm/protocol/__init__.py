"""The messages between an engine and the connector, in a request's ``kv_transfer_params``.

A job is sent with a request, a result comes back with the request's last output.
"""
