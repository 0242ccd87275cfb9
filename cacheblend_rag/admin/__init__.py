"""Administers stores: selects, inspects, exports, imports and warms chunks."""
