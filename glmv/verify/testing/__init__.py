"""Tests on several ranks: a pytest plugin, and the warm processes in which such tests run."""
