"""Sessions and their requests, between the transports above and the engines below. asyncio, no sockets."""
