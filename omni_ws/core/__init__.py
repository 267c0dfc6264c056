"""The protocol's logic without I/O: ordering, start policies, limits, token lists.

Nothing here imports an event loop, a clock, a socket or a thread. Time is an argument, ``now``: seconds of any
monotonic clock. Bytes and chunks go in; values and events come out.
"""
