"""Process groups of torch.distributed.

``process_group.py`` starts the default group. ``staged.py`` sends device tensors through host
memory, ``simulated_eccl.py`` imitates a vendor's library, and ``replicas.py`` forms the groups of
head replicas.
"""
