"""What users rely on, tested through public names alone, so that it outlives any redesign.

``names.py`` lists those names. The values asserted here do not change; where a name goes by design,
only the call changes.
"""
