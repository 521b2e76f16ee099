"""The seeded faults, and the tests that must see them."""

from glmv.verify.faults.catalogue import data, loss, model, npu, ranks, ring, sequence, training
from glmv.verify.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *model.FAULTS,
    *training.FAULTS,
    *loss.FAULTS,
    *data.FAULTS,
    *ranks.FAULTS,
    *sequence.FAULTS,
    *ring.FAULTS,
    *npu.FAULTS,
)
