"""Features that other ranks compute: the encoder that sends them, and the head that receives.

Encoder: `sender.py`. Head: `streamed.py` (the feature source), `inbox.py` (all items), `item.py`
and `state.py` (one item), `blocks.py` (memory). `roles.py` decides which rank does what.
"""
