"""JSON from files that anybody may have written: every invalid text is a ValueError."""

from __future__ import annotations

import json
from typing import Any, Union


def parse_json(text: Union[str, bytes]) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If the text is not JSON, or nested more deeply than Python can read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
