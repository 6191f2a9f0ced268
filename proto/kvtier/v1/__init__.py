"""Version 1 of the wire: generated protocol stubs. Knows no cache, no cluster and no tensor."""
