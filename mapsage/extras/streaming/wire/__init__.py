"""Messages between an encoder and a head: headers, payloads, and the links that carry them.

From the bottom up: `header.py` and `payload.py` define the bytes, `connection.py` reads and writes
them on one socket, `link.py` reopens a broken connection, `hub.py` is the thread that runs all
links of a process, and `opening.py` connects the ranks at the start of a run.
"""
