"""Floor 5: transports. No policy is decided here.

One port serves HTTP/1.1 and WebSocket; gRPC, AudioSocket and Wyoming have ports of their own.
"""
