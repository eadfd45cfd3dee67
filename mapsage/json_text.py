"""JSON of a file that anybody may have written."""
from __future__ import annotations

import json
from typing import Any, Union


def parse_json(text: Union[str, bytes]) -> Any:
    """Return the value of a text.

    Raises:
        ValueError: If it is no JSON, or nested more deeply than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
