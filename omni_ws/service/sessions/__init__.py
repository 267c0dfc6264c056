"""The sessions of a server: their admission, their opening, and those that outlive a connection.

``factory`` opens the conversation of every session within the limits of ``admission``, which count all workers of the
server by ``shared_counts``. ``session`` has the Session, which a client can resume after it was disconnected, and
which another server can go on with.
"""
