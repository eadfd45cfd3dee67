"""The samples of a dataset that a list names, or all except them.

`NamedSamples` divides one dataset into labeled and unlabeled samples. Although configs use it as a
type, it is a function: it returns the dataset itself, reduced to a subset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

from mmseg.registry import DATASETS


@DATASETS.register_module(name='NamedSamples')
def named_samples(dataset: Dict[str, Any], names: str, exclude: bool = False) -> Any:
    """Return a dataset reduced to the samples that a list names; the type ``NamedSamples``.

    The same list, once with and once without ``exclude``, divides a dataset into unlabeled and
    labeled samples.

    Args:
        dataset: Config of a dataset of images, one of MMEngine's ``BaseDataset``.
        names: Path of a text file in UTF-8, with the name of an image without its suffix in each
            line. Empty lines and lines that begin with # do not count.
        exclude: Whether to return the samples that are not named.

    Raises:
        ValueError: If the list cannot be read or is empty, names an image that the dataset lacks,
            or no sample is left.
    """
    built = DATASETS.build(dataset)
    built.full_init()
    listed_names = _read_names(names)
    stems = [
        Path(str(built.get_data_info(index).get('img_path', ''))).stem
        for index in range(len(built))
    ]
    unknown = [name for name in listed_names if name not in set(stems)]
    if unknown:
        raise ValueError(
            f'{names} names {unknown[0]!r}, and {len(unknown) - 1} more, which are no '
            f'images of the dataset ({len(stems)}, the first {stems[0]!r}). Expected '
            'file names without the suffix.'
        )
    listed = set(listed_names)
    indices = [index for index, stem in enumerate(stems) if (stem in listed) != exclude]
    if not indices:
        raise ValueError(
            f'{names} names all {len(stems)} images of the dataset, and exclude=True '
            'leaves none. Shorten the list.'
        )
    built.get_subset_(indices)
    return built


def _read_names(path: str) -> List[str]:
    try:
        lines = Path(path).read_text(encoding='utf-8-sig').splitlines()
    except OSError as error:
        raise ValueError(f'the list of names {path!r} cannot be read: {error.strerror}.') from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f'the list of names {path!r} is not in UTF-8 ({error.reason} at byte '
            f'{error.start}); save it in that encoding.'
        ) from error
    names = [line.strip() for line in lines]
    names = [name for name in names if name and not name.startswith('#')]
    if not names:
        raise ValueError(f'the list of names {path!r} is empty, expected a name in each line.')
    return names
