"""The seeded faults, and the tests that must see them."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

FAULTS: tuple[Fault, ...] = ()
