"""Who belongs to a job: its secret, the handshake of every connection, and a private store."""
