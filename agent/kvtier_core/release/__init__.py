"""Release enforcement on one node: fences, candidate leases, assignment, sampling and evidence windows.

Pure but for the injected clock and storage: no socket, no Kubernetes, no tensor.
"""
