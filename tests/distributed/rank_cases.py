"""Which micro-batches ranks share out between them."""

# Four micro-batches each: one rank takes all of them in turn, two ranks two each, four ranks one each.
CASES = {
    "all_different": ["picture", "pictures", "text", "ten"],
    "text_beside_pictures": ["text", "one", "picture", "pictures"],
    "text_only": ["text", "one", "three", "ten"],
    "uneven_targets": ["one", "three", "ten", "fifty"],
    "uneven_targets_in_one_batch": ["mixed_lengths", "masked", "masked", "masked"],
    "videos_and_documents": ["picture", "masked", "video_beside_pictures", "packed"],
    "masked_ranks": ["masked_picture", "masked", "picture", "masked"],
}
# Two ranks, which accumulate twice, go through all cases and number formats; other worlds go through these.
CORE = ["all_different", "text_beside_pictures", "uneven_targets"]
# Micro-batches, samples and documents of unlike numbers of targets, one of none.
LOSS_TYPES = ["default", "per_sample_loss", "raw"]
LOSS_CASE = "videos_and_documents"
NOTHING_TO_LEARN = ["masked", "masked_picture", "masked", "masked"]


def cases_of(nproc: int) -> list[str]:
    """The cases that a world of this size runs."""
    return list(CASES) if nproc == 2 else CORE
