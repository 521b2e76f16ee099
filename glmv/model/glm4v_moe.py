"""GLM-4.5V: the vision tower, the text decoder and the head, glued together."""
# Shapes: B batch, S sequence, V vocab, H hidden, N patches, P pixels of a patch, M features.

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from glmv.model.config import ConfigError, ModelConfig
from glmv.model.head import Head
from glmv.model.inputs import Media, OnHost, check_documents, check_media, gather_media, on_host
from glmv.model.positions import IMAGE, TEXT, mrope_positions
from glmv.model.rotary import reset_rotaries
from glmv.model.text import TextModel, visible_tokens
from glmv.model.vision import VisionModel
from glmv.ops.attention import IMPLEMENTATIONS
from glmv.ops.chunked_loss import Targets
from glmv.ops.documents import document_ids
from glmv.ops.kernels import Kernels


class Context(Protocol):
    """The ranks that share a batch; see `glmv.parallel.context_parallel`."""

    @property
    def vision(self) -> Callable[..., Tensor]:
        """Runs the vision tower on all of them."""
        ...

    @property
    def split(self) -> Callable[..., tuple[Any, ...]]:
        """This rank's part of what the text decoder gets."""
        ...


class Glm4vMoeModel(nn.Module):
    """Vision tower and text decoder; returns the decoder's normalised hidden states.

    `context` is set from outside under context parallelism: the decoder then runs on this rank's part of the batch.
    """

    context: Context | None = None

    def __init__(self, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.visual = VisionModel(config.vision, kernels)
        self.language_model = TextModel(config.text, kernels)

    def forward(
        self,
        input_ids_BS: Tensor,
        attention_mask_BS: Tensor | None,
        mm_token_type_ids_BS: Tensor | None,
        media: dict[int, Media],
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """Hidden states [B, S, H]; `media` by token type, the others as in `Glm4vMoeForConditionalGeneration`.

        Mask, token types, grids and borders are on the host: nothing here waits for the device.
        """
        merge, shape, device = self.config.vision.spatial_merge_size, input_ids_BS.shape, input_ids_BS.device
        lengths = None if cu_seqlens is None else check_documents(cu_seqlens, shape, attention_mask_BS)
        mask_BS = torch.ones(shape, dtype=torch.int64) if attention_mask_BS is None else attention_mask_BS
        document_BS = document_ids(mask_BS, cu_seqlens)
        types_BS = torch.zeros_like(mask_BS) if mm_token_type_ids_BS is None else mm_token_type_ids_BS
        types_BS = types_BS.masked_fill(document_BS < 0, TEXT)  # whatever padding says it is
        check_media(types_BS, media, merge)
        grids = {kind: own.grid_thw for kind, own in media.items()}
        positions_3BS = mrope_positions(types_BS, grids, merge, document_BS)
        features = self.features(media, device)
        if self.context is not None:
            own = self.context.split(input_ids_BS, features, types_BS, positions_3BS, document_BS)
            return self.language_model(*own)
        visible = visible_tokens(attention_mask_BS, lengths, device)
        return self.language_model(input_ids_BS, features, types_BS, positions_3BS.to(device), visible)

    def features(self, media: dict[int, Media], device: torch.device) -> dict[int, Tensor]:
        """Features [M, H] by token type. Without any media, those of one black 2x2 image, which no token takes.

        The tower runs once in every batch, whatever is in it, so that all ranks meet in the same collectives.
        """
        if not media:
            return {IMAGE: self.visual(*self.visual.black_picture(device))}
        pixel_values_NP = torch.cat([own.pixel_values_NP for own in media.values()])
        grid_thw = torch.cat([own.grid_thw for own in media.values()])
        if self.context is None:
            features_MH = self.visual(pixel_values_NP, grid_thw)
        else:
            features_MH = self.context.vision(self.visual, pixel_values_NP, grid_thw)
        counts = [len(own.pixel_values_NP) // self.config.vision.spatial_merge_size**2 for own in media.values()]
        return dict(zip(media, features_MH.split(counts), strict=True))


class Glm4vMoeForConditionalGeneration(nn.Module):
    """GLM-4.5V as it is trained: logits for every position, or the loss of them; no cache.

    Parameter names are the checkpoint's, except that the routed experts are stacked: `mlp.experts.gate_up_proj`
    [E, H, 2I] (gate half first) and `mlp.experts.down_proj` [E, I, H]. All parameters are uninitialised memory until
    a checkpoint is loaded.

    Args:
        config: the architecture.
        kernels: which implementations its operators prefer.
    Raises:
        ConfigError: an unknown `kernels.attention`.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels = Kernels()) -> None:  # noqa: B008 - it is frozen
        super().__init__()
        if kernels.attention not in IMPLEMENTATIONS:
            raise ConfigError(
                f"attn_implementation = {kernels.attention!r} is not built. Choose {' or '.join(IMPLEMENTATIONS)}."
            )
        self.config = config
        self.model = Glm4vMoeModel(config, kernels)
        self.lm_head = Head(config.text.hidden_size, config.text.vocab_size, bias=False)

    def forward(
        self,
        input_ids_BS: Tensor,
        *,
        attention_mask_BS: Tensor | OnHost | None = None,
        mm_token_type_ids_BS: Tensor | OnHost | None = None,
        pixel_values_NP: Tensor | None = None,
        image_grid_thw: Tensor | OnHost | None = None,
        pixel_values_videos_NP: Tensor | None = None,
        video_grid_thw: Tensor | OnHost | None = None,
        cu_seqlens: Tensor | OnHost | None = None,
        targets: Targets | None = None,
    ) -> Tensor:
        """Logits [B, S, V] in the compute dtype; under context parallelism those of this rank's tokens.

        What may be `OnHost` should be, where the model is on an accelerator: else the host waits for it.

        Args:
            input_ids_BS: int64.
            attention_mask_BS: 1 for real tokens, 0 for padding on either side; None when nothing is padded.
            mm_token_type_ids_BS: 0 text, 1 where an image feature replaces the embedding, 2 where a video's does (one
                run of 2s a temporal patch); required with images and videos.
            pixel_values_NP: patches of all images, in token order.
            image_grid_thw: int64 [images, 3]: temporal patches, rows and columns of each image before merging.
            pixel_values_videos_NP, video_grid_thw: the same for videos.
            cu_seqlens: int32 [documents + 1], for one row that packs several documents: document d is at cu_seqlens[d]
                to cu_seqlens[d + 1], sees itself only, and starts at position 0. Tokens behind the last are padding.
            targets: asks for the loss, a scalar, instead of logits; see `glmv.ops.chunked_loss`.
        Raises:
            InputError: token types, pixels, grids and documents do not fit together.
        """
        image_grid_thw, video_grid_thw = on_host(image_grid_thw), on_host(video_grid_thw)
        media = gather_media(pixel_values_NP, image_grid_thw, pixel_values_videos_NP, video_grid_thw)
        mask_BS, types_BS, borders = map(on_host, (attention_mask_BS, mm_token_type_ids_BS, cu_seqlens))
        hidden_BSH = self.model(input_ids_BS, mask_BS, types_BS, media, borders)
        return self.lm_head(hidden_BSH, targets)

    def reset_buffers(self, dtype: torch.dtype | None = None) -> None:
        """Recompute every non-persistent buffer; call after `to_empty`, which leaves them uninitialised.

        Args:
            dtype: round the rotary frequencies to it, as Megatron does with bf16. They stay in an fp32 buffer.
        """
        reset_rotaries(self, dtype)
