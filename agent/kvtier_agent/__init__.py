"""The node process around the core: servicers, registration, telemetry, command line."""
