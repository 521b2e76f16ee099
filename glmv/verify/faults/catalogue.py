"""The seeded faults, and the tests that must see them."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

MODEL = "tests/unit/model/test_matches_law.py"
PACKING = "tests/unit/model/test_packing.py"
POSITIONS = "tests/unit/model/test_positions.py"
BUFFERS = "tests/unit/model/test_buffers.py"
FSDP = "tests/distributed/test_fsdp.py"
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
            f"{LOSS}::test_loss_of_a_step_and_its_gradients[packed-per_token_loss-torch.float64]",
            f"{LOSS}::test_labels_that_nobody_predicts_are_ignored",
        ),
    ),
    Fault(
        id="loss-divided-per-micro-batch",
        file="glmv/ops/loss.py",
        line="return counted_BS / max(objective.targets, 1)",
        replacement="return counted_BS / counted_BS.sum().clamp(min=1)",
        sentence="Tokens of short answers weigh more than tokens of long ones.",
        killers=(
            f"{LOSS}::test_loss_of_a_step_and_its_gradients[uneven_targets-per_token_loss-torch.float64]",
            f"{FSDP}::test_gradients_are_those_of_the_union_in_float64[1-uneven_targets]",
        ),
    ),
    Fault(
        id="gradients-divided-by-ranks",
        file="glmv/parallel/fsdp.py",
        line="module.set_gradient_divide_factor(1.0)",
        replacement="module.set_gradient_divide_factor(2.0)",
        sentence="Gradients are averaged although the loss has divided already: the norm, and so clipping, is wrong.",
        killers=(f"{FSDP}::test_gradients_are_those_of_the_union_in_float64[1-all_different]",),
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
        id="ranks-read-the-same-samples",
        file="glmv/data/sampler.py",
        line="mine = list(first)[self.dp_rank :: self.dp_size]",
        replacement="mine = list(first)[:: self.dp_size]",
        sentence="Every rank trains on the first rank's samples: most of an epoch is never read.",
        killers=(
            "tests/unit/data/test_sampler.py::test_ranks_share_an_epoch_without_overlap[1]",
            "tests/unit/data/test_sampler.py::test_an_epoch_reads_every_sample_once",
        ),
    ),
    Fault(
        id="rope-parameters-unread",
        file="glmv/model/config.py",
        line='for name in ("rope_scaling", "rope_parameters"):',
        replacement='for name in ("rope_scaling",):',
        sentence="Rotary settings of a config.json that transformers 5 wrote fall back to defaults.",
        killers=(
            "tests/unit/model/test_config.py::test_every_spelling_of_rope[rope_parameters]",
            "tests/unit/model/test_config.py::test_what_transformers_5_writes_is_the_same_model",
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
    Fault(
        id="documents-see-each-other",
        file="glmv/ops/attention.py",
        line="output_NSD = segment_attention(query, key, value, lengths, implementation=implementation, causal=True)",
        replacement="output_NSD = segment_attention(query, key, value, [end], implementation=implementation, causal=True)",
        sentence="Packed documents attend to those packed before them: training sees what serving never will.",
        killers=(
            f"{PACKING}::test_no_document_sees_another",
            f"{PACKING}::test_a_packed_row_is_all_of_its_documents_alone",
            f"{MODEL}::test_float64[packed]",
            "tests/unit/ops/test_attention.py::test_causal_attention_inside_packed_documents",
        ),
    ),
    Fault(
        id="documents-see-their-future",
        file="glmv/ops/attention.py",
        line="output_NSD = segment_attention(query, key, value, lengths, implementation=implementation, causal=True)",
        replacement="output_NSD = segment_attention(query, key, value, lengths, implementation=implementation)",
        sentence="Inside a packed document every token sees the ones it is to predict; the loss falls to nothing.",
        killers=(
            f"{PACKING}::test_a_packed_row_is_all_of_its_documents_alone",
            f"{MODEL}::test_float64[packed]",
            f"{MODEL}::test_rounded[bf16-looped-packed]",
        ),
    ),
    Fault(
        id="document-positions-run-on",
        file="glmv/model/glm4v_moe.py",
        line="positions_3BS = mrope_positions(types_BS, grids, merge, document_BS)",
        replacement="positions_3BS = mrope_positions(types_BS, grids, merge, document_BS.clamp(max=0))",
        sentence="Positions of a packed document go on from the one before it: later documents are trained out of range.",
        # Rope is relative, so that a common offset is seen where it rounds: in the angles' own dtype.
        killers=(f"{PACKING}::test_positions_start_anew_in_the_model",),
    ),
    Fault(
        id="document-ids-ignore-borders",
        file="glmv/ops/documents.py",
        line="return document_S.masked_fill(place_S >= cu_seqlens[-1], PADDING)[None]",
        replacement="return document_S.clamp(max=0).masked_fill(place_S >= cu_seqlens[-1], PADDING)[None]",
        sentence="A packed row counts as one sample: its positions run on, its first labels are learned, it weighs as one.",
        killers=(
            f"{POSITIONS}::test_every_packed_document_starts_at_0",
            f"{MODEL}::test_float64[packed]",
            "tests/unit/data/test_batch.py::test_nobody_predicts_the_first_label_of_a_sample",
            "tests/unit/data/test_batch.py::test_a_packed_row",
        ),
    ),
    Fault(
        id="first-label-of-a-document-learned",
        file="glmv/ops/loss.py",
        line="return labels_BS.masked_fill((document_BS != before_BS) | (document_BS < 0), IGNORE_INDEX)",
        replacement="return labels_BS.masked_fill(document_BS < 0, IGNORE_INDEX)",
        sentence="The last token of a document learns to predict the next document's first, and left padding a first word.",
        killers=(
            f"{LOSS}::test_labels_that_nobody_predicts_are_ignored",
            f"{MODEL}::test_float64[padded_left]",
            f"{MODEL}::test_float64[packed]",
            "tests/unit/data/test_batch.py::test_nobody_predicts_the_first_label_of_a_sample",
        ),
    ),
    Fault(
        id="media-features-swapped",
        file="glmv/model/glm4v_moe.py",
        line="return dict(zip(media, features_MH.split(counts), strict=True))",
        replacement="return dict(zip(media, (features_MH.flip(0) if len(media) > 1 else features_MH).split(counts), strict=True))",
        sentence="In a batch with both, images get the features of videos, and videos those of images.",
        killers=(
            f"{MODEL}::test_float64[image_and_video_padded_right]",
            f"{FSDP}::test_gradients_are_those_of_the_union_in_float64[2-videos_and_documents]",
        ),
    ),
    Fault(
        id="videos-placed-as-images",
        file="glmv/model/text.py",
        line="place_BS1 = (types_BS == kind)[..., None]",
        replacement="place_BS1 = (types_BS != 0)[..., None]",
        sentence="Where a batch has images and videos, the features of one kind overwrite the other's.",
        killers=(f"{MODEL}::test_float64[image_and_video_padded_right]", f"{MODEL}::test_rounded[bf16-grouped-video]"),
    ),
    Fault(
        id="video-frames-see-each-other",
        file="glmv/model/vision.py",
        line="return [h * w for t, h, w in grids for _ in range(t)]",
        replacement="return [t * h * w for t, h, w in grids]",
        sentence="The vision tower attends over all of a video's temporal patches at once, as it was never trained to.",
        killers=(
            f"{MODEL}::test_float64[video]",
            "tests/unit/model/test_vision.py::test_every_temporal_patch_is_a_segment",
            "tests/unit/model/test_vision.py::test_images_do_not_see_each_other",
        ),
    ),
    Fault(
        id="picture-advances-by-its-rows",
        file="glmv/model/positions.py",
        line="current += max(rows, columns)",
        replacement="current += rows",
        sentence="Text behind a wide picture takes positions that the picture's columns have already.",
        killers=(
            f"{POSITIONS}::test_an_image_by_hand",
            f"{POSITIONS}::test_each_temporal_patch_of_a_video_is_a_picture_of_its_own",
            f"{MODEL}::test_float64[video_beside_image_padded_left]",
        ),
    ),
    Fault(
        id="default-loss-by-global-count",
        file="glmv/ops/loss.py",
        line="return counted_BS / counted_BS.sum().clamp(min=1) / objective.micro_batches",
        replacement="return counted_BS / max(objective.targets, 1)",
        sentence="loss_type default weighs tokens alike where it promises micro-batches alike.",
        killers=(
            f"{LOSS}::test_loss_of_a_step_and_its_gradients[uneven_targets-default-torch.float64]",
            f"{FSDP}::test_each_loss_type_is_the_laws_over_ranks_and_accumulation[default]",
        ),
    ),
    Fault(
        id="default-loss-nan-without-targets",
        file="glmv/ops/loss.py",
        line="return counted_BS / counted_BS.sum().clamp(min=1) / objective.micro_batches",
        replacement="return counted_BS / counted_BS.sum() / objective.micro_batches",
        sentence="One micro-batch without a label makes the whole step NaN.",
        killers=(
            f"{LOSS}::test_nothing_to_learn_is_zero_with_zero_gradients[no_targets-default]",
            f"{FSDP}::test_a_batch_without_targets_has_loss_and_gradients_of_exactly_zero[nothing_to_learn-raw]",
        ),
    ),
    Fault(
        id="per-sample-loss-by-tokens",
        file="glmv/ops/loss.py",
        line="share_T = counted_T / targets_D.clamp(min=1)[document_T] / documents",
        replacement="share_T = counted_T / targets_D.sum().clamp(min=1)",
        sentence="per_sample_loss is the mean over tokens: long answers outweigh short ones, as without it.",
        killers=(
            f"{LOSS}::test_one_token_of_a_short_document_outweighs_one_of_a_long_one",
            f"{LOSS}::test_loss_of_a_step_and_its_gradients[packed-per_sample_loss-torch.float64]",
            f"{FSDP}::test_each_loss_type_is_the_laws_over_ranks_and_accumulation[per_sample_loss]",
        ),
    ),
    Fault(
        id="per-sample-loss-forgets-empty-documents",
        file="glmv/ops/loss.py",
        line="share_T = counted_T / targets_D.clamp(min=1)[document_T] / documents",
        replacement="share_T = counted_T / targets_D.clamp(min=1)[document_T] / targets_D.count_nonzero().clamp(min=1)",
        sentence="Documents without targets stop counting: the others weigh more, depending on what they are packed with.",
        killers=(f"{LOSS}::test_packed_documents_weigh_the_same_whether_or_not_they_have_targets",),
    ),
    Fault(
        id="mean-of-means-per-rank",
        file="glmv/train/step.py",
        line="objective = Objective(loss_type, targets, micro_batches=len(micro_batches) * dist.get_world_size())",
        replacement="objective = Objective(loss_type, targets, micro_batches=len(micro_batches))",
        sentence="With loss_type default, gradients grow with the number of ranks, and so does what clipping cuts off.",
        killers=(f"{FSDP}::test_each_loss_type_is_the_laws_over_ranks_and_accumulation",),
    ),
    Fault(
        id="rope-buffers-always-bf16",
        file="glmv/model/rotary.py",
        line="self.inv_freq.copy_(exact if self.rounded_to is None else exact.to(self.rounded_to))",
        replacement="self.inv_freq.copy_(exact.to(torch.bfloat16))",
        sentence="Rotary frequencies are rounded to bf16: far apart tokens stand in wrong places.",
        killers=(f"{BUFFERS}::test_frequencies_by_hand", f"{MODEL}::test_float64[one_image]"),
    ),
    Fault(
        id="rope-buffers-never-bf16",
        file="glmv/model/rotary.py",
        line="module.rounded_to = rounded_to",
        replacement="module.rounded_to = None",
        sentence="`--buffers bf16` does nothing: a comparison with Megatron's rounding compares something else.",
        killers=(
            f"{BUFFERS}::test_frequencies_rounded_to_bf16_stay_in_a_wide_buffer",
            f"{BUFFERS}::test_the_model_with_rounded_frequencies",
        ),
    ),
)
