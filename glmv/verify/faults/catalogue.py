"""The seeded faults, and the tests that must see them."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

MODEL = "tests/unit/model/test_matches_law.py"
LOSS = "tests/unit/ops/test_loss.py"
EXPERTS = "tests/unit/ops/test_experts.py::test_output_and_every_gradient[bf16-grouped-balanced]"

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="router-bias-dropped",
        file="glmv/model/moe.py",
        line="top_k_index_TK = self.choose(score_TE.detach() + self.e_score_correction_bias.to(dtype))",
        replacement="top_k_index_TK = self.choose(score_TE.detach())",
        sentence="e_score_correction_bias has no effect: other experts are trained than those that will serve.",
        killers=(
            f"{MODEL}::test_experts_chosen[one_image]",
            "tests/unit/model/test_router.py::test_choice_weights_and_gradients",
        ),
    ),
    Fault(
        id="router-weights-biased",
        file="glmv/model/moe.py",
        line="top_k_weight_TK = score_TE.gather(-1, top_k_index_TK)",
        replacement="top_k_weight_TK = (score_TE + self.e_score_correction_bias.to(dtype)).gather(-1, top_k_index_TK)",
        sentence="The correction bias, meant for the choice alone, also weights the experts' outputs.",
        killers=(
            f"{MODEL}::test_float64[one_image]",
            "tests/unit/model/test_router.py::test_the_bias_moves_the_choice_and_never_the_weight",
        ),
    ),
    Fault(
        id="router-unnormalised",
        file="glmv/model/moe.py",
        line="if self.config.norm_topk_prob:",
        replacement="if False:",
        sentence="norm_topk_prob is ignored: every routed output is scaled by the sum of its scores.",
        killers=(f"{MODEL}::test_float64[one_image]",),
    ),
    Fault(
        id="shared-expert-dropped",
        file="glmv/model/moe.py",
        line="return routed_TH.view_as(hidden_BSH) + self.shared_experts(hidden_BSH)",
        replacement="return routed_TH.view_as(hidden_BSH) + self.shared_experts(hidden_BSH).detach()",
        sentence="The shared expert works but is never trained.",
        killers=(f"{MODEL}::test_float64[one_image]",),
    ),
    Fault(
        id="experts-gate-up-swapped",
        file="glmv/ops/experts.py",
        line="gate_RI, up_RI = grouped_matmul(rows_RH, gate_up_EHF, counts_E).chunk(2, dim=-1)",
        replacement="up_RI, gate_RI = grouped_matmul(rows_RH, gate_up_EHF, counts_E).chunk(2, dim=-1)",
        sentence="The grouped path applies silu to the up half of every expert.",
        killers=(EXPERTS, f"{MODEL}::test_rounded[bf16-grouped]"),
    ),
    Fault(
        id="experts-combine-in-bf16",
        file="glmv/ops/experts.py",
        line="return (slots_TKH * top_k_weight_TK.to(wide)[..., None]).sum(1).to(slots_RH.dtype)",
        replacement="return (slots_TKH.to(slots_RH.dtype) * top_k_weight_TK.to(slots_RH.dtype)[..., None]).sum(1)",
        sentence="Routing weights are rounded to bf16 before they multiply.",
        killers=("tests/unit/ops/test_experts.py::test_routing_weights_are_not_rounded_to_bf16",),
    ),
    Fault(
        id="text-rope-one-axis",
        file="glmv/model/rotary.py",
        line="component_f = [k % 3 for k, size in enumerate(self.mrope_section) for _ in range(size)]",
        replacement="component_f = [0 for k, size in enumerate(self.mrope_section) for _ in range(size)]",
        sentence="M-RoPE turns by the temporal position only: all patches of an image stand in one place.",
        killers=(f"{MODEL}::test_float64[one_image]",),
    ),
    Fault(
        id="vision-positions-transposed",
        file="glmv/model/position_embedding.py",
        line="total_NH = total_NH + wide_QH[row_N * side + column_N] * (row_weight_N * column_weight_N)[:, None]",
        replacement="total_NH = total_NH + wide_QH[column_N * side + row_N] * (row_weight_N * column_weight_N)[:, None]",
        sentence="Rows and columns of the learned position table change places.",
        killers=(
            f"{MODEL}::test_float64[one_image]",
            "tests/unit/model/test_vision.py::test_positions_of_a_grid_like_the_table_are_the_table",
        ),
    ),
    Fault(
        id="vision-left-out-of-text-batches",
        file="glmv/model/text.py",
        line="hidden_BSH = hidden_BSH.masked_scatter(place_BS1, features_MH.to(hidden_BSH.dtype))",
        replacement="hidden_BSH = hidden_BSH.masked_scatter(place_BS1, features_MH.to(hidden_BSH.dtype)) if place_BS1.any() else hidden_BSH",
        sentence="A rank without pictures gives the vision tower no gradient, and the other ranks wait for it.",
        killers=(
            "tests/unit/model/test_vision.py::test_a_batch_without_images_still_gives_the_tower_gradients_of_zero",
        ),
    ),
    Fault(
        id="labels-unshifted",
        file="glmv/ops/loss.py",
        line="return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORE_INDEX)",
        replacement="return labels_BS",
        sentence="Every position learns to repeat its own token; the loss falls beautifully.",
        killers=(
            f"{LOSS}::test_loss_of_a_step_and_its_gradients[torch.float64-per_token_loss-padded_beside_packed]",
            f"{LOSS}::test_labels_that_nobody_predicts_are_ignored",
        ),
    ),
    Fault(
        id="loss-divided-per-micro-batch",
        file="glmv/ops/loss.py",
        line="return counted_BS / max(objective.targets, 1)",
        replacement="return counted_BS / counted_BS.sum().clamp(min=1)",
        sentence="Tokens of short answers weigh more than tokens of long ones.",
        killers=("tests/distributed/test_fsdp.py::test_gradients_of_the_union_in_float64[1ranks-uneven_targets]",),
    ),
    Fault(
        id="gradients-divided-by-ranks",
        file="glmv/parallel/fsdp.py",
        line="module.set_gradient_divide_factor(1.0)",
        replacement="module.set_gradient_divide_factor(2.0)",
        sentence="Gradients are averaged although the loss has divided already: the norm, and so clipping, is wrong.",
        killers=("tests/distributed/test_fsdp.py::test_gradients_of_the_union_in_float64[1ranks-all_different]",),
    ),
    Fault(
        id="norm-of-norms-without-square",
        file="glmv/parallel/grad_norm.py",
        line="total = torch.stack(norms).pow(norm_type).sum()",
        replacement="total = torch.stack(norms).sum()",
        sentence="The global norm is not the norm of all gradients: clipping scales by a wrong factor.",
        killers=("tests/unit/parallel/test_grad_norm.py::test_the_norm_is_that_of_all_gradients_as_one_vector",),
    ),
    Fault(
        id="unused-parameters-not-stepped",
        file="glmv/train/optimizer.py",
        line="if parameter.grad is None:",
        replacement="if False:",
        sentence="What a batch does not use escapes weight decay and has no optimizer state to resume from.",
        killers=("tests/unit/train/test_optimizer.py::test_a_parameter_that_nothing_used_decays_and_gets_a_state",),
    ),
    Fault(
        id="converter-gate-up-swapped",
        file="glmv/checkpoint/layout.py",
        line='return (gate_HI if slot.part == "gate" else up_HI).T',
        replacement='return (up_HI if slot.part == "gate" else gate_HI).T',
        sentence="Both directions of the converter swap the halves: a round trip is exact, and training is nonsense.",
        killers=(
            "tests/unit/checkpoint/test_expert_layout.py::test_stacking_is_the_law",
            "tests/unit/checkpoint/test_expert_layout.py::test_gate_is_the_first_half_and_up_the_second",
        ),
    ),
    Fault(
        id="stop-token-unlearned",
        file="glmv/data/template.py",
        line="return inside | {follower}",
        replacement="return inside",
        sentence="The model never learns to end its turn.",
        killers=("tests/unit/data/test_template.py::test_two_turns_token_by_token",),
    ),
)
