"""The vision tower: patches of pixels in, one feature of the text decoder's width per 2x2 patches out."""
# Shapes: N patches, P pixels of a patch (3 * 2 * 14 * 14), H hidden, D head dim, O out hidden, M = N / 4 features.

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glmv.model.config import VisionConfig
from glmv.model.layers import Embedding, GatedMLP, LayerNorm, Linear, RMSNorm
from glmv.model.position_embedding import interpolate
from glmv.model.rotary import VisionRotary
from glmv.ops.attention import segment_attention
from glmv.ops.kernels import Kernels
from glmv.ops.precision import at_least_fp32
from glmv.ops.rope import rotate
from glmv.ops.swiglu import swiglu


def patch_coordinates(grids: list[tuple[int, int, int]], merge: int) -> tuple[Tensor, Tensor]:
    """(row, column) of every patch [N, 2] and the (rows, columns) of its image [N, 2], int64 on the CPU.

    Patches are ordered by merge x merge blocks: block row, block column, row in block, column in block.
    """
    coordinates, sizes = [], []
    for t, h, w in grids:
        grid_HW2 = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), dim=-1)
        blocks = grid_HW2.unflatten(0, (-1, merge)).unflatten(2, (-1, merge)).transpose(1, 2)
        coordinates.append(blocks.reshape(h * w, 2).repeat(t, 1))
        sizes.append(torch.tensor([[h, w]]).expand(t * h * w, 2))
    return torch.cat(coordinates), torch.cat(sizes)


def segment_lengths(grids: list[tuple[int, int, int]]) -> list[int]:
    """Patches of each attention segment: an image, or one temporal patch of a video."""
    return [h * w for t, h, w in grids for _ in range(t)]


class PatchEmbed(nn.Module):
    """A Conv3d whose stride is its kernel, so one matmul: its parameters keep the convolution's names and shapes."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = Kernel(config.hidden_size, config.in_channels, *kernel)

    def forward(self, pixel_values_NP: Tensor) -> Tensor:
        """[N, P] -> [N, H] in the weight's dtype."""
        weight_HP = self.proj.weight.flatten(1)
        return F.linear(pixel_values_NP.to(weight_HP.dtype), weight_HP, self.proj.bias)


class Kernel(nn.Module):
    """Weight [out, in, ...] and bias [out] of a convolution."""

    def __init__(self, out_channels: int, in_channels: int, *kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))


class VisionEmbeddings(nn.Module):
    """The learned position table; see `glmv.model.position_embedding`."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.position_embedding = Embedding((config.image_size // config.patch_size) ** 2, config.hidden_size)

    def forward(self, hidden_NH: Tensor, coordinate_N2: Tensor, size_N2: Tensor) -> Tensor:
        """Add each patch's position embedding."""
        return hidden_NH + interpolate(self.position_embedding.weight, coordinate_N2, size_N2)


class VisionAttention(nn.Module):
    """Full attention inside each segment, axial RoPE over the whole head in fp32."""

    def __init__(self, config: VisionConfig, kernels: Kernels) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.kernels = kernels
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_NH: Tensor, lengths: list[int], cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        query, key, value = self.qkv(hidden_NH).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        query, key = (
            rotate(states.to(cos_N1D.dtype), cos_N1D, sin_N1D, kernels=self.kernels).to(states.dtype)
            for states in (query, key)
        )
        query, key, value = (states.transpose(0, 1) for states in (query, key, value))
        output = segment_attention(query, key, value, lengths, implementation=self.kernels.attention)
        return self.proj(output.transpose(0, 1).flatten(1))


class VisionBlock(nn.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x)). The MLP is as wide as the tower's output, not its own hidden."""

    def __init__(self, config: VisionConfig, kernels: Kernels) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.norm2 = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.attn = VisionAttention(config, kernels)
        self.mlp = GatedMLP(config.hidden_size, config.out_hidden_size)

    def forward(self, hidden_NH: Tensor, lengths: list[int], cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
        """[N, H] -> [N, H] in the weights' dtype; cos and sin stay fp32, which is why the block casts, not FSDP."""
        hidden_NH = hidden_NH.to(self.norm1.weight.dtype)
        hidden_NH = hidden_NH + self.attn(self.norm1(hidden_NH), lengths, cos_N1D, sin_N1D)
        return hidden_NH + self.mlp(self.norm2(hidden_NH))


class PatchMerger(nn.Module):
    """Projection, LayerNorm, GELU, then a gated MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, inner = config.out_hidden_size, config.intermediate_size
        self.proj = Linear(size, size, bias=False)
        self.post_projection_norm = LayerNorm(size, eps=1e-5)
        self.gate_proj = Linear(size, inner, bias=False)
        self.up_proj = Linear(size, inner, bias=False)
        self.down_proj = Linear(inner, size, bias=False)

    def forward(self, hidden_MO: Tensor) -> Tensor:
        """[M, O] -> [M, O]."""
        hidden_MO = F.gelu(self.post_projection_norm(self.proj(hidden_MO)))
        return self.down_proj(swiglu(self.gate_proj(hidden_MO), self.up_proj(hidden_MO)))


class VisionModel(nn.Module):
    """Pixels of any number of images in, their features in the same order out."""

    def __init__(self, config: VisionConfig, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.embeddings = VisionEmbeddings(config)
        self.patch_embed = PatchEmbed(config)
        self.rotary_pos_emb = VisionRotary(config)
        self.blocks = nn.ModuleList(VisionBlock(config, kernels) for _ in range(config.depth))
        self.merger = PatchMerger(config)
        self.post_conv_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.downsample = Kernel(
            config.out_hidden_size, config.hidden_size, config.spatial_merge_size, config.spatial_merge_size
        )
        self.post_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(self, pixel_values_NP: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Features [M, O].

        Args:
            pixel_values_NP: patches in merge-block order, pixels in (channel, time, row, column) order.
            image_grid_thw: int64 [images, 3], patches of each image or video.
        """
        grids = [(t, h, w) for t, h, w in image_grid_thw.tolist()]
        coordinate_N2, size_N2 = (
            values.to(pixel_values_NP.device) for values in patch_coordinates(grids, self.config.spatial_merge_size)
        )
        hidden_NH = self.post_conv_layernorm(self.patch_embed(pixel_values_NP))
        hidden_NH = self.embeddings(hidden_NH, coordinate_N2, size_N2)
        cos_N1D, sin_N1D = self.rotary_pos_emb(coordinate_N2, at_least_fp32(hidden_NH.dtype))
        lengths = segment_lengths(grids)
        for block in self.blocks:
            hidden_NH = block(hidden_NH, lengths, cos_N1D, sin_N1D)
        return self.merger(self.merge(self.post_layernorm(hidden_NH)))

    def black_picture(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Patches and grid of the smallest picture there is: what a rank runs that has none."""
        merge = self.config.spatial_merge_size
        black_NP = torch.zeros(merge * merge, self.config.pixels_per_patch, device=device)
        return black_NP, torch.tensor([[1, merge, merge]])

    def merge(self, hidden_NH: Tensor) -> Tensor:
        """The stride-2 convolution over each 2x2 block, as one matmul: [N, H] -> [M, O]."""
        block = self.config.spatial_merge_size**2
        pixels_MX = hidden_NH.unflatten(0, (-1, block)).transpose(1, 2).flatten(1)
        return F.linear(pixels_MX, self.downsample.weight.flatten(1), self.downsample.bias)
