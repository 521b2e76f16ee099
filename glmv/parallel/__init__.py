"""Ranks, meshes and sharding: everything that knows there is more than one process."""
