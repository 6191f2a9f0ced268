"""The local channel's wire: what both ends of a Unix socket on one node must pack and unpack alike."""
