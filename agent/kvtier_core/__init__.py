"""The engine core, a library without clock, socket or Kubernetes."""
