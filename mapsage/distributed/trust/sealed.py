"""Bytes with an HMAC of the job's secret, for data that must not be read from a stranger.

The handshake proves who is at the other end of a connection, but later bytes are not
authenticated. Pickle runs code, so pickled bytes that travel between ranks are sealed, and a seal
is checked before they are read.
"""
from __future__ import annotations

import hashlib
import hmac

from mapsage.errors import UserError

_SEAL_BYTES = hashlib.sha256().digest_size


class BrokenSealError(UserError, RuntimeError):
    """Bytes from another rank do not carry the seal of this job."""


def seal(data: bytes, secret: bytes, purpose: str) -> bytes:
    """Return bytes with their seal in front, 32 bytes longer.

    Args:
        data: Bytes to send.
        secret: Secret of the job.
        purpose: What the bytes are for; equal for :func:`unseal`.
    """
    return _seal_of(data, secret, purpose) + data


def unseal(sealed: bytes, secret: bytes, purpose: str) -> bytes:
    """Return the bytes that :func:`seal` got.

    Raises:
        BrokenSealError: If they were changed, or sealed with another secret or for another purpose.
    """
    data = sealed[_SEAL_BYTES:]
    if not hmac.compare_digest(sealed[:_SEAL_BYTES], _seal_of(data, secret, purpose)):
        raise BrokenSealError(
            f'{len(sealed)} bytes of {purpose} from another rank do not carry the seal of this '
            f'job: expected bytes from a rank that holds the same MAPSAGE_SECRET. Either somebody '
            f'writes into the connections between the machines (see docs/security.md), or memory '
            f'or network of one of them is at fault. Nothing was read from these bytes.')
    return data


def _seal_of(data: bytes, secret: bytes, purpose: str) -> bytes:
    return hmac.new(secret, purpose.encode() + b'\0' + data, hashlib.sha256).digest()
