"""Expert parallelism has a witness too: transformers' own FSDP2 with EP 2 gives the gradients of the law."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import Glm4vMoeForConditionalGeneration
from transformers.distributed.configuration_utils import DistributedConfig

from glmv.verify.grid.batches import law_batch
from glmv.verify.grid.law import Law
from spec.layout import per_expert
from spec.train import Objective

pytestmark = pytest.mark.world_size(2)
# The plan that ships with this model matches none of its modules (transformers 5.24.0 says so and leaves them whole).
UNITS = dict.fromkeys(["model.visual.blocks.*", "model.language_model.layers.*"], "free_full_weight")
NAMES = ["picture", "wide_picture"]  # one micro-batch a rank; transformers' vision tower needs a picture on each


@pytest.fixture
def witness(tiny_dir, process):
    layout = DistributedConfig(fsdp_size=2, ep_size=2, fsdp_plan=UNITS)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return Glm4vMoeForConditionalGeneration.from_pretrained(tiny_dir, distributed_config=layout, **options)


def hear(model, rank):
    """Loss and gradients of the step over both ranks, and the experts chosen on each."""
    chosen = {}
    for index, layer in enumerate(model.model.language_model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _, __, out, index=index: chosen.update({index: out[2]}))
    batch = law_batch(NAMES[rank])
    given = {name: t for name, t in vars(batch).items() if t is not None}
    # The law looks at token types alone, transformers at the ids too.
    given["input_ids"] = batch.input_ids.masked_fill(batch.mm_token_type_ids == 1, model.config.image_token_id)
    mean = model(**given, use_cache=False).loss
    share = Objective.of([batch]).targets / Objective.of([law_batch(name) for name in NAMES]).targets
    (mean * share * dist.get_world_size()).backward()  # FSDP2 averages over ranks what the step sums
    loss = (mean * share).detach()
    dist.all_reduce(loss)
    choices = [None] * dist.get_world_size()
    dist.all_gather_object(choices, chosen)
    return {"loss": loss, **published(model)}, choices


def published(model):
    """Whole gradients under published names; transformers stacks experts as [E, 2I, H] and [E, H, I]."""
    whole = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    return per_expert({n: g.transpose(1, 2) if ".experts." in n and "shared" not in n else g for n, g in whole.items()})


def test_gradients_are_those_of_the_law(witness, tiny_dir, process, judge):
    experts = witness.model.language_model.layers[1].mlp.experts.gate_up_proj
    assert experts.to_local().shape[0] == experts.shape[0] // 2
    said, choices = hear(witness, process.rank)
    judge(said, Law.read(tiny_dir).of(NAMES, choices), torch.float32)
