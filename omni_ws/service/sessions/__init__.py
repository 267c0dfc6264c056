"""Sessions of a server: who may open one, how long it lives, and how a client finds it again."""
