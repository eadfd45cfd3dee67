"""Authentication between the processes of a job, which share a secret.

``job_secret.py`` finds the secret, ``handshake.py`` proves at the start of a connection that both
ends know it, ``guard.py`` accepts connections with this proof, and ``sealed.py`` signs pickled
data.
docs/security.md describes the attacks that this prevents.
"""
