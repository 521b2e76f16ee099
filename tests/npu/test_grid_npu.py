"""Cases of the parity grid on NPUs: expert parallelism and HSDP over hccl, the exchange inside of the matmuls (mc2),
fused operators, recomputation."""

import pytest
from torch.distributed.device_mesh import init_device_mesh

from glmv.parallel import mc2
from glmv.verify.grid.cases import Case

EXPERTS = 12  # of the tiny model
CASES = [
    "2-fsdp-2x1x1-alltoall-whole-logits-2-on-per_token_loss-nothing-skewed-fp32",
    "2-fsdp-2x1x1-mc2-whole-logits-1-off-per_token_loss-nothing-even-bf16",
    # Tokens choose among the first rank's experts: nothing arrives at the second.
    "2-fsdp-2x1x1-mc2-whole-logits-2-on-default-nothing-skewed-bf16",
    "2-hsdp-2x1x1-balance-whole-logits-1-reentrant-per_sample_loss-vision-even-fp32",
]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", CASES)
def test_parity(case, take_grid_case, process):
    chosen = Case.from_id(case)
    if chosen.exchange == "mc2":
        ep = init_device_mesh(process.device.type, (process.world_size,))
        if why := mc2.why_not(ep, chosen.dtype, EXPERTS):
            pytest.skip(f"mc2: {why}")
    take_grid_case(chosen)
