"""Two cases of the parity grid on NPUs: expert parallelism and HSDP over hccl, fused operators, recomputation."""

import pytest

from glmv.verify.grid.cases import Case

CASES = [
    "2-fsdp-2x1x1-alltoall-whole-logits-2-on-per_token_loss-nothing-skewed-fp32",
    "2-hsdp-2x1x1-balance-whole-logits-1-reentrant-per_sample_loss-vision-even-fp32",
]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", CASES)
def test_parity(case, take_grid_case):
    take_grid_case(Case.from_id(case))
