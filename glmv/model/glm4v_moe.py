"""GLM-4.5V: the vision tower, the text decoder and the head, glued together."""
# Shapes: B batch, S sequence, V vocab, H hidden, N patches, P pixels of a patch, M image features.

import torch
from torch import Tensor, nn

from glmv.model.config import ConfigError, ModelConfig
from glmv.model.layers import Linear
from glmv.model.positions import InputError, mrope_positions
from glmv.model.rotary import reset_rotaries
from glmv.model.text import TextModel, padding
from glmv.model.vision import VisionModel
from glmv.ops.attention import IMPLEMENTATIONS


class Glm4vMoeModel(nn.Module):
    """Vision tower and text decoder; returns the decoder's normalised hidden states."""

    def __init__(self, config: ModelConfig, attn_implementation: str, use_grouped_expert_matmul: bool) -> None:
        super().__init__()
        self.config = config
        self.visual = VisionModel(config.vision, attn_implementation)
        self.language_model = TextModel(config.text, attn_implementation, use_grouped_expert_matmul)

    def forward(
        self,
        input_ids_BS: Tensor,
        attention_mask_BS: Tensor | None,
        mm_token_type_ids_BS: Tensor | None,
        pixel_values_NP: Tensor | None,
        image_grid_thw: Tensor | None,
    ) -> Tensor:
        """Hidden states [B, S, H]; arguments as `Glm4vMoeForConditionalGeneration.forward`."""
        merge = self.config.vision.spatial_merge_size
        types_BS = torch.zeros_like(input_ids_BS) if mm_token_type_ids_BS is None else mm_token_type_ids_BS
        check_inputs(types_BS, pixel_values_NP, image_grid_thw, merge)
        positions_3BS = mrope_positions(types_BS, image_grid_thw, merge, attention_mask_BS)
        features_MH = self.features(pixel_values_NP, image_grid_thw, input_ids_BS.device)
        return self.language_model(input_ids_BS, features_MH, types_BS != 0, positions_3BS, padding(attention_mask_BS))

    def features(self, pixel_values_NP: Tensor | None, image_grid_thw: Tensor | None, device: torch.device) -> Tensor:
        """Image features [M, H]. Without images, those of one black 2x2 image, of which the decoder uses none.

        The tower runs in every batch, so that ranks with and without images meet in the same collectives.
        """
        if pixel_values_NP is None or image_grid_thw is None:
            merge, pixels = self.config.vision.spatial_merge_size, self.config.vision.pixels_per_patch
            pixel_values_NP = torch.zeros(merge * merge, pixels, device=device)
            image_grid_thw = torch.tensor([[1, merge, merge]])
        return self.visual(pixel_values_NP, image_grid_thw)


class Glm4vMoeForConditionalGeneration(nn.Module):
    """GLM-4.5V as it is trained: logits for every position, no cache, no loss.

    Parameter names are the checkpoint's, except that the routed experts are stacked: `mlp.experts.gate_up_proj`
    [E, H, 2I] (gate half first) and `mlp.experts.down_proj` [E, I, H]. All parameters are uninitialised memory until
    a checkpoint is loaded.

    Args:
        config: the architecture.
        use_grouped_expert_matmul: one kernel for all experts where device and dtype have it, a loop elsewhere.
        attn_implementation: "sdpa" or "eager".
    Raises:
        ConfigError: an unknown `attn_implementation`.
    """

    def __init__(
        self, config: ModelConfig, *, use_grouped_expert_matmul: bool = True, attn_implementation: str = "sdpa"
    ) -> None:
        super().__init__()
        if attn_implementation not in IMPLEMENTATIONS:
            raise ConfigError(
                f"attn_implementation = {attn_implementation!r} is not built. Choose {' or '.join(IMPLEMENTATIONS)}."
            )
        self.config = config
        self.model = Glm4vMoeModel(config, attn_implementation, use_grouped_expert_matmul)
        self.lm_head = Linear(config.text.hidden_size, config.text.vocab_size, bias=False)

    def forward(
        self,
        input_ids_BS: Tensor,
        *,
        attention_mask_BS: Tensor | None = None,
        mm_token_type_ids_BS: Tensor | None = None,
        pixel_values_NP: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] in the compute dtype.

        Args:
            input_ids_BS: int64.
            attention_mask_BS: 1 for real tokens, 0 for padding on either side; None when nothing is padded.
            mm_token_type_ids_BS: 0 text, 1 image, 2 video frame; required with images.
            pixel_values_NP: patches of all images, in token order.
            image_grid_thw: int64 [images, 3]: temporal patches, rows and columns of each image before merging.
        Raises:
            InputError: token types, pixels and grids do not fit together.
        """
        hidden_BSH = self.model(input_ids_BS, attention_mask_BS, mm_token_type_ids_BS, pixel_values_NP, image_grid_thw)
        return self.lm_head(hidden_BSH)

    def reset_buffers(self) -> None:
        """Recompute every non-persistent buffer; call after `to_empty`, which leaves them uninitialised."""
        reset_rotaries(self)


def check_inputs(types_BS: Tensor, pixel_values_NP: Tensor | None, image_grid_thw: Tensor | None, merge: int) -> None:
    """Refuse a batch whose image tokens, features and pixels differ in number."""
    if (pixel_values_NP is None) != (image_grid_thw is None):
        raise InputError("pixel_values and image_grid_thw come together: a batch has both, or neither.")
    grids = [] if image_grid_thw is None else image_grid_thw.tolist()
    for t, h, w in grids:
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise InputError(
                f"image_grid_thw has a row [{t}, {h}, {w}]: rows and columns must be multiples of "
                f"spatial_merge_size {merge}, and none may be 0."
            )
    patches = sum(t * h * w for t, h, w in grids)
    tokens, features = int((types_BS != 0).sum()), patches // merge**2
    if tokens != features:
        raise InputError(
            f"image tokens and image features do not match: mm_token_type_ids marks {tokens} tokens, "
            f"image_grid_thw describes {features} features.\n"
            "Give mm_token_type_ids with every image, and one token per feature; a cutoff inside an image breaks this."
        )
    if pixel_values_NP is not None and pixel_values_NP.shape[0] != patches:
        raise InputError(f"pixel_values has {pixel_values_NP.shape[0]} patches, image_grid_thw describes {patches}.")
