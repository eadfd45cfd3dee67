"""Machines that come and go while a job trains; the launcher's half is ``mapsage_launcher/nodes/``.

`nodes.py` compares the machines when their ranks meet, `heartbeat.py` names a machine that fell
silent, and `neighbor/` keeps the newest checkpoint in another machine's memory.
"""
