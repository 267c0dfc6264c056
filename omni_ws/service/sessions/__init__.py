"""The sessions of a server: their admission, their opening, and those that outlive a connection.

``factory`` opens every session within the limits of ``admission``. Two kinds outlive a connection: ``live`` sessions,
which a client can resume after it was disconnected, and ``mode_b`` sessions, whose input and result are carried by
many HTTP requests.
"""
