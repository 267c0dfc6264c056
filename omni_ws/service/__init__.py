"""Sessions and their requests, above the engines and below the transports. Uses asyncio, but no sockets.

Each package imports only from those above it:

- ``recording``: writes sessions to files, to replay them later.
- ``observing``: metrics, logs, traces and profiles of sessions and requests.
- ``listening``: turn detection in the audio of an open microphone.
- ``conversation``: makes requests of the input of one session, and sends their answers.
- ``sessions``: opens sessions within the server's limits, and keeps sessions that outlive a connection.
- ``tokens``: sessions whose input and output are lists of tokens, served over gRPC.
"""
