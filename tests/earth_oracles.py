"""The published encoders for satellite images, loaded from the folder of their packages.

``scripts/test_packages.sh earth`` prepares the folder. timm and the files of torchgeo and
terratorch are loaded without their packages' ``__init__``, which import torchvision; a stand-in
without any function of torchvision has the names that the remaining files import.
"""

import importlib
import importlib.util
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Oracles:
    """Constructors of the published encoders.

    Args:
        folder: Folder of the packages.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        sys.path.append(folder)
        _torchvision()
        timm = self.folder / 'timm'
        _package('timm', timm, __version__='1.0.31')
        _package('timm.models', timm / 'models')
        _package(
            'timm.data',
            **dict.fromkeys(
                (
                    f'{kind}_{name}'
                    for kind in ('IMAGENET_DEFAULT', 'IMAGENET_INCEPTION', 'OPENAI_CLIP')
                    for name in ('MEAN', 'STD')
                ),
                (0, 0, 0),
            ),
        )

    def dofa(self, **arch: Any) -> Any:
        """torchgeo's DOFA v1."""
        return self._file('torchgeo_dofa', 'torchgeo/models/dofa.py').DOFA(**arch)

    def timm_vit(self, **arch: Any) -> Any:
        """timm's VisionTransformer, the inside of DOFA v2."""
        return importlib.import_module('timm.models.vision_transformer').VisionTransformer(**arch)

    def prithvi(self, **arch: Any) -> Any:
        """terratorch's Prithvi-EO-2.0."""
        path = 'terratorch/models/backbones/prithvi_mae.py'
        return self._file('terratorch_prithvi', path).PrithviViT(**arch)

    def terramind(self, channels: Any, **arch: Any) -> Any:
        """terratorch's TerraMind v1 for sensors with these numbers of channels."""
        folder = self.folder / 'terratorch/models/backbones/terramind/model'
        _package('terramind_files', folder)
        embeddings = importlib.import_module('terramind_files.encoder_embeddings')

        def build(info: Any, names: Any, img_size: int, dim: int, patch_size: int) -> Any:
            layers = {
                name: embeddings.ImageEncoderEmbedding(
                    info[name]['num_channels'], patch_size, dim, image_size=img_size
                )
                for name in names
            }
            return layers, {name: name for name in names}

        _module(
            'terramind_files.modality_info',
            MODALITY_INFO={name: dict(num_channels=count) for name, count in channels.items()},
        )
        # The file of this name builds tokenizers, which encoders do not use.
        _module('terramind_files.terramind', build_tokenizer=None, build_modality_embeddings=build)
        norm = importlib.import_module('terramind_files.tm_utils').LayerNorm
        sys.modules.pop('terramind_files.terramind_vit', None)
        encoder = importlib.import_module('terramind_files.terramind_vit').TerraMindViT
        return encoder(
            modalities=list(channels),
            qkv_bias=False,
            proj_bias=False,
            mlp_bias=False,
            norm_layer=partial(norm, eps=1e-6, bias=False),
            act_layer=nn.SiLU,
            gated_mlp=True,
            **arch,
        )

    def olmoearth(self, size: str, version: str = 'v1.2') -> Any:
        """The whole model, with its decoder."""
        name = 'olmoearth_pretrain_minimal.olmoearth_pretrain_v1.olmoearth_pretrain_v1'
        return importlib.import_module(name).OlmoEarthPretrain_v1(size, version).model

    def olmoearth_sample(self, **fields: torch.Tensor) -> Any:
        """The input of OlmoEarth's encoder."""
        name = 'olmoearth_pretrain_minimal.olmoearth_pretrain_v1.utils.datatypes'
        return importlib.import_module(name).MaskedOlmoEarthSample(**fields)

    def _file(self, name: str, path: str) -> Any:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.folder / path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        return sys.modules[name]


class _Named(type(nn.Module)):
    """Metaclass of a class whose attributes are the class itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return cls


class _Nothing(nn.Module, metaclass=_Named):
    """Stands for whatever is imported from torchvision; none of it computes anything here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def _torchvision() -> None:
    for name in (
        '',
        '.transforms',
        '.transforms.v2',
        '.models',
        '.models._api',
        '.ops',
        '.ops.misc',
    ):
        _package(f'torchvision{name}', __getattr__=lambda name: getattr(_Nothing, name))


def _package(name: str, folder: Any = None, **attributes: Any) -> None:
    _module(name, __path__=[] if folder is None else [str(folder)], **attributes)


def _module(name: str, **attributes: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
