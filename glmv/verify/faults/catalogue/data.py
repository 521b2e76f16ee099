"""Faults of what goes in and out: config, samples and labels, checkpoints."""

from __future__ import annotations

from glmv.verify.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
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
        id="stop-token-unlearned",
        file="glmv/data/template.py",
        line="return inside | {follower}",
        replacement="return inside",
        sentence="The model never learns to end its turn.",
        killers=("tests/unit/data/test_template.py::test_two_turns_token_by_token",),
    ),
    Fault(
        id="config-unknown-keys-ignored",
        file="glmv/config/section.py",
        line='extra="forbid",',
        replacement='extra="ignore",',
        sentence="A mistyped key is silently without effect.",
        killers=("tests/unit/config/test_config_refusals.py::test_a_wrong_key_or_value_is_told",),
    ),
    Fault(
        id="labels-of-history-kept",
        file="glmv/data/template.py",
        line="for begin, end in answers[-1:] if mask_history else answers:",
        replacement="for begin, end in answers:",
        sentence="mask_history is ignored: earlier answers are trained on.",
        killers=("tests/unit/data/test_template.py::test_mask_history_learns_the_last_turn_and_nothing_else",),
    ),
    Fault(
        id="pictures-not-turned",
        file="glmv/data/images.py",
        line="return to_rgb(ImageOps.exif_transpose(image))",
        replacement="return to_rgb(image)",
        sentence="Photographs that were taken upright are trained lying down.",
        killers=("tests/unit/data/test_images.py::test_a_picture_is_turned_as_its_exif_says",),
    ),
    Fault(
        id="video-padded-with-first-frame",
        file="glmv/data/video.py",
        line="return [min(place, count - 1) for place in range(full)]",
        replacement="return [place if place < count else 0 for place in range(full)]",
        sentence="A clip with an odd number of frames ends by jumping back to its beginning.",
        killers=(
            "tests/unit/data/test_video.py::test_padding_is_the_laws",
            "tests/unit/data/test_video.py::test_patches_are_those_of_transformers[3-2]",
        ),
    ),
    Fault(
        id="video-seconds-of-the-wrong-frame",
        file="glmv/data/video.py",
        line="return [int(frame_indices[first] / fps) for first in firsts]",
        replacement="return [int(frame_indices[min(first + 1, len(frame_indices) - 1)] / fps) for first in firsts]",
        sentence="Every temporal patch is told the second of its second frame: grounding in time is trained late.",
        killers=(
            "tests/unit/data/test_video.py::test_seconds_are_the_laws",
            "tests/unit/data/test_video.py::test_a_video_is_what_the_law_says",
        ),
    ),
    Fault(
        id="export-in-training-dtype",
        file="glmv/checkpoint/dcp_to_hf.py",
        line="key, dtype = self._manifest.dcp_key(name), DTYPES[self._manifest.tensors[name].dtype]",
        replacement='key, dtype = self._manifest.dcp_key(name), DTYPES["F32"]',
        sentence="Exports are written in fp32, twice the size of what was published.",
        killers=(
            "tests/unit/checkpoint/test_training_checkpoint.py::test_a_training_checkpoint_exports_in_the_published_dtypes",
        ),
    ),
)
