"""A head that several ranks hold together: its features, its parameters, its gradients.

The ranks of a head replica train one copy of the head. `replica_features.py` brings the features of
an item to all of them; `tensor_parallel.py` and `trained_shares.py` split the head's weights over
them.
"""
