"""Seals for pickled data that travels between ranks.

The secret of a job and the handshake of its connections are in ``mapsage_launcher/trust/``.
docs/security.md describes the attacks that they prevent.
"""
