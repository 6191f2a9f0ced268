"""The wire: generated protocol stubs. Knows no cache, no cluster and no tensor."""
