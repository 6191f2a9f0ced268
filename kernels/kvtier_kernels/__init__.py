"""Pure tensor maths: attention states and the operations on them. Knows no cache, no request, no RPC."""
