"""Content that a parser may find in a file: valid documents with changes, and anything else."""

from __future__ import annotations

import copy
import json
from typing import Any, Iterator, List, Tuple

from hypothesis import strategies as st

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [10**30, -1, 0, 2**31, 2**63, 1e400, '', '\0', '../x', '/', 'a' * 300, '\ud800']
    ),
)
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def _places(value: Any) -> Iterator[Tuple[Any, Any]]:
    """Yield the containers in a value of JSON, with each of their keys."""
    for key in (
        list(value)
        if isinstance(value, dict)
        else (range(len(value)) if isinstance(value, list) else ())
    ):
        yield value, key
        yield from _places(value[key])


@st.composite
def changed(draw: Any, valid: Any) -> Any:
    """Draw a valid value of JSON in which one to three things are replaced or left out."""
    value = [copy.deepcopy(valid)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        container, key = places[draw(st.integers(0, len(places) - 1))]
        if isinstance(container, dict) and draw(st.booleans()):
            del container[key]
        else:
            container[key] = draw(JSON)
        if not value:
            break
    return value[0]


@st.composite
def damaged(draw: Any, valid: bytes) -> bytes:
    """Draw valid content that is cut, or has other bytes in some places."""
    content = bytearray(valid[: draw(st.integers(0, len(valid)))] if draw(st.booleans()) else valid)
    for _ in range(draw(st.integers(0, 4))):
        if content:
            at = draw(st.integers(0, len(content) - 1))
            content[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=6))
    return bytes(content)


def documents(*valid: Any) -> st.SearchStrategy[bytes]:
    """Return content of a file of JSON: a valid one changed or damaged, or anything."""
    kinds: List[st.SearchStrategy[bytes]] = [
        st.binary(max_size=40),
        JSON.map(_dump),
        st.sampled_from([b'', b'[' * 100000, b'9' * 5000, b'\xff\xfe', b'\xef\xbb\xbf{}', b'null']),
    ]
    for value in valid:
        kinds += [changed(value).map(_dump), damaged(_dump(value))]
    return st.one_of(*kinds)


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()
