"""Licenses of published weights, which apply to models that were trained from them, too.

A backbone states the license of its weights; checkpoints and model cards repeat it.
"""

from __future__ import annotations

from typing import Any, List, Mapping, NamedTuple, Protocol, runtime_checkable

from torch import nn

from .frozen_weights import pretrained_source

# Key of the licenses in a checkpoint's meta: a list of dicts with the fields of WeightsLicense.
LICENSES_KEY = 'weights_licenses'


class WeightsLicense(NamedTuple):
    """License of weights.

    Attributes:
        name: Name of the license.
        link: Address of its text, or of the page of the weights.
        forbids: Uses that it forbids, as the end of a sentence; '' if it forbids none.
    """

    name: str
    link: str
    forbids: str = ''

    def describe(self) -> str:
        """Return the license and the uses that it forbids, as a sentence."""
        restriction = f' It forbids {self.forbids}.' if self.forbids else ''
        return f'The weights have the license {self.name} ({self.link}).{restriction}'


@runtime_checkable
class LicensedBackbone(Protocol):
    """A backbone for weights with a license.

    Attributes:
        weights_license: License of the published weights.
    """

    weights_license: WeightsLicense


def find_licenses(model: nn.Module) -> List[WeightsLicense]:
    """Return the licenses of the pretrained weights that a model's backbones start from."""
    licenses = {
        module.weights_license: None
        for module in model.modules()
        if isinstance(module, LicensedBackbone) and pretrained_source(module) is not None
    }
    return list(licenses)


def recorded_licenses(meta: Mapping[str, Any]) -> List[WeightsLicense]:
    """Return the licenses of the pretrained weights that a checkpoint was trained from.

    Args:
        meta: ``meta`` of the checkpoint.
    """
    entries = meta.get(LICENSES_KEY)
    # A checkpoint of somebody may have anything there.
    return [
        WeightsLicense(*(str(entry.get(field, '')) for field in WeightsLicense._fields))
        for entry in (entries if isinstance(entries, (list, tuple)) else ())
        if isinstance(entry, Mapping)
    ]


def describe_restrictions(meta: Mapping[str, Any], path: str) -> str:
    """Return what the licenses of a checkpoint forbid, or '' if they forbid nothing.

    Args:
        meta: ``meta`` of the checkpoint.
        path: Path of the checkpoint.
    """
    sentences = ' '.join(
        license_.describe() for license_ in recorded_licenses(meta) if license_.forbids
    )
    return f'{path} was trained from published weights. {sentences}' if sentences else ''
