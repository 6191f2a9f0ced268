"""Memory tiers behind one contract: where payloads lie, never what they mean."""
