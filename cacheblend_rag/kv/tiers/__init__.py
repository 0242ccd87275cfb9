"""The tiers of a store, one file each, fastest first."""
