"""Reading of a config file, whose mistakes become a sentence with file, line and next step.

A config is a Python program that MMEngine runs without its file name, so a traceback shows neither
the file nor the text of the line. Both are taken from the frames of MMEngine's reader.
"""

from __future__ import annotations

import builtins
import logging
import os
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, List, Mapping, Optional, Tuple

from mmengine.config import Config
from mmengine.logging import MMLogger

from mapsage.distributed import error_text
from mapsage.engine.config.mistakes import did_you_mean
from mapsage.engine.env_cfg import ConfigError

_SUFFIXES = ('.py', '.json', '.yaml', '.yml')


def read_config_file(path: Path) -> Config:
    """Return the config of a file.

    Raises:
        ConfigError: If the file or one that it inherits from cannot be read, is no Python, or fails
            when it is run.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f'{path} is no config: its name ends in {path.suffix!r}, expected {_SUFFIXES[0]} (or '
            f'{", ".join(_SUFFIXES[1:])}).'
        )
    logger = MMLogger.get_current_instance()
    logger.addFilter(_is_news)
    try:
        return Config.fromfile(str(path))
    # A config is a program, which may raise anything.
    except Exception as error:
        raise ConfigError(_explain(path, error)) from error
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    # Every rank would print this, before a log file exists. The resolved config has the value.
    return not record.getMessage().startswith('Using env variable')


def merge_options(cfg: Config, options: Mapping[str, Any]) -> None:
    """Merge ``--cfg-options`` into a config.

    Raises:
        ConfigError: If an option sets a key inside of a value that has no keys.
    """
    try:
        cfg.merge_from_dict(dict(options))
    except (AssertionError, IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f'--cfg-options {" ".join(options)}: one of these keys lies inside of a value that has '
            f'no keys. Expected the path of a setting, such as train_cfg.max_iters=100.'
        ) from error


def _explain(path: Path, error: Exception) -> str:
    file, line = _position(path, error.__traceback__)
    if isinstance(error, SyntaxError):
        file = _first_with_syntax_error([str(path), file])
        line = error.lineno
        return (
            f'{_at(file, line)}: this is not valid Python: {error.msg}.{_shown(file, line)} Close every '
            f'bracket and quote, and put a comma between two settings.'
        )
    if isinstance(error, UnicodeDecodeError):
        return f'{file} is not encoded in UTF-8 ({error.reason}). Save it as UTF-8.'
    if isinstance(error, FileNotFoundError):
        return (
            f'{path} inherits from a file that does not exist: {error.filename or error}. Paths in '
            f'_base_ begin at the folder of the config; correct the path.'
        )
    if isinstance(error, ImportError):
        return (
            f'{_at(file, line)}: {error_text(error).splitlines()[0]} A module of custom_imports must be '
            f'installed, or lie in the folder from which you start (PYTHONPATH).'
        )
    text = error_text(error)
    if isinstance(error, NameError) and line is not None:
        name = text.split("'")[1] if text.count("'") >= 2 else ''
        names = {*_defined_names(error.__traceback__), *dir(builtins)}
        return (
            f'{_at(file, line)}: the name {name!r} is not defined.{did_you_mean(name, names)}'
            f'{_shown(file, line)} Define it above this line.'
        )
    if 'uplicate key' in text:
        return (
            f'{file} inherits a setting from two files of _base_: {text}. Remove one of the files, '
            f'or let one of them inherit from the other.'
        )
    return f'{_at(file, line)} cannot be read: {text}.{_shown(file, line)}'


def _position(path: Path, trace: Optional[TracebackType]) -> Tuple[str, Optional[int]]:
    """Return the config file that was read when an error was raised, and the line in it."""
    file, line = str(path), None
    for frame, number in traceback.walk_tb(trace):
        if frame.f_code.co_name == '_file2dict':
            file = str(frame.f_locals.get('filename', file))
        if _is_config_code(frame, file):
            line = number
    relative = os.path.relpath(file)
    return (file if relative.startswith('..') else relative), line


def _is_config_code(frame: FrameType, file: str) -> bool:
    """Return whether a frame runs the text of a config, which MMEngine may compile without a name."""
    name = frame.f_code.co_filename
    return name in ('', '<string>') or os.path.abspath(name) == os.path.abspath(file)


def _defined_names(trace: Optional[TracebackType]) -> List[str]:
    return [
        name
        for frame, _ in traceback.walk_tb(trace)
        if frame.f_code.co_name == '<module>'
        for name in frame.f_locals
    ]


def _first_with_syntax_error(files: List[str]) -> str:
    for file in files:
        try:
            compile(Path(file).read_text(encoding='utf-8'), file, 'exec')
        except (SyntaxError, ValueError):
            return file
        except OSError:
            pass
    return files[-1]


def _at(file: str, line: Optional[int]) -> str:
    return file if line is None else f'{file}, line {line}'


def _shown(file: str, line: Optional[int]) -> str:
    """Return a space and the text of a line in quotes; '' if it cannot be read."""
    try:
        lines = Path(file).read_text(encoding='utf-8').splitlines()
    except (OSError, ValueError):
        return ''
    if line is None or not 0 < line <= len(lines):
        return ''
    return f' The line is `{lines[line - 1].strip()[:80]}`.'
