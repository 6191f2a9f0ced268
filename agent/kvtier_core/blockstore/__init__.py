"""Shared, keyed, committed blocks of one cache: put, find, pin, fetch, delete, over the same tiers as
sessions."""
