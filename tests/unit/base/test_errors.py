"""Every error class is one for the user, or stands in a list with the reason."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, List

import pytest
from support import ROOT

from mapsage.base.errors import UserError

# Exceptions that no user is meant to read, each with the reason.
INTERNAL = {
    'EndOfData': 'tells the loop of dynamic sampling that an epoch ends',
    'GreetingDroppedError': 'tells the end that connects to try again',
    'HandshakeError': 'of one connection; meshes, links and watches name its rank in their errors',
    'LapsedError': 'tells a worker that shares maps to begin again with a new lease',
    'LinkLostError': 'of the mesh; channels turn it into a RankLostError with a roll call',
    'OnlyWeightsError': 'why a file is passed over; the ResumeError quotes it',
    'OtherListenerError': 'a HandshakeError',
    'OtherVersionError': 'a HandshakeError',
    'SecretMismatchError': 'a HandshakeError',
    'SpareError': 'tells the launcher that the job ended while this machine waited',
    'StepDone': 'tells the replay of a step that it is recorded',
    'StoppedEarly': 'a SystemExit: the run has left as it was asked to',
}
# A metric, the error of an operator's result, and the base class itself.
NO_EXCEPTIONS = {'CalibrationError', 'ResultError', 'UserError'}


def error_classes(folder: Path) -> Dict[str, List[str]]:
    """Return the public classes that are named like exceptions, with the names of their bases."""
    classes = {}
    for path in folder.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
                bases = [
                    base.attr if isinstance(base, ast.Attribute) else getattr(base, 'id', '')
                    for base in node.bases
                ]
                if node.name.endswith(('Error', 'Exception', 'Early')) or any(
                    base.endswith(('Error', 'Exception', 'Exit')) for base in bases
                ):
                    classes[node.name] = bases
    return {name: bases for name, bases in classes.items() if name not in NO_EXCEPTIONS}


CLASSES = {**error_classes(ROOT / 'mapsage_launcher'), **error_classes(ROOT / 'mapsage')}


def is_for_users(name: str) -> bool:
    """Return whether a class of the package descends from ``UserError``."""
    return name == 'UserError' or any(is_for_users(base) for base in CLASSES.get(name, []))


def test_the_walk_sees_the_classes_of_all_rooms() -> None:
    assert {
        'ConfigError',
        'GeoError',
        'RankLostError',
        'RemoteReadError',
        'StoppedEarly',
        'UnsafeCheckpointError',
    } <= set(CLASSES)


@pytest.mark.parametrize('name', sorted(CLASSES))
def test_an_error_is_for_users_or_has_a_reason(name: str) -> None:
    assert is_for_users(name) != (name in INTERNAL)


def test_the_list_of_internal_errors_names_no_class_that_is_gone() -> None:
    assert set(INTERNAL) <= set(CLASSES)


def test_a_user_error_is_also_the_built_in_error_that_callers_expect() -> None:
    class RangeError(UserError, ValueError):
        """An example."""

    with pytest.raises(ValueError, match='3'):
        raise RangeError('got 3')
    assert RangeError('got 3').final
