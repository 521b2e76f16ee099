"""Faults of the chunked loss."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

CHUNKS = "tests/unit/ops/test_chunked_loss.py"
RANKS = "tests/distributed/test_chunked_loss_over_ranks.py"
EVERY_CHUNK = f"{CHUNKS}::test_loss_and_gradients_in_chunks"

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="chunks-weight-gradient-overwritten",
        file="glmv/ops/chunked_loss.py",
        line="grad_weight_VH += grad_logits_CV.T @ hidden_CH",
        replacement="grad_weight_VH.copy_(grad_logits_CV.T @ hidden_CH)",
        sentence="The head learns from the last chunk of every batch alone.",
        killers=(
            f"{EVERY_CHUNK}[packed-static_7-default-torch.float64]",
            f"{RANKS}::test_two_ranks_that_accumulate_compute_the_law",
        ),
    ),
    Fault(
        id="chunks-last-one-dropped",
        file="glmv/ops/chunked_loss.py",
        line="for first in range(0, len(hidden_NH), targets.chunk_tokens):",
        replacement="for first in range(0, len(hidden_NH) - targets.chunk_tokens + 1, targets.chunk_tokens):",
        sentence="Tokens that do not fill a chunk are not learned: the end of every answer.",
        killers=(
            f"{EVERY_CHUNK}[padded-static_7-default-torch.float64]",
            f"{EVERY_CHUNK}[packed-static_beyond-raw-torch.float64]",
        ),
    ),
    Fault(
        id="chunks-shares-of-the-first",
        file="glmv/ops/chunked_loss.py",
        line="hidden_CH, share_C = hidden_NH[chunk], share_N[chunk].to(wide).to(hidden_NH.device)",
        replacement="hidden_CH, share_C = hidden_NH[chunk], share_N[: len(hidden_NH[chunk])].to(wide).to(hidden_NH.device)",
        sentence="Every chunk is weighed as the first one: padding is learned, and answers are left out.",
        killers=(
            f"{EVERY_CHUNK}[packed-static_7-per_sample_loss-torch.float64]",
            f"{EVERY_CHUNK}[masked_middle-dynamic_10-default-torch.float32]",
        ),
    ),
    Fault(
        id="chunks-targets-of-the-first",
        file="glmv/ops/chunked_loss.py",
        line="part, grad_logits_CV = _loss_and_gradient(F.linear(hidden_CH, weight_VH), target_N[chunk], share_C)",
        replacement="part, grad_logits_CV = _loss_and_gradient(F.linear(hidden_CH, weight_VH), target_N[: len(share_C)], share_C)",
        sentence="All chunks learn the words of the first.",
        killers=(f"{EVERY_CHUNK}[packed-static_7-default-torch.float64]",),
    ),
    Fault(
        id="chunks-labels-shifted-again",
        file="glmv/ops/chunked_loss.py",
        line="part, grad_logits_CV = _loss_and_gradient(F.linear(hidden_CH, weight_VH), target_N[chunk], share_C)",
        replacement="part, grad_logits_CV = _loss_and_gradient(F.linear(hidden_CH, weight_VH), F.pad(target_N[chunk][1:], (0, 1), value=IGNORE_INDEX), share_C)",
        sentence="Labels are shifted within each chunk, and have been already: the model learns the word after the next.",
        killers=(
            f"{EVERY_CHUNK}[packed-static_7-default-torch.float64]",
            f"{RANKS}::test_ranks_that_share_sequences_compute_the_law",
        ),
    ),
    Fault(
        id="chunks-weight-gradient-summed-in-bf16",
        file="glmv/ops/chunked_loss.py",
        line="grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None",
        replacement="grad_weight_VH = torch.zeros_like(weight_VH) if wants_weight else None",
        sentence="What late chunks add to the head's gradient is rounded away, the more of it the longer the batch.",
        killers=(f"{CHUNKS}::test_the_weights_gradient_is_summed_in_fp32",),
    ),
    Fault(
        id="chunks-divide-by-their-number",
        file="glmv/ops/chunked_loss.py",
        line="loss += part",
        replacement="loss += part / -(-len(hidden_NH) // targets.chunk_tokens)",
        sentence="The reported loss is a mean over chunks: it shrinks with the chunk size and differs from its gradient.",
        killers=(
            f"{EVERY_CHUNK}[packed-static_7-default-torch.float64]",
            f"{RANKS}::test_rounded",
        ),
    ),
    Fault(
        id="chunks-gradients-by-their-number",
        file="glmv/ops/chunked_loss.py",
        line="grad_CV = log_p_CV.exp_().mul_(share_C[:, None])",
        replacement="grad_CV = log_p_CV.exp_().mul_(share_C[:, None] / len(share_C))",
        sentence="Gradients are divided by a chunk's tokens once more: what is not predicted is hardly pushed down.",
        killers=(f"{EVERY_CHUNK}[one_target-static_7-default-torch.float32]",),
    ),
    Fault(
        id="chunks-ignore-what-is-done-to-the-loss",
        file="glmv/ops/chunked_loss.py",
        line="grad_hidden_NH, grad_weight_VH = (None if grad is None else grad * grads[0] for grad in ctx.saved_tensors)",
        replacement="grad_hidden_NH, grad_weight_VH = ctx.saved_tensors",
        sentence="A loss that is scaled, or one of several, still gives the gradients of the loss alone.",
        killers=(f"{CHUNKS}::test_what_is_done_to_the_loss_is_done_to_its_gradients",),
    ),
    Fault(
        id="chunks-scale-their-gradients-in-place",
        file="glmv/ops/chunked_loss.py",
        line="grad_hidden_NH, grad_weight_VH = (None if grad is None else grad * grads[0] for grad in ctx.saved_tensors)",
        replacement="grad_hidden_NH, grad_weight_VH = (None if grad is None else grad.mul_(grads[0]) for grad in ctx.saved_tensors)",
        sentence="A second backward pass through the same loss scales what is scaled already.",
        killers=(f"{CHUNKS}::test_a_second_backward_pass_adds_the_same",),
    ),
    Fault(
        id="chunks-frozen-head-learns",
        file="glmv/ops/chunked_loss.py",
        line="wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_BSH, weight_VH)]",
        replacement="wanted = [torch.is_grad_enabled()] * 2",
        sentence="A frozen head costs the products and the memory of a gradient that nobody wants.",
        killers=(f"{CHUNKS}::test_what_is_frozen_costs_no_products",),
    ),
    Fault(
        id="chunks-gradients-without-training",
        file="glmv/ops/chunked_loss.py",
        line="wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_BSH, weight_VH)]",
        replacement="wanted = [tensor.requires_grad for tensor in (hidden_BSH, weight_VH)]",
        sentence="Evaluation pays for a backward pass that never comes.",
        killers=(f"{CHUNKS}::test_no_gradients_are_made_where_none_are_wanted",),
    ),
    Fault(
        id="chunks-stop-at-a-masked-one",
        file="glmv/ops/chunked_loss.py",
        line="continue",
        replacement="break",
        sentence="Nothing behind a prompt as long as a chunk is learned.",
        killers=(f"{EVERY_CHUNK}[masked_middle-static_7-default-torch.float64]",),
    ),
    Fault(
        id="chunks-masked-ones-computed",
        file="glmv/ops/chunked_loss.py",
        line="if not share_N[chunk].any():",
        replacement="if False:",
        sentence="Prompts cost the head as much as answers do.",
        killers=(f"{CHUNKS}::test_chunks_without_targets_are_left_out",),
    ),
    Fault(
        id="chunk-size-forgets-the-rows",
        file="glmv/ops/chunked_loss.py",
        line="return self.size * rows if self.per_row else self.size",
        replacement="return self.size * rows",
        sentence="A dynamic chunk grows with the micro-batch, and memory is no longer bounded.",
        killers=(
            f"{CHUNKS}::test_how_many_tokens_a_chunk_has",
            f"{RANKS}::test_the_trainer_makes_no_more_logits_than_a_chunks[dynamic]",
        ),
    ),
    Fault(
        id="chunks-not-heard",
        file="glmv/train/build.py",
        line="if features.enable_chunk_loss:",
        replacement="if False:",
        sentence="features.enable_chunk_loss is accepted, and all logits are made.",
        killers=(f"{RANKS}::test_the_trainer_makes_no_more_logits_than_a_chunks[static]",),
    ),
    Fault(
        id="chunks-shares-rounded",
        file="glmv/ops/chunked_loss.py",
        line="hidden_CH, share_C = hidden_NH[chunk], share_N[chunk].to(wide).to(hidden_NH.device)",
        replacement="hidden_CH, share_C = hidden_NH[chunk], share_N[chunk].to(hidden_NH.dtype).to(wide).to(hidden_NH.device)",
        sentence="In bf16 the divisor is rounded to three digits: loss and gradients are off by up to 0.4 %.",
        killers=(f"{CHUNKS}::test_shares_are_not_rounded_to_the_compute_dtype",),
    ),
    Fault(
        id="chunks-shares-seen-by-fsdp",
        file="glmv/train/step.py",
        line="loss: Tensor = model(**batch.model_inputs(), targets=targets)",
        replacement="loss: Tensor = model(**batch.model_inputs(), targets=Targets(targets.target_BS, share_BS.bfloat16().double(), targets.chunk_tokens))",
        sentence="Mixed precision rounds shares as if they were activations, before the head gets them.",
        killers=(f"{RANKS}::test_mixed_precision_does_not_round_the_shares",),
    ),
    Fault(
        id="chunks-loss-rounded",
        file="glmv/parallel/fsdp.py",
        line="output_dtype=None if is_loss or match_any(name, (EXPERTS,)) else torch_dtype(plan.output_dtype),",
        replacement="output_dtype=None if match_any(name, (EXPERTS,)) else torch_dtype(plan.output_dtype),",
        sentence="The loss is reported with three digits, because fsdp_plan.output_dtype rounds it like logits.",
        killers=(f"{RANKS}::test_the_output_dtype_does_not_round_the_loss",),
    ),
)
