"""Faults of the model and its operators: router, experts, rope, vision, attention, positions."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

MODEL = "tests/unit/model/test_matches_law.py"
PACKING = "tests/unit/model/test_packing.py"
POSITIONS = "tests/unit/model/test_positions.py"
BUFFERS = "tests/unit/model/test_buffers.py"
FSDP = "tests/distributed/test_fsdp.py"
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
        line="total_TH.addcmul_(slot_TH.to(total_TH.dtype), weight_T[:, None])",
        replacement="total_TH += slot_TH * weight_T.to(slot_TH.dtype)[:, None]",
        sentence="Routing weights are rounded to bf16 before they multiply.",
        killers=("tests/unit/ops/test_experts.py::test_routing_weights_are_not_rounded_to_bf16",),
    ),
    Fault(
        id="text-rope-one-axis",
        file="glmv/model/rotary.py",
        line="sections = [position_ids_3BS[k % 3, ..., None].expand(-1, -1, n) for k, n in enumerate(self.mrope_section)]",
        replacement="sections = [position_ids_3BS[0, ..., None].expand(-1, -1, n) for k, n in enumerate(self.mrope_section)]",
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
        line="hidden_TH = hidden_TH.index_copy(0, place_M, features_MH[: len(place_M)].to(hidden_TH.dtype))",
        replacement="hidden_TH = hidden_TH.index_copy(0, place_M, features_MH.to(hidden_TH.dtype)) if len(place_M) else hidden_TH",
        sentence="A rank without pictures gives the vision tower no gradient, and the other ranks wait for it.",
        killers=(
            "tests/unit/model/test_vision.py::test_a_batch_without_images_still_gives_the_tower_gradients_of_zero",
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
        line="return F.pad(document_S, (0, attention_mask_BS.shape[1] - len(document_S)), value=PADDING)[None]",
        replacement="return F.pad(document_S.clamp(max=0), (0, attention_mask_BS.shape[1] - len(document_S)), value=PADDING)[None]",
        sentence="A packed row counts as one sample: its positions run on, its first labels are learned, it weighs as one.",
        killers=(
            f"{POSITIONS}::test_every_packed_document_starts_at_0",
            f"{MODEL}::test_float64[packed]",
            "tests/unit/data/test_batch.py::test_nobody_predicts_the_first_label_of_a_sample",
            "tests/unit/data/test_batch.py::test_a_packed_row",
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
        line="place_M = (types_BS.flatten() == kind).nonzero().flatten().to(hidden_TH.device)",
        replacement="place_M = types_BS.flatten().nonzero().flatten()[: len(features_MH)].to(hidden_TH.device)",
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
    Fault(
        id="router-unscaled",
        file="glmv/model/moe.py",
        line="return top_k_index_TK, top_k_weight_TK * self.config.routed_scaling_factor",
        replacement="return top_k_index_TK, top_k_weight_TK",
        sentence="routed_scaling_factor is ignored: routed and shared experts are out of balance.",
        killers=("tests/unit/model/test_router.py::test_choice_weights_and_gradients",),
    ),
    Fault(
        id="router-weak-groups-masked-with-zero",
        file="glmv/model/moe.py",
        line='choice_TE = grouped_TGM.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)',
        replacement="choice_TE = grouped_TGM.masked_fill(~kept_TG[..., None], 0.0).flatten(-2)",
        sentence="With a negative bias, experts of excluded groups beat those of the kept ones.",
        killers=("tests/unit/model/test_router.py::test_choice_weights_and_gradients",),
    ),
    Fault(
        id="rope-turns-backwards",
        file="glmv/ops/rope.py",
        line="rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin",
        replacement="rotated = rotated * cos + torch.cat([second, -first], dim=-1) * sin",
        sentence="Positions turn the other way: attention sees the distance with the wrong sign.",
        killers=("tests/unit/ops/test_norm_and_rope.py::test_a_quarter_turn_moves_channel_i_to_i_plus_half",),
    ),
    Fault(
        id="vision-images-see-each-other",
        file="glmv/model/vision.py",
        line="lengths = segment_lengths(grids)",
        replacement="lengths = [sum(segment_lengths(grids))]",
        sentence="Images of one batch attend to each other: a sample's features depend on its neighbours.",
        killers=("tests/unit/model/test_vision.py::test_images_do_not_see_each_other",),
    ),
    Fault(
        id="vision-wrong-cubic",
        file="glmv/model/position_embedding.py",
        line="KEYS_A = -0.75",
        replacement="KEYS_A = -0.5",
        sentence="Positions are interpolated with another cubic kernel than the model was trained with.",
        killers=(f"{MODEL}::test_float64[one_image]",),
    ),
    Fault(
        id="vision-downsample-mixed-up",
        file="glmv/model/vision.py",
        line="pixels_MX = hidden_NH.unflatten(0, (-1, block)).transpose(1, 2).flatten(1)",
        replacement="pixels_MX = hidden_NH.unflatten(0, (-1, block)).flatten(1)",
        sentence="The 2x2 convolution reads channels as pixels.",
        killers=(f"{MODEL}::test_float64[one_image]",),
    ),
    Fault(
        id="buffers-left-uninitialised",
        file="glmv/model/rotary.py",
        line="module.reset()",
        replacement="module.dim",
        sentence="After meta-device creation the rotary frequencies are whatever was in memory.",
        killers=("tests/unit/model/test_buffers.py::test_reset_restores_every_buffer",),
    ),
)
