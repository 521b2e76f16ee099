"""Seeded faults: small bugs that are put in on purpose, so that the tests which claim to see them can prove it."""
