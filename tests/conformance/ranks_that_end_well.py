"""A pytest plugin that counts a test of MMEngine in several processes as passed if all end well.

MMEngine's ``MultiProcessTestCase`` reports every such test as skipped "due to the program abort",
also one whose processes have all ended with status 0.
"""

from typing import Any
from unittest import SkipTest

from mmengine.testing._internal import MultiProcessTestCase

_check_return_codes = MultiProcessTestCase._check_return_codes


def check_return_codes(test: Any, elapsed_time: float) -> None:
    """Raise what MMEngine raises, unless all processes ended with status 0."""
    try:
        _check_return_codes(test, elapsed_time)
    except SkipTest:
        if any(process.exitcode for process in test.processes):
            raise


MultiProcessTestCase._check_return_codes = check_return_codes
