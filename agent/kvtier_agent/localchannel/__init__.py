"""The local channel's server: attention frames over a Unix socket with tensors in shared memory."""
