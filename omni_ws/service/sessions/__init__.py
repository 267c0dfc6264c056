"""The sessions of a server: their admission, their opening, and those that outlive a connection.

``factory`` opens the conversation of every session. ``admission`` limits how many sessions and requests there are, for
all workers of the server together by ``shared_counts``. ``session`` has the Session, which a client can resume after it
was disconnected, and which can be saved and restored in another server. ``keeper`` writes a session to the store.
"""
