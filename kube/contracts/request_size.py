"""How large a request to a model may be: the gateway and our engine refuse a larger one with 413.

The engine reads more than a client may send, because a request grows on its way through the gateway: it wishes for
usage on each event, and a stream that goes on at another replica brings the ids of its tokens (`streams.py`). So what
the gateway has taken, the engine takes too.
"""

REQUEST_MIB = 8
REQUEST_BYTES = REQUEST_MIB << 20
"""A client's request."""
RESUME_TOKENS = 131_072
"""Tokens of one stream that can go on at another replica."""
REPLICA_REQUEST_BYTES = REQUEST_BYTES + 16 * RESUME_TOKENS
"""A request from the gateway: up to 11 bytes for each token id, the rest for what else is added."""
