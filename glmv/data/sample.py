"""What one sample is to the trainer."""
# Shapes: S tokens, N vision patches, P = 3*2*14*14 values per patch, n pictures or videos.

from dataclasses import dataclass

from torch import Tensor

IGNORED = -100
"""Label of a token that is not learned."""


@dataclass(frozen=True)
class Sample:
    """One conversation as tokens and pixels."""

    sample_id: str
    """File name and index, for example `conversations.json[3]`."""
    input_ids: Tensor
    """[S] int64."""
    labels: Tensor
    """[S] int64, not shifted: the label of a position is the token that stands there, or -100."""
    mm_token_type_ids: Tensor
    """[S] int64: 1 where a picture's features go, 2 where a video's do, 0 at text."""
    pixel_values: Tensor | None
    """[N, P] fp32 of all pictures, in the order of their placeholders; None without pictures."""
    image_grid_thw: Tensor | None
    """[n, 3] int64: patches of every picture along time, height and width."""
    pixel_values_videos: Tensor | None = None
    """[N, P] fp32 of all videos, in order; None without videos."""
    video_grid_thw: Tensor | None = None
    """[n, 3] int64: patches of every video along time, height and width."""


@dataclass(frozen=True)
class Dropped:
    """A sample that is left out, and why."""

    sample_id: str
    reason: str
