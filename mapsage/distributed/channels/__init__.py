"""Channels: small collectives that either complete or name the missing ranks.

Start with the interface in ``channel.py``. Callers open a channel in ``open_channels.py`` and use
it mostly through ``consensus.py`` and ``agreement.py``. ``mesh.py`` has the connections, and
``roll_call.py`` finds out which rank is missing.
"""
