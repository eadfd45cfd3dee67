"""DINOv3 vision transformer in plain PyTorch, which loads the official weights in every format.

The backbone normalizes its input itself, because the right mean and std depend on the weights; the
data preprocessor must not normalize again. File formats are handled in ``dinov3_weights.py``, the
transformer block is in ``dinov3_blocks.py``, and its attention in ``rope.py``.

Shapes: N images, C bands, H x W pixels; T tokens, which are 1 class token, the register tokens, and
H/16 * W/16 patches in row order.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import nn

from mapsage.models.frozen_weights import initializer_name
from mapsage.models.lora import LoRAError, add_lora, is_adapter, parse_lora
from mapsage.models.lora.inject import freeze_all_but_adapters

from . import dinov3_weights as weights
from .bands import RGB, adapt_bands, parse_bands, widen_checkpoints
from .dinov3_blocks import NORM_EPS, Block, autocast_dtype, run_recomputed, sixteen_bit_copy
from .dinov3_weights import ARCHS, NORMALIZATION, Arch
from .pixels import BackboneInputError, PixelRange
from .rope import RotaryPositions

PATCH_SIZE = 16


@MODELS.register_module()
class DINOv3ViT(BaseModule):
    """DINOv3 ViT that returns feature maps of stride 16 after the chosen blocks.

    Weights: ``init_cfg=dict(type='Pretrained', checkpoint=...)`` accepts the official hub files,
    Hugging Face 4.x and 5.x folders or safetensors files, timm's files, and checkpoints of this
    class. They are loaded in ``init_weights``, which ``Runner`` calls before it broadcasts the
    parameters. A missing or unused key is an error that names it.

    Normalization: by default the input is RGB in 0..255, and the backbone normalizes it as the
    weights expect. Mean and std are part of the state dict, so the data preprocessor must not
    normalize. For bands other than red, green and blue the weights know no mean and std, so the
    data preprocessor must normalize.

    Source: facebookresearch/dinov3@6876159, dinov3/models/vision_transformer.py.

    Args:
        arch: Name 'small', 'small+', 'base', 'large', 'huge+' or '7B', or a dict of ``embed_dims,
            num_layers, num_heads, feedforward_channels`` and optionally ``gated_mlp`` (False),
            ``num_registers`` (4), ``qkv_bias`` (True).
        out_indices: Indices of the blocks whose output is returned, ascending, counted from 0; by
            default four evenly spaced ones. Blocks after the last index are not built.
        final_norm: Whether to apply the model's final norm to each output, as DINOv3's heads do.
        prefix_tokens: Whether to return the class and register tokens too, for heads that need all
            tokens.
        drop_path_rate: Drop-path probability (0..1) of the last block; it grows linearly from 0 at
            the first block.
        with_cp: Whether to recompute the trained blocks in the backward pass to save memory.
        frozen_stages: Number of blocks to freeze. Any number from 0 on also freezes the embedding
            and the class and register tokens; -1 freezes nothing.
        frozen: Whether to freeze everything, including the final norm.
        normalization: Mean and std for the input: 'weights' for the ones that the weights were
            trained with, 'web' or 'sat493m' to choose explicitly, None if the data preprocessor
            normalizes. Always None for bands other than red, green, blue.
        in_channels: Number of bands of the image.
        bands: Channels of red, green and blue, counted from 0, as ``dict(rgb=(2, 1, 0))``; None for
            a color that the image lacks. By default, the first three channels if there are at least
            three. Pretrained kernels go to these channels, and the mean kernel to all others (see
            :func:`adapt_bands`).
        lora: Settings of low-rank adapters, as ``dict(rank=16, targets=('q', 'v'))``. Only the
            adapters are trained, whatever ``frozen`` says, and frozen stages get none. See
            :class:`mapsage.models.lora.LoRASettings`.
        init_cfg: Config of the weights, as described above.

    Raises:
        ValueError: If an argument is out of its range.
    """

    # Methods that compile=dict(backbone=True) compiles. forward() is not one of them, because its
    # range check reads pixel values on the host, which would break the graph.
    compiled_methods = ('compute_maps',)
    # Beginnings of the names of parameters before the first block, for layer decay.
    embedding_names = ('patch_embed.', 'cls_token', 'register_tokens')
    pixel_mean: torch.Tensor
    pixel_std: torch.Tensor

    def __init__(
        self,
        arch: Union[str, Dict[str, Any]] = 'large',
        out_indices: Optional[Sequence[int]] = None,
        final_norm: bool = True,
        prefix_tokens: bool = False,
        drop_path_rate: float = 0.0,
        with_cp: bool = False,
        frozen_stages: int = -1,
        frozen: bool = False,
        normalization: Optional[str] = 'weights',
        in_channels: int = 3,
        bands: Optional[Dict[str, Any]] = None,
        lora: Optional[Dict[str, Any]] = None,
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__(init_cfg)
        # 16-bit copies of what is frozen: modules by name, and the tokens 'prefix'; and what they
        # were copied from.
        self._copies: Dict[str, Any] = {}
        self._copied: Tuple[Any, ...] = ()
        self.lora = None if lora is None else parse_lora(lora)
        frozen = frozen and self.lora is None
        self.arch = _parse_arch(arch)
        layers = self.arch.num_layers
        if out_indices is None:
            out_indices = sorted({max(layers * quarter // 4 - 1, 0) for quarter in (1, 2, 3, 4)})
        self.out_indices = tuple(out_indices)
        _check_arguments(self.arch, self.out_indices, drop_path_rate, frozen_stages, normalization)
        self.prefix_tokens = prefix_tokens
        self.with_cp = with_cp
        self.frozen_stages = self.out_indices[-1] + 1 if frozen else frozen_stages
        self.frozen = frozen
        self.in_channels, self.rgb = in_channels, parse_bands(in_channels, bands)
        self.normalization = normalization
        if in_channels != len(RGB) or self.rgb != RGB:
            if normalization in NORMALIZATION:
                raise ValueError(
                    f'normalization={normalization!r} is for the bands red, green, '
                    f'blue, not for in_channels={in_channels}, bands={bands}; set '
                    "normalization=None, and give the bands' mean and std to "
                    'BandDataPreProcessor'
                )
            self.normalization = None
        self.out_channels = (self.arch.embed_dims,) * len(self.out_indices)

        dims = self.arch.embed_dims
        self.patch_embed = nn.Conv2d(in_channels, dims, PATCH_SIZE, stride=PATCH_SIZE)
        widen_checkpoints(self.patch_embed, in_channels, self.rgb)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dims))
        if self.arch.num_registers:
            self.register_tokens = nn.Parameter(torch.zeros(1, self.arch.num_registers, dims))
        self.rope = RotaryPositions(dims // self.arch.num_heads, 1 + self.arch.num_registers)
        self.blocks = nn.ModuleList(
            Block(self.arch, drop_path_rate * index / max(layers - 1, 1))
            for index in range(self.out_indices[-1] + 1)
        )
        self.norm = nn.LayerNorm(dims, eps=NORM_EPS) if final_norm else nn.Identity()
        self.register_buffer('pixel_mean', torch.zeros(3, 1, 1))
        self.register_buffer('pixel_std', torch.ones(3, 1, 1))
        self._set_pixels('sat493m' if normalization == 'sat493m' else 'web')
        self._check_pixels = PixelRange(
            'DINOv3ViT', ', or set normalization=None and let the data preprocessor normalize them'
        )
        self._reset_parameters()
        if self.lora is not None:
            # A recomputed block would draw another dropout mask than the forward pass.
            if with_cp and self.lora.dropout:
                raise LoRAError(
                    f'lora.dropout={self.lora.dropout} with with_cp=True: set '
                    'lora.dropout=0 or with_cp=False'
                )
            add_lora(self, self.lora, skip=list(self.blocks)[: max(self.frozen_stages, 0)])
        self._freeze()

    def forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the feature maps of the chosen blocks.

        Args:
            x: RGB images in 0..255, float (N, 3, H, W). With ``normalization=None``, normalized
                images with any number of bands, float (N, C, H, W).

        Returns:
            One map, float (N, embed_dims, H / 16, W / 16), for each entry of ``out_indices``. With
            ``prefix_tokens``, as many maps of the class and register tokens follow,
            (N, embed_dims, 1 + registers, 1).

        Raises:
            BackboneInputError: If H or W is not a multiple of 16, or the input is already
                normalized. Values above 255 or within 0..1 are logged.
        """
        self._check_input(x)
        self._copy_frozen(x.device.type)
        return self.compute_maps(x)

    def compute_maps(self, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Compute the output of :meth:`forward` without the range check of the pixel values."""
        tokens, (rows, columns) = self._embed_grid(x)
        sine, cosine = self.rope(rows, columns)
        maps: List[torch.Tensor] = []
        prefixes: List[torch.Tensor] = []
        for index in range(len(self.blocks)):
            tokens = self.apply_block(index, tokens, sine, cosine)
            if index in self.out_indices:
                with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                    normed = self.norm(tokens)
                    maps.append(self._as_map(normed[:, -rows * columns :], rows, columns))
                    if self.prefix_tokens:
                        prefix = normed[:, : -rows * columns]
                        prefixes.append(self._as_map(prefix, prefix.shape[1], 1))
        return (*maps, *prefixes)

    def embed(self, x: torch.Tensor) -> Tuple[torch.Tensor, Tuple[int, int]]:
        """Return the tokens before the first block, and the grid of patches.

        Args:
            x: Images, as for :meth:`forward`.

        Returns:
            Class, register and patch tokens, float (N, T, embed_dims), and the grid's rows and
            columns.

        Raises:
            BackboneInputError: As in :meth:`forward`.
        """
        self._check_input(x)
        self._copy_frozen(x.device.type)
        return self._embed_grid(x)

    def _embed_grid(self, x: torch.Tensor) -> Tuple[torch.Tensor, Tuple[int, int]]:
        grid = self._grid_size(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.frozen_stages < 0):
            return self._embed(x), grid

    def apply_block(
        self,
        index: int,
        tokens: torch.Tensor,
        sine: torch.Tensor,
        cosine: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Apply one block. Frozen blocks pass no gradient.

        Args:
            index: Index of the block.
            tokens: Tokens, (N, T, embed_dims). They may include more tokens than :meth:`embed`
                returned, such as mask queries.
            sine: Sine of each token's position, (T, head_dims).
            cosine: Cosine of the same shape.
            attn_mask: Attention mask, as in :class:`RotaryAttention`.

        Returns:
            Tokens of the same shape.
        """
        block = self._copies.get(f'blocks.{index}', self.blocks[index])
        with torch.set_grad_enabled(torch.is_grad_enabled() and index >= self.frozen_stages):
            branch_factors = block.draw_drop_path(tokens)  # type: ignore[operator]
            inputs = (tokens, sine, cosine, branch_factors, attn_mask)
            if self.with_cp and torch.is_grad_enabled():
                return run_recomputed(block, *inputs)
            return block(*inputs)

    def init_weights(self) -> None:
        """Load the weights that ``init_cfg`` names; without ``init_cfg``, do what MMEngine does."""
        cfgs = self.init_cfg if isinstance(self.init_cfg, (list, tuple)) else [self.init_cfg or {}]
        pretrained = [
            cfg for cfg in cfgs if initializer_name(cfg) in ('Pretrained', 'PretrainedInit')
        ]
        if self.is_init or not pretrained:  # type: ignore[has-type]
            super().init_weights()
            return
        self._load(pretrained[-1]['checkpoint'], pretrained[-1].get('prefix') or '')
        self.is_init = True

    def train(self, mode: bool = True) -> DINOv3ViT:
        """Set the training mode; frozen modules stay in evaluation mode."""
        super().train(mode)
        self._freeze()
        return self

    def _grid_size(self, x: torch.Tensor) -> Tuple[int, int]:
        height, width = x.shape[-2:]
        if height % PATCH_SIZE or width % PATCH_SIZE:
            raise BackboneInputError(
                f'input of {height} x {width} pixels (H x W), expected multiples of {PATCH_SIZE}; '
                f'choose a crop size or --window that fits, or pad with size_divisor={PATCH_SIZE} '
                f'in the data preprocessor'
            )
        return height // PATCH_SIZE, width // PATCH_SIZE

    def _check_input(self, x: torch.Tensor) -> None:
        # An image size that does not fit is reported first, before the pixel values.
        self._grid_size(x)
        if self.normalization is not None:
            self._check_pixels(x)

    def _embed(self, x: torch.Tensor) -> torch.Tensor:
        if self.normalization is not None:
            x = (x - self.pixel_mean) / self.pixel_std
        patch_embed = self._copies.get('patch_embed', self.patch_embed)
        patches = patch_embed(x).flatten(2).transpose(1, 2)
        tokens = self._copies.get('prefix', self._prefix_tokens())
        prefix = [token.expand(x.shape[0], -1, -1).to(patches.dtype) for token in tokens]
        return torch.cat((*prefix, patches), dim=1)

    def _load(self, path: str, prefix: str) -> None:
        state = weights.read_checkpoint(path, prefix)
        converted = weights.convert(state)
        stem = converted.get('patch_embed.weight')
        if (
            stem is not None
            and stem.shape[1] == len(RGB)
            and (weights.detect_format(state) != 'mapsage' or self.in_channels != len(RGB))
        ):
            converted['patch_embed.weight'] = adapt_bands(stem, self.in_channels, self.rgb)
        # Adapters that the file lacks keep their initial values.
        target = {
            key: value
            for key, value in self.state_dict().items()
            if key in converted or not is_adapter(key)
        }
        fitted, filled = weights.fit(converted, target, self.arch)
        kind: Optional[str] = None
        reason = 'it is in the checkpoint'
        if 'pixel_mean' not in converted:
            kind, reason = weights.training_data(path, state, self.arch)
            if kind is None and self.normalization == 'weights':
                raise weights.WeightsError(
                    f"normalization='weights', but {reason} whether {path} was trained on web or "
                    f'satellite images; set it to one of {sorted(NORMALIZATION)}'
                )
        self.load_state_dict(fitted, strict=len(target) == len(self.state_dict()))
        if self.normalization in NORMALIZATION:
            kind, reason = self.normalization, f'set by the config; weights: {kind or "unknown"}'
        if kind is not None:
            self._set_pixels(kind)
        self._log_weights(path, weights.detect_format(state), filled, kind, reason)

    def _log_weights(
        self, path: str, file_format: str, filled: Sequence[str], kind: Optional[str], reason: str
    ) -> None:
        zeros = sum(key.endswith('_bias') for key in filled)
        absent = f', {zeros} biases missing from them are 0' if zeros else ''
        mean, std = (
            [round(value, 3) for value in statistic.flatten().tolist()]
            for statistic in (self.pixel_mean, self.pixel_std)
        )
        where = 'expected of the data preprocessor' if self.normalization is None else 'done here'
        print_log(
            f'DINOv3ViT: {file_format} weights of {path} for arch='
            f'{weights.describe(self.arch)}{absent}. Normalization {kind or "statistics"} '
            f'({reason}): mean {mean}, std {std} in 0..255, {where}',
            logger='current',
        )

    def _set_pixels(self, kind: str) -> None:
        mean, std = NORMALIZATION[kind]
        self.pixel_mean.copy_(torch.tensor(mean).view(3, 1, 1))
        self.pixel_std.copy_(torch.tensor(std).view(3, 1, 1))

    def _reset_parameters(self) -> None:
        """Initialize all parameters as ``init_weights_vit`` of the source does."""
        for token in self._prefix_tokens():
            nn.init.normal_(token, std=0.02)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _freeze(self) -> None:
        frozen: List[nn.Module] = []
        if self.lora is not None:
            freeze_all_but_adapters(self)
        if self.frozen:
            frozen.append(self)
        elif self.frozen_stages >= 0:
            frozen += [self.patch_embed, self.rope, *self.blocks[: self.frozen_stages]]
            for token in self._prefix_tokens():
                token.requires_grad_(False)
        for module in frozen:
            # Not self.train(), which calls this method.
            nn.Module.train(module, False)
            module.requires_grad_(False)

        candidates: Dict[str, nn.Module] = {'patch_embed': self.patch_embed}
        candidates.update((f'blocks.{index}', block) for index, block in enumerate(self.blocks))
        self._frozen_modules = {
            name: module
            for name, module in candidates.items()
            if not any(parameter.requires_grad for parameter in module.parameters())
        }
        self._frozen_parameters = [
            parameter
            for module in self._frozen_modules.values()
            for parameter in module.parameters()
        ]

    def _copy_frozen(self, device: str) -> None:
        """Hold 16-bit copies of the frozen modules as long as autocast computes in 16 bits."""
        dtype = autocast_dtype(device)
        prefix, parameters = self._prefix_tokens(), self._frozen_parameters
        if 'patch_embed' in self._frozen_modules:
            parameters = [*prefix, *parameters]
        if dtype is None or any(parameter.requires_grad for parameter in parameters):
            self._copies, self._copied = {}, ()
            return
        # Loading and moving weights changes one of the two.
        current = (dtype, *((weight.data_ptr(), weight._version) for weight in parameters))
        if current != self._copied:
            self._copies = {
                name: sixteen_bit_copy(module, dtype)
                for name, module in self._frozen_modules.items()
            }
            if 'patch_embed' in self._copies:
                self._copies['prefix'] = [token.detach().to(dtype) for token in prefix]
            self._copied = current

    def __getstate__(self) -> Dict[str, Any]:
        """Leave the 16-bit copies out of copies and files of the model."""
        return {**self.__dict__, '_copies': {}, '_copied': ()}

    def _as_map(self, tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Return tokens (N, rows * columns, C) as a map in the memory format of the patch weight.

        With its channels last, a map has the dtype of autocast: convolutions would cast it, and
        the cast also makes it contiguous.
        """
        weight = self.patch_embed.weight
        shape = (tokens.shape[0], -1, rows, columns)
        if weight.is_contiguous() or not weight.is_contiguous(memory_format=torch.channels_last):
            return tokens.transpose(1, 2).contiguous().view(shape)
        dtype = autocast_dtype(tokens.device.type) or tokens.dtype
        return tokens.to(dtype).contiguous().transpose(1, 2).view(shape)

    def _prefix_tokens(self) -> List[nn.Parameter]:
        registers = [self.register_tokens] if self.arch.num_registers else []
        return [self.cls_token, *registers]


def _parse_arch(arch: Union[str, Dict[str, Any]]) -> Arch:
    if isinstance(arch, str):
        if arch not in ARCHS:
            raise ValueError(
                f'arch={arch!r}, expected one of {list(ARCHS)}; for another '
                f'architecture, give a dict of {list(Arch._fields)}'
            )
        return ARCHS[arch]
    required = set(Arch._fields) - set(Arch._field_defaults)
    if not required <= set(arch) <= set(Arch._fields):
        raise ValueError(
            f'arch={dict(arch)}: expected the keys {sorted(required)}, optionally '
            f'{sorted(Arch._field_defaults)}, and no others'
        )
    return Arch(**arch)


def _check_arguments(
    arch: Arch,
    out_indices: Sequence[int],
    drop_path_rate: float,
    frozen_stages: int,
    normalization: Optional[str],
) -> None:
    if arch.embed_dims % (4 * arch.num_heads):
        raise ValueError(
            f'embed_dims={arch.embed_dims} must be a multiple of 4 x num_heads='
            f'{4 * arch.num_heads}, because RoPE rotates pairs of channels on two '
            'axes'
        )
    layers = arch.num_layers
    if not out_indices or list(out_indices) != sorted(set(out_indices) & set(range(layers))):
        raise ValueError(
            f'out_indices={tuple(out_indices)} must be ascending block indices in '
            f'0..{layers - 1}, at least one'
        )
    if frozen_stages not in range(-1, out_indices[-1] + 2):
        raise ValueError(
            f'frozen_stages={frozen_stages} must be -1 (none), 0 (embedding) or '
            f'1..{out_indices[-1] + 1} (embedding and that many blocks; frozen=True '
            'freezes everything)'
        )
    if not 0 <= drop_path_rate < 1:
        raise ValueError(f'drop_path_rate={drop_path_rate} must be at least 0 and below 1')
    if normalization not in (None, 'weights', *NORMALIZATION):
        raise ValueError(
            f"normalization={normalization!r} must be 'weights' or one of "
            f'{sorted(NORMALIZATION)}, or None for input that is already normalized'
        )
