"""The remote engine, which forwards requests to other servers with the OpenAI API, its *upstreams*."""
