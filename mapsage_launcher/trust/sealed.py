"""Seals: an HMAC with the job's secret in front of bytes that travel between ranks.

The handshake authenticates the two ends of a connection (``handshake.py``), but not the bytes that
follow. Unpickling runs code, so ranks seal pickled bytes and check the seal before unpickling.
"""

from __future__ import annotations

import hashlib
import hmac

from mapsage_launcher.errors import UserError

_SEAL_BYTES = hashlib.sha256().digest_size


class BrokenSealError(UserError, RuntimeError):
    """Bytes from another rank do not carry the seal of this job."""


def seal(data: bytes, secret: bytes, purpose: str) -> bytes:
    """Return the bytes with their seal of 32 bytes in front.

    Args:
        data: Bytes to send.
        secret: Secret of the job.
        purpose: Name of the use. :func:`unseal` needs the same name.
    """
    return _compute_seal(data, secret, purpose) + data


def unseal(sealed: bytes, secret: bytes, purpose: str) -> bytes:
    """Check the seal and return the bytes that :func:`seal` got.

    Raises:
        BrokenSealError: If the bytes were changed, or sealed with another secret or purpose.
    """
    data = sealed[_SEAL_BYTES:]
    if not hmac.compare_digest(sealed[:_SEAL_BYTES], _compute_seal(data, secret, purpose)):
        raise BrokenSealError(
            f'{len(sealed)} bytes of {purpose} from another rank do not carry the seal of this '
            f'job: expected bytes from a rank that holds the same MAPSAGE_SECRET. Either somebody '
            f'writes into the connections between the machines (see docs/explanation/security.md), '
            f'or memory or network of one of them is at fault. Nothing was read from these bytes.'
        )
    return data


def _compute_seal(data: bytes, secret: bytes, purpose: str) -> bytes:
    return hmac.new(secret, purpose.encode() + b'\0' + data, hashlib.sha256).digest()
