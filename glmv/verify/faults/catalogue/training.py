"""Faults of the step: loss types, ranks, norm and clipping, optimizer, schedule."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

MODEL = "tests/unit/model/test_matches_law.py"
FSDP = "tests/distributed/test_fsdp.py"
LOSS = "tests/unit/ops/test_loss.py"

FAULTS: tuple[Fault, ...] = (
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
        line="objective = Objective(loss_type, targets, micro_batches=len(micro_batches) * dist.get_world_size() // sharers)",
        replacement="objective = Objective(loss_type, targets, micro_batches=len(micro_batches))",
        sentence="With loss_type default, gradients grow with the number of ranks, and so does what clipping cuts off.",
        killers=(f"{FSDP}::test_each_loss_type_is_the_laws_over_ranks_and_accumulation",),
    ),
    Fault(
        id="loss-type-not-heard",
        file="glmv/train/trainer.py",
        line="how = features.loss_cfg.loss_type, chunk_size_of(features)",
        replacement='how = "per_token_loss", chunk_size_of(features)',
        sentence="features.loss_cfg.loss_type is accepted, and per_token_loss is trained.",
        killers=("tests/distributed/test_train.py::test_the_config_chooses_the_loss",),
    ),
    Fault(
        id="clip-scales-up",
        file="glmv/parallel/grad_norm.py",
        line="coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        replacement="coefficient = max_norm / (norm + 1e-6)",
        sentence="Small gradients are blown up to the clipping norm.",
        killers=("tests/unit/parallel/test_grad_norm.py::test_a_norm_below_the_limit_leaves_gradients_bit_equal",),
    ),
    Fault(
        id="clip-coefficient-off",
        file="glmv/parallel/grad_norm.py",
        line="coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        replacement="coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).sqrt()",
        sentence="Gradients over the limit stay over it.",
        killers=("tests/unit/parallel/test_grad_norm.py::test_a_norm_above_the_limit_scales_every_gradient",),
    ),
    Fault(
        id="schedule-decays-from-the-start",
        file="glmv/train/schedule.py",
        line="progress = (step - warmup) / max(1, decay - warmup)",
        replacement="progress = step / max(1, decay)",
        sentence="The cosine begins at step 0 instead of behind the warm-up: the peak rate is never reached.",
        killers=("tests/unit/train/test_schedule.py::test_every_step_has_the_rate_of_the_law",),
    ),
    Fault(
        id="adamw-without-decay",
        file="glmv/train/optimizer.py",
        line='"weight_decay": config.weight_decay,',
        replacement='"weight_decay": 0.0,',
        sentence="weight_decay of the config is ignored.",
        killers=("tests/unit/train/test_optimizer.py::test_the_optimizer_is_the_laws",),
    ),
    Fault(
        id="adamw-betas-swapped",
        file="glmv/train/optimizer.py",
        line='"betas": (config.adam_beta1, config.adam_beta2),',
        replacement='"betas": (config.adam_beta2, config.adam_beta1),',
        sentence="The first moment forgets slowly and the second quickly.",
        killers=("tests/unit/train/test_optimizer.py::test_the_optimizer_is_the_laws",),
    ),
    Fault(
        id="freeze-thaws",
        file="glmv/train/optimizer.py",
        line="parameters[name].requires_grad_(False)",
        replacement="parameters[name].requires_grad_(True)",
        sentence="model.freeze is accepted and freezes nothing.",
        killers=("tests/unit/train/test_optimizer.py::test_frozen_parameters_are_not_in_the_optimizer",),
    ),
    Fault(
        id="router-unit-in-bf16",
        file="glmv/parallel/fsdp.py",
        line="return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)",
        replacement="return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)",
        sentence="The router's weight is rounded to bf16 before it scores, within the noise of every gradient.",
        killers=("tests/distributed/test_fsdp.py::test_mixed_precision_rounds_where_it_should",),
    ),
)
