"""Faults of the ring, and of the block kernels that it runs on."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

ATTENTION = "tests/distributed/test_context_parallel_attention.py"
THREADS = "tests/unit/parallel/test_ring_and_ulysses.py"
ON_CUDA = "tests/unit/ops/test_attention_block_on_cuda.py"
MEMORY = "tests/unit/parallel/test_ring_memory.py"
BLOCKS = "tests/unit/ops/test_attention_block.py"
ON_NPU = "tests/npu/test_context_attention.py"
GRID = "tests/distributed/test_grid.py::test_parity"
GRID_RING = f"{GRID}[4-fsdp-1x1x4-none-r2-logits-1-off-per_token_loss-nothing-even-fp64]"
GRID_RING_OF_4 = f"{GRID}[4-fsdp-1x4x1-none-r4-dynamic-2-off-raw-nothing-skewed-fp64]"
# What the first attention of the decoder returns: tokens, positions, features or attention itself are wrong.
WRONG_ATTENTION = r"output of .*layers\.0\.self_attn"
WRONG_KEY_GRADIENT = r"gradient of .*layers\.2\.self_attn\.[kv]_proj"

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="ring-merge-without-maximum",
        file="glmv/ops/attention_block.py",
        line="highest = torch.maximum(lse, more_lse)",
        replacement="highest = torch.zeros_like(lse)",
        sentence="Large scores overflow to infinity, very negative ones to 0 / 0.",
        killers=(f"{BLOCKS}::test_large_scores_neither_overflow_nor_vanish",),
    ),
    Fault(
        id="ring-unseen-block-is-nan",
        file="glmv/ops/attention_block.py",
        line='highest = highest.masked_fill(highest == float("-inf"), 0)',
        replacement="highest = highest + 0",
        sentence="A query that has seen nothing yet is NaN for good.",
        killers=(f"{BLOCKS}::test_a_block_that_a_query_did_not_see_adds_nothing",),
    ),
    Fault(
        id="ring-lse-of-nothing-is-zero",
        file="glmv/parallel/ring.py",
        line='lses = [output.new_full(output.shape[:-1], float("-inf")) for output in outputs]',
        replacement="lses = [output.new_zeros(output.shape[:-1]) for output in outputs]",
        sentence="Each query sees one more key with score 0 and value 0, as some kernels say of a masked row.",
        killers=(
            f"{THREADS}::test_any_sequence_over_any_ranks",
            f"{ATTENTION}::test_two_ranks_attend_as_one[ring2-length37-flash-fp64]",
        ),
    ),
    Fault(
        id="ring-lse-in-fp32-whatever-the-model",
        file="glmv/parallel/ring.py",
        line="seen_lse.copy_(merged_lse)",
        replacement="seen_lse.copy_(merged_lse.float())",
        sentence="A float64 model attends in fp32, and its exact budgets see it.",
        killers=(f"{ATTENTION}::test_two_ranks_attend_as_one[ring2-length37-flash-fp64]", GRID_RING),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="ring-lse-in-the-models-dtype",
        file="glmv/parallel/ring.py",
        line="seen_lse.copy_(merged_lse)",
        replacement="seen_lse.copy_(merged_lse.to(query.dtype))",
        sentence="In bf16 a block counts up to a quarter too much or too little where scores are large.",
        killers=(f"{THREADS}::test_blocks_of_a_bf16_ring_are_weighed_in_fp32[flash]",),
    ),
    Fault(
        id="ring-saves-lse-in-the-models-dtype",
        file="glmv/parallel/ring.py",
        line="ctx.save_for_backward(query_BNCD, key_BNCD, value_BNCD, output_BNCD, *lses)",
        replacement="ctx.save_for_backward(query_BNCD, key_BNCD, value_BNCD, output_BNCD, *(lse.to(query_BNCD.dtype).to(lse.dtype) for lse in lses))",
        sentence="Going back, a bf16 ring takes probabilities that do not sum to 1.",
        killers=(f"{THREADS}::test_probabilities_of_a_bf16_ring_are_rebuilt_in_fp32[flash]",),
    ),
    Fault(
        id="cuda-block-lse-with-gaps",
        file="glmv/ops/attention_block.py",
        line="lse_BNS.contiguous(),",
        replacement="lse_BNS,",
        sentence="On a GPU the kernel reads the statistics of the early chunk where those of the late one are meant.",
        killers=(f"{ON_CUDA}::test_backward_gets_what_the_kernel_reads_as_plain_memory",),
    ),
    Fault(
        id="cuda-block-of-as-many-queries-as-keys",
        file="glmv/ops/attention_block.py",
        line="query_BNSD.shape[2],",
        replacement="key_BNKD.shape[2],",
        sentence="On a GPU late queries get no gradient, or one from behind their end, where a block is not square.",
        killers=(f"{ON_CUDA}::test_backward_says_the_same_in_its_own_order[early_keys]",),
    ),
    Fault(
        id="block-lse-in-the-models-dtype",
        file="glmv/ops/attention_block.py",
        line="lse_BNS = scores_BNSK.logsumexp(-1)",
        replacement="lse_BNS = scores_BNSK.logsumexp(-1).to(query_BNSD.dtype)",
        sentence="Blocks of a bf16 ring are weighed by statistics of three digits.",
        killers=(f"{BLOCKS}::test_statistics_of_16_bit_states_are_fp32[torch.bfloat16-eager]",),
    ),
    Fault(
        id="ring-keeps-what-has-left",
        file="glmv/parallel/ring.py",
        line="query_grads, flat_X = _backward(ring, at_home, _pack(runs, key_BNCD, value_BNCD), keys, ctx.implementation)",
        replacement="own_X = _pack(runs, key_BNCD, value_BNCD)\n        query_grads, flat_X = _backward(ring, at_home, own_X, keys, ctx.implementation)",
        sentence="Each rank holds one block of keys and values more than it was promised to.",
        killers=(f"{MEMORY}::test_backward_holds_a_gradient_of_queries_five_blocks_and_the_result_of_a_kernel",),
    ),
    Fault(
        id="ring-mask-off-by-one",
        file="glmv/ops/attention_block.py",
        line="future_SS = torch.ones(square, dtype=torch.bool, device=query_BNSD.device).triu(1)",
        replacement="future_SS = torch.ones(square, dtype=torch.bool, device=query_BNSD.device).triu(2)",
        sentence="Every token sees the next one, which it must predict.",
        killers=(f"{BLOCKS}::test_blocks_put_together_are_the_whole[3-torch.float64-eager]",),
    ),
    Fault(
        id="ring-early-queries-see-later-keys",
        file="glmv/parallel/ring.py",
        line="return cls(slice(1, 2), slice(0, 2), causal=False)",
        replacement="return cls(slice(0, 2), slice(0, 2), causal=False)",
        sentence="The early chunk sees keys of later ranks: the future.",
        killers=(f"{THREADS}::test_any_sequence_over_any_ranks", GRID_RING),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="ring-late-keys-of-earlier-ranks-seen",
        file="glmv/parallel/ring.py",
        line="return cls(slice(0, 2), slice(0, 1), causal=False)",
        replacement="return cls(slice(0, 2), slice(0, 2), causal=False)",
        sentence="All queries see the late chunk of earlier ranks: the future.",
        killers=(f"{THREADS}::test_any_sequence_over_any_ranks", GRID_RING),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="ring-key-gradients-not-carried-on",
        file="glmv/parallel/ring.py",
        line="here_X = here_X if returning is None else here_X.add_(returning.wait())",
        replacement="here_X = here_X if returning is None or returning.wait() is None else here_X",
        sentence="Keys and values get the gradients of one rank's queries only.",
        killers=(f"{THREADS}::test_any_sequence_over_any_ranks", GRID_RING),
        first=WRONG_KEY_GRADIENT,
    ),
    Fault(
        id="ring-key-gradients-stop-short-of-home",
        file="glmv/parallel/ring.py",
        line="return query_grads, returning.wait()",
        replacement="return query_grads, (here_X, returning.wait())[0]",  # not left open: gloo would spin for ever
        sentence="Keys and values get the gradients of the neighbour's.",
        killers=(f"{THREADS}::test_any_sequence_over_any_ranks", GRID_RING),
        first=WRONG_KEY_GRADIENT,
    ),
    Fault(
        id="ring-turns-the-other-way",
        file="glmv/parallel/ring.py",
        line="there, here = (self.rank + 1) % self.size, (self.rank - 1) % self.size",
        replacement="there, here = (self.rank - 1) % self.size, (self.rank + 1) % self.size",
        sentence="Every rank takes its keys for those of another one; with two ranks nobody notices.",
        killers=(f"{ATTENTION}::test_four_ranks_attend_as_one[ring4-length37-flash]", GRID_RING_OF_4),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="npu-ring-lse-without-sum",
        file="glmv/ops/npu/attention_block.py",
        line="return output, maximum[..., 0] + total[..., 0].log()",
        replacement="return output, maximum[..., 0]",
        sentence="On an NPU blocks are weighed by their largest score alone.",
        killers=(f"{ON_NPU}::test_two_npus_attend_as_one[ring2-length37-fp32]",),
    ),
    Fault(
        id="npu-ring-gradient-scale-left-out",
        file="glmv/ops/npu/attention_block.py",
        line="scale_value=query_BNSD.shape[-1] ** -0.5,",
        replacement="scale_value=1.0,",
        sentence="On an NPU the backward pass rebuilds other probabilities than the forward pass had.",
        killers=(f"{ON_NPU}::test_two_npus_attend_as_one[ring2-length37-fp32]",),
    ),
)
