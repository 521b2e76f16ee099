"""Faults of shared sequences: parts, Ulysses, labels and positions over ranks, the shared vision tower."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

WHOLE = "tests/distributed/test_context_parallel.py"
ATTENTION = "tests/distributed/test_context_parallel_attention.py"
THREADS = "tests/unit/parallel/test_ring_and_ulysses.py"
PARTS = "tests/unit/parallel/test_sequence.py"
TOWER = "tests/unit/parallel/test_vision_parallel.py"
UNIT = "tests/unit/parallel/test_sharing_ranks.py"
GRID = "tests/distributed/test_grid.py::test_parity"
GRID_ULYSSES = f"{GRID}[4-fsdp-2x2x1-alltoall-u2-logits-1-off-per_token_loss-nothing-even-fp64]"
GRID_RING = f"{GRID}[4-fsdp-1x1x4-none-r2-logits-1-off-per_token_loss-nothing-even-fp64]"
GRID_BOTH = f"{GRID}[4-fsdp-4x1x1-balance-u2r2-logits-2-on-per_sample_loss-nothing-even-fp64]"
# What the first attention of the decoder returns: tokens, positions, features or attention itself are wrong.
WRONG_ATTENTION = r"output of .*layers\.0\.self_attn"

FAULTS: tuple[Fault, ...] = (
    Fault(
        id="cp-labels-shifted-after-split",
        file="glmv/train/step.py",
        line="target_BS, share_BS = context.split_targets(batch.document_ids, target_BS, share_BS)",
        replacement="target_BS, share_BS = context.split_targets(batch.document_ids, batch.labels, share_BS)\n            target_BS = shift(target_BS)",
        sentence="The last token of every part has no target, or that of a token far away: one wrong target a chunk.",
        killers=(
            f"{WHOLE}::test_two_ranks_share_sequences[ulysses2-pictures]",
            f"{WHOLE}::test_the_only_label_stands_at_the_start_of_a_part[ulysses2-5]",
            GRID_ULYSSES,
        ),
        first="^loss",
    ),
    Fault(
        id="cp-targets-counted-on-every-rank",
        file="glmv/train/step.py",
        line="return int(count) // sharers",
        replacement="return int(count)",
        sentence="Each target counts once for every rank that shares its sequence: loss and gradients shrink by the degree.",
        killers=(f"{WHOLE}::test_two_ranks_share_sequences[ulysses2-pictures]", GRID_ULYSSES),
        first="^loss",
    ),
    Fault(
        id="cp-micro-batches-counted-on-every-rank",
        file="glmv/train/step.py",
        line="objective = Objective(loss_type, targets, micro_batches=len(micro_batches) * dist.get_world_size() // sharers)",
        replacement="objective = Objective(loss_type, targets, micro_batches=len(micro_batches) * dist.get_world_size())",
        sentence="Losses that are means of micro-batches are averaged over the ranks of a sequence once more.",
        killers=(f"{WHOLE}::test_every_loss_type_divides_by_what_the_whole_micro_batch_has[default]", GRID_BOTH),
        first="^loss",
    ),
    Fault(
        id="cp-loss-divided-by-local-count",
        file="glmv/parallel/context_parallel.py",
        line="return partition.split(target_BS, IGNORE_INDEX), partition.split(share_BS, 0)",
        replacement="own = partition.split(share_BS, 0)\n        return partition.split(target_BS, IGNORE_INDEX), own / own.sum().clamp(min=1e-9) * share_BS.sum() / 2",
        sentence="Every part is averaged on its own: tokens weigh by how many targets their part happens to have.",
        killers=(f"{WHOLE}::test_two_ranks_share_sequences[ring2-pictures]", GRID_RING),
        first="^loss",
    ),
    Fault(
        id="cp-padding-counted",
        file="glmv/parallel/context_parallel.py",
        line="return partition.split(target_BS, IGNORE_INDEX), partition.split(share_BS, 0)",
        replacement="return partition.split(target_BS, 0), partition.split(share_BS, float(share_BS.max()))",
        sentence="Padding that nobody wrote is learned from.",
        killers=(f"{WHOLE}::test_two_ranks_share_sequences[ring2-pictures]", GRID_RING),
        first="^loss",
    ),
    Fault(
        id="cp-position-ids-restarted",
        file="glmv/parallel/context_parallel.py",
        line="partition.split(positions_3BS, 0).to(device),",
        replacement="partition.split(positions_3BS - positions_3BS[..., partition.index_BL[:, 0].clamp(min=0)[0], None], 0).to(device),",
        sentence="Each rank counts positions from its own first token: tokens of different ranks seem to be neighbours.",
        killers=(f"{WHOLE}::test_two_ranks_share_sequences[ulysses2-pictures]", GRID_ULYSSES),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="cp-features-counted-per-row",
        file="glmv/parallel/context_parallel.py",
        line="number_BS = is_kind_BS.flatten().cumsum(0).view_as(types_BS) - 1",
        replacement="number_BS = is_kind_BS.cumsum(1) - 1",
        sentence="The second row's pictures are those of the first.",
        killers=(f"{WHOLE}::test_two_ranks_share_sequences[ulysses2-pictures]", GRID_ULYSSES),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="cp-picture-restarts-at-a-border",
        file="glmv/parallel/context_parallel.py",
        line="own_M = partition.split(number_BS, PADDING)[own_types_BL == kind]",
        replacement="own_M = number_BS.new_tensor(range(int((own_types_BL == kind).sum())))",
        sentence="A picture that straddles a border begins anew on the second rank.",
        killers=(f"{WHOLE}::test_two_ranks_share_sequences[ulysses2-pictures]", GRID_ULYSSES),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="cp-documents-leak-through-ulysses",
        file="glmv/parallel/context_parallel.py",
        line="packed = Visible(documents=list(documents) if len(documents) > 1 else None)",
        replacement="packed = Visible()",
        sentence="Packed documents see each other.",
        killers=(
            f"{THREADS}::test_any_sequence_over_any_ranks",
            f"{ATTENTION}::test_two_ranks_attend_as_one[ulysses2-packed-flash-fp64]",
            GRID_ULYSSES,
        ),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="cp-documents-leak-through-the-ring",
        file="glmv/parallel/ring.py",
        line="return _RingAttention.apply(query_BNCD, key_BNCD, value_BNCD, self, tuple(documents), implementation)",
        replacement="return _RingAttention.apply(query_BNCD, key_BNCD, value_BNCD, self, (sum(documents),), implementation)",
        sentence="Packed documents see each other, and not in the order of time.",
        killers=(
            f"{THREADS}::test_any_sequence_over_any_ranks",
            f"{ATTENTION}::test_two_ranks_attend_as_one[ring2-packed-flash-fp64]",
            GRID_RING,
        ),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="cp-ranks-in-another-order",
        file="glmv/parallel/sequence.py",
        line="return divmod(rank, self.ulysses)",
        replacement="return divmod(rank, self.ring)[::-1]",
        sentence="Tokens are dealt to other ranks than those that exchange them.",
        killers=(
            f"{PARTS}::test_ulysses_cuts_a_ring_rank_s_part_in_order",
            f"{ATTENTION}::test_four_ranks_attend_as_one[ring2_ulysses2-length37-flash]",
            GRID_BOTH,
        ),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="zigzag-left-out",
        file="glmv/parallel/sequence.py",
        line="pieces.append(padded if ring == 1 else padded[[rank, 2 * ring - 1 - rank]])",
        replacement="pieces.append(padded if ring == 1 else padded[[2 * rank, 2 * rank + 1]])",
        sentence="The ring's blocks are attended as if they were zigzag: early tokens see the future.",
        killers=(
            f"{PARTS}::test_every_rank_holds_what_the_law_gives_it",
            f"{THREADS}::test_any_sequence_over_any_ranks",
            GRID_RING,
        ),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="zigzag-chunks-swapped",
        file="glmv/parallel/sequence.py",
        line="pieces.append(padded if ring == 1 else padded[[rank, 2 * ring - 1 - rank]])",
        replacement="pieces.append(padded if ring == 1 else padded[[2 * ring - 1 - rank, rank]])",
        sentence="The late chunk stands before the early one, and a causal mask lets it be seen.",
        killers=(
            f"{PARTS}::test_two_chunks_of_a_document_on_each_of_two_ring_ranks",
            f"{THREADS}::test_any_sequence_over_any_ranks",
            GRID_RING,
        ),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="padding-in-front-of-a-document",
        file="glmv/parallel/sequence.py",
        line="padded = F.pad(own, (0, count * chunk - len(own)), value=PADDING).view(count, chunk)",
        replacement="padded = F.pad(own, (count * chunk - len(own), 0), value=PADDING).view(count, chunk)",
        sentence="Every token attends to padding.",
        killers=(
            f"{PARTS}::test_padding_stands_behind_its_document_on_every_ring_rank",
            f"{THREADS}::test_any_sequence_over_any_ranks",
            GRID_RING,
        ),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="ulysses-key-replicas-not-summed",
        file="glmv/parallel/ulysses.py",
        line="return states_BNLD.repeat_interleave(math.lcm(heads, self.size) // heads, dim=1)",
        replacement="copies = [states_BNLD.detach()] * (math.lcm(heads, self.size) // heads - 1)\n        return torch.stack([states_BNLD, *copies], 2).flatten(1, 2)",
        sentence="A key head that several ranks use learns from one of them only.",
        killers=(f"{ATTENTION}::test_key_heads_fewer_than_ranks_are_repeated_and_their_gradients_summed[ulysses4-1]",),
    ),
    Fault(
        id="ulysses-key-heads-tiled",
        file="glmv/parallel/ulysses.py",
        line="return states_BNLD.repeat_interleave(math.lcm(heads, self.size) // heads, dim=1)",
        replacement="return states_BNLD.repeat(1, math.lcm(heads, self.size) // heads, 1, 1)",
        sentence="Query heads get the keys of another group.",
        killers=(f"{ATTENTION}::test_key_heads_fewer_than_ranks_are_repeated_and_their_gradients_summed[ulysses4-2]",),
    ),
    Fault(
        id="ulysses-heads-interleaved",
        file="glmv/parallel/ulysses.py",
        line="parts = [part.unflatten(1, (self.size, -1)).movedim(1, 0) for part in states]",
        replacement="parts = [part.unflatten(1, (-1, self.size)).movedim(2, 0) for part in states]",
        sentence="Every rank takes each U-th head, and gives back heads in another order than it took them.",
        killers=(
            f"{THREADS}::test_any_sequence_over_any_ranks",
            f"{ATTENTION}::test_two_ranks_attend_as_one[ulysses2-length16-eager-fp64]",
            GRID_ULYSSES,
        ),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="ulysses-parts-in-reverse-order",
        file="glmv/parallel/ulysses.py",
        line="whole_BNCD = arrived_UBNLD.movedim(0, 2).flatten(2, 3)",
        replacement="whole_BNCD = arrived_UBNLD.flip(0).movedim(0, 2).flatten(2, 3)",
        sentence="The second half of a sequence stands before the first.",
        killers=(f"{THREADS}::test_any_sequence_over_any_ranks", GRID_ULYSSES),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="vision-features-in-order-of-ranks",
        file="glmv/parallel/vision_parallel.py",
        line="return gathered_MH.index_select(0, place_M.to(gathered_MH.device))",
        replacement="return gathered_MH",
        sentence="Pictures go to each other's places.",
        killers=(
            f"{TOWER}::test_features_and_gradients_are_those_of_one_rank[unlike_pictures-2]",
            f"{WHOLE}::test_two_ranks_share_sequences[ulysses2-pictures]",
            GRID_ULYSSES,
        ),
        first=WRONG_ATTENTION,
    ),
    Fault(
        id="vision-gradients-not-summed",
        file="glmv/parallel/vision_parallel.py",
        line="return ctx.vision.reduce(torch.stack(parts))[: ctx.counts[ctx.vision.rank]], None, None",
        replacement="return parts[ctx.vision.rank][: ctx.counts[ctx.vision.rank]], None, None",
        sentence="The tower learns only from tokens on the rank that computed their picture.",
        killers=(
            f"{TOWER}::test_features_and_gradients_are_those_of_one_rank[unlike_pictures-2]",
            f"{WHOLE}::test_two_ranks_share_sequences[ulysses2-pictures]",
            GRID_ULYSSES,
        ),
        first=r"gradient of model\.visual\.merger",
    ),
    Fault(
        id="vision-all-on-one-rank",
        file="glmv/parallel/vision_parallel.py",
        line="load[rank] += sizes[segment]",
        replacement="load[rank] += 0",
        sentence="One rank runs the whole tower while the others wait.",
        killers=(f"{TOWER}::test_no_rank_has_more_than_another_and_one_segment",),
    ),
    Fault(
        id="vision-idle-rank-runs-nothing",
        file="glmv/parallel/vision_parallel.py",
        line="features_mH = tower(*tower.black_picture(pixel_values_NP.device))[:0]",
        replacement="features_mH = pixel_values_NP.new_zeros(0, 5)",
        sentence="A rank without a segment stays away from the tower's collectives, and the others wait for it.",
        killers=(
            f"{TOWER}::test_no_segment_is_computed_twice_and_idle_ranks_run_the_smallest_picture[one_picture-2]",
            f"{TOWER}::test_a_rank_without_a_segment_has_gradients_of_zeros",
        ),
    ),
    Fault(
        id="cp-ranks-read-other-samples",
        file="glmv/train/batches.py",
        line="dp_rank=process.rank // sharers,",
        replacement="dp_rank=process.rank % (process.world_size // sharers),",
        sentence="Ranks that share a sequence split different ones.",
        killers=(f"{UNIT}::test_ranks_that_share_sequences_read_the_same_samples_and_others_do_not[ring2]",),
    ),
    Fault(
        id="cp-samples-counted-on-every-rank",
        file="glmv/train/trainer.py",
        line="training.micro_batch_size * training.gradient_accumulation_steps * self.process.world_size // self.sharers",
        replacement="training.micro_batch_size * training.gradient_accumulation_steps * self.process.world_size",
        sentence="Consumed samples are reported, and saved, as many times as ranks share them.",
        killers=(f"{UNIT}::test_the_samples_of_a_step_are_counted_once",),
    ),
)
