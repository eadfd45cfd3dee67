"""The samples of a dataset that a list names, or all others."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

from mmseg.registry import DATASETS


@DATASETS.register_module(name='NamedSamples')
def named_samples(dataset: Dict[str, Any], names: str, exclude: bool = False) -> Any:
    """Return a dataset with the samples that a list names. It is a type for MMEngine's registry.

    A list and ``exclude`` divide one dataset into labeled and unlabeled samples, always in the same
    way.

    Args:
        dataset: Config of a dataset of images, one of MMEngine's ``BaseDataset``.
        names: Path of a text file in UTF-8, with the name of an image without its suffix in each
            line. Empty lines and lines that begin with # do not count.
        exclude: Whether to keep the samples that are not named.

    Raises:
        ValueError: If the list cannot be read, names nothing or an image that is not there, or no
            sample is left.
    """
    built = DATASETS.build(dataset)
    built.full_init()
    wanted = _read(names)
    stems = [Path(str(built.get_data_info(index).get('img_path', ''))).stem
             for index in range(len(built))]
    unknown = [name for name in wanted if name not in set(stems)]
    if unknown:
        raise ValueError(f'{names} names {unknown[0]!r}, and {len(unknown) - 1} more, which are no '
                         f'images of the dataset ({len(stems)}, the first {stems[0]!r}). Names are '
                         'those of the files without the suffix.')
    listed = set(wanted)
    kept = [index for index, stem in enumerate(stems) if (stem in listed) != exclude]
    if not kept:
        raise ValueError(f'{names} names all {len(stems)} images of the dataset, and exclude=True '
                         'leaves none. Shorten the list.')
    built.get_subset_(kept)
    return built


def _read(path: str) -> List[str]:
    try:
        lines = Path(path).read_text(encoding='utf-8-sig').splitlines()
    except OSError as error:
        raise ValueError(f'the list of names {path!r} cannot be read: {error.strerror}.') from error
    except UnicodeDecodeError as error:
        raise ValueError(f'the list of names {path!r} is not in UTF-8 ({error.reason} at byte '
                         f'{error.start}); save it in that encoding.') from error
    names = [line.strip() for line in lines]
    names = [name for name in names if name and not name.startswith('#')]
    if not names:
        raise ValueError(f'the list of names {path!r} is empty, expected a name in each line.')
    return names
